"""How cost grows: the passes with the tokens, the fits not with the vocabulary: `python benchmarks/scaling.py`.

Writes ratios to the first size as JSON and the plot to figures/engine_scaling.png.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib
import torch
from common import HERE, Problem, seconds, setting, write, zipf_problem

from psd_utils import Correction, head_statistics
from psd_utils.fit import fit_correction
from psd_utils.head import top_k_ids
from psd_utils.kernels import corrected_losses

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = ("statistics", "exact loss pass", "fit of bias and temperature, per evaluation")
PENALTY = 1e-4


def work(problem: Problem, top_k: int) -> dict[str, Callable[[], float]]:
    """Return the three parts as functions that time themselves."""
    p = problem
    ids = top_k_ids(p.targets, top_k, torch.empty(0, dtype=torch.int64), p.head.shape[0])
    # the same number of ids whatever the text holds, so that only the tokens or the vocabulary change
    missing = torch.ones(p.head.shape[0], dtype=torch.bool)
    missing[ids] = False
    ids = torch.cat([ids, missing.nonzero()[: top_k - ids.numel(), 0]])
    made = head_statistics(p.hidden, p.head, p.targets, ids)
    correction = Correction(ids, torch.linspace(-1, 1, top_k), 1 / 1.1)

    def fit() -> float:
        evaluations: list[int] = []
        took = seconds(
            lambda: evaluations.append(fit_correction(made, "bias_temperature", PENALTY).convergence.iterations)
        )
        return took / evaluations[0]

    return {
        PARTS[0]: lambda: seconds(lambda: head_statistics(p.hidden, p.head, p.targets, ids)),
        PARTS[1]: lambda: seconds(lambda: corrected_losses(p.hidden, p.head, p.targets, [None, correction])),
        PARTS[2]: fit,
    }


def sweep(problems: dict[int, Problem], top_k: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return, by part and size, the median over rounds of the cost relative to the first size of the same round."""
    timers = {size: work(problem, top_k) for size, problem in problems.items()}
    first = next(iter(timers))
    ratios: dict[str, dict[int, list[float]]] = {part: {size: [] for size in timers} for part in PARTS}
    for part in PARTS:
        for size in timers:
            timers[size][part]()
        for _ in range(rounds):
            taken = {size: timers[size][part]() for size in timers}
            for size, took in taken.items():
                ratios[part][size].append(took / taken[first])
    return {
        part: {str(size): round(statistics.median(values), 3) for size, values in by_size.items()}
        for part, by_size in ratios.items()
    }


def draw(results: dict[str, Any]) -> None:
    """Draw cost against tokens and against the vocabulary."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, (key, label) in zip(axes, (("tokens", "tokens"), ("vocabulary", "vocabulary")), strict=True):
        for (part, by_size), marker in zip(results[key].items(), "os^", strict=True):
            sizes = [int(size) for size in by_size]
            axis.plot(sizes, list(by_size.values()), marker=marker, label=part)
        axis.plot(sizes, [size / sizes[0] for size in sizes], color="0.6", linestyle=":", label="proportional")
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes[0].set_ylabel("cost, relative to the smallest size")
    axes[0].legend(frameon=False, fontsize=8)
    path = HERE.parent / "figures" / "engine_scaling.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"written: {path.relative_to(HERE.parent)}")


def main() -> None:
    """Run both sweeps, write the JSON and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smallest", type=int, default=2048, help="tokens of the smallest size")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokens = [arguments.smallest * 2**i for i in range(4)]
    vocabularies = [6288 * 2**i for i in range(4)]
    whole = zipf_problem(vocabularies[1], tokens[-1], 128)
    by_tokens = {n: Problem(whole.hidden[:n], whole.head, whole.targets[:n]) for n in tokens}
    by_vocabulary = {v: zipf_problem(v, tokens[1], 128) for v in vocabularies}
    results: dict[str, Any] = {
        "setting": setting(),
        "tokens": sweep(by_tokens, 1024, arguments.rounds),
        "vocabulary": sweep(by_vocabulary, 1024, arguments.rounds),
        "fixed": {"width": 128, "set": 1024, "vocabulary": vocabularies[1], "tokens": tokens[1]},
    }
    for key in ("tokens", "vocabulary"):
        for part, by_size in results[key].items():
            print(f"{part}, by {key}: " + ", ".join(f"{size}: {ratio:g}" for size, ratio in by_size.items()))
    write("scaling", results)
    draw(results)


if __name__ == "__main__":
    main()
