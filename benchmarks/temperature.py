"""Temperature alone, beside the calibration libraries: `python benchmarks/temperature.py`.

They want the logits N × V in memory, so the sizes are small. Each fits on the same logits; its time is the fit alone,
with the logits given, while ours includes the pass over hidden × headᵀ that makes the statistics. A library that is not
installed, or that fails, is listed so. Needed for all: pip install scikit-learn netcal probmetrics
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import in_words, paired, setting, summary, version_of, write, zipf_problem

from psd_utils import head_statistics
from psd_utils.fit import fit_correction


def scikit_learn(logits: np.ndarray, targets: np.ndarray) -> float:
    """Fit by scikit-learn's bounded search in log β, in float64: in float32 it stops short of 1e-4."""
    from sklearn.calibration import _TemperatureScaling

    return float(1 / _TemperatureScaling().fit(logits.astype(np.float64), targets).beta_)


def netcal(logits: np.ndarray, targets: np.ndarray) -> float:
    """Fit by netcal, which takes probabilities and clips them: in float64, so that it clips less."""
    from netcal.scaling import TemperatureScaling

    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    fitted = TemperatureScaling()
    fitted.fit(probabilities, targets)
    return float(1 / np.ravel(fitted.temperature)[0])


def probmetrics(logits: np.ndarray, targets: np.ndarray) -> float:
    """Fit by probmetrics' bisection in log β."""
    from probmetrics.calibrators.temperature_scaling import TemperatureScalingCalibrator
    from probmetrics.distributions import CategoricalLogits

    fitted = TemperatureScalingCalibrator(max_bisection_steps=60)
    fitted.fit_torch(CategoricalLogits(torch.from_numpy(logits)), torch.from_numpy(targets))
    return float(1 / fitted.invtemp_)


SAME_TEMPERATURE = 1e-4

LIBRARIES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "scikit-learn": scikit_learn,
    "netcal": netcal,
    "probmetrics": probmetrics,
}


def compare(vocabulary: int, tokens: int, width: int, rounds: int) -> dict[str, Any]:
    """Return each library's temperature beside ours, and the ratio of times."""
    problem = zipf_problem(vocabulary, tokens, width)
    logits = (problem.hidden @ problem.head.T).numpy()
    targets = problem.targets.numpy()
    empty = torch.empty(0, dtype=torch.int64)

    def ours() -> float:
        statistics = head_statistics(problem.hidden, problem.head, problem.targets, empty)
        return fit_correction(statistics, "temperature").correction.temperature

    # the same fit in float64, to judge everyone's last digits
    exact = fit_correction(
        head_statistics(problem.hidden.double(), problem.head.double(), problem.targets, empty), "temperature"
    ).correction.temperature
    result: dict[str, Any] = {"vocabulary": vocabulary, "tokens": tokens, "width": width, "libraries": {}}
    result["our_error_in_temperature"] = abs(ours() - exact)
    for name, fit in LIBRARIES.items():
        found = version_of(name)
        if found is None:
            result["libraries"][name] = "absent"
            continue
        try:
            difference = abs(fit(logits, targets) - exact)
            if difference > SAME_TEMPERATURE:
                result["libraries"][name] = f"{found}: another temperature, off by {difference:.2g}; no ratio"
            else:
                ratio = summary(paired(ours, {name: lambda fit=fit: fit(logits, targets)}, rounds)[name])
                result["libraries"][name] = {"version": found, "off_by": difference, "time_over_ours": ratio}
        except Exception as error:  # whatever way a library fails in is a result
            result["libraries"][name] = f"{found}: failed, {type(error).__name__}: {str(error)[:200]}"
    for name, entry in result["libraries"].items():
        if isinstance(entry, str):
            print(f"V {vocabulary}, N {tokens}: {name} {entry}")
        else:
            print(
                f"V {vocabulary}, N {tokens}: {in_words(entry['time_over_ours'])} times faster than {name} "
                f"{entry['version']}, whose temperature is off by {entry['off_by']:.1e} "
                f"(ours by {result['our_error_in_temperature']:.1e})"
            )
    return result


def main() -> None:
    """Run two sizes, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    sizes = ((2048, 4096, 64), (8192, 2048, 128))
    write("temperature", {"setting": setting(), "sizes": [compare(*size, arguments.rounds) for size in sizes]})


if __name__ == "__main__":
    main()
