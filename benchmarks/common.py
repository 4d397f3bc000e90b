"""What the benchmarks share: a Zipf-like problem, paired timing, and results as JSON (ratios, no absolute times)."""

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Problem:
    """Final hidden states [N, width], a head [V, width] and targets [N] of a made-up model and text."""

    hidden: torch.Tensor
    head: torch.Tensor
    targets: torch.Tensor

    def damaged(self, seed: int) -> "Problem":
        """Return the same text under a perturbed head: the stand-in for a derived model."""
        g = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.head.shape, generator=g) * 0.3 / math.sqrt(self.head.shape[1])
        return Problem(self.hidden, self.head + noise, self.targets)


def zipf_problem(vocabulary: int, tokens: int, width: int, seed: int = 0) -> Problem:
    """Return a problem whose tokens have Zipf-like frequencies and entropies from near 0 to about 8 nats.

    The last hidden unit is constant and its head column holds −log rank; the other units grow in strength from token
    to token. Targets are drawn from the model at β = 1.25 with a tilt by token, so that there is something to fit.
    """
    g = torch.Generator().manual_seed(seed)
    rank = torch.randperm(vocabulary, generator=g).float() + 1
    head = torch.randn(vocabulary, width, generator=g) / math.sqrt(width)
    head[:, -1] = -rank.log() / 3
    strength = torch.linspace(0.5, 6, tokens)[torch.randperm(tokens, generator=g)]
    hidden = torch.randn(tokens, width, generator=g) * strength[:, None]
    hidden[:, -1] = 3
    tilt = torch.randn(vocabulary, generator=g) * 0.5
    drawn = [
        torch.multinomial((1.25 * (h @ head.T) + tilt).softmax(1), 1, generator=g)[:, 0] for h in hidden.split(256)
    ]
    return Problem(hidden, head, torch.cat(drawn))


def seconds(run: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(ours: Callable[[], Any], others: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return, by alternative, the ratios alternative / ours of runs that alternate, after one warm-up of each."""
    ours()
    for other in others.values():
        other()
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(rounds):
        own = seconds(ours)
        for name, other in others.items():
            ratios[name].append(seconds(other) / own)
    return ratios


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median, lowest and highest ratio."""
    return {k: round(f(ratios), 2) for k, f in (("median", statistics.median), ("lowest", min), ("highest", max))}


def in_words(ratio: Mapping[str, float]) -> str:
    """Return "3.1 (2.9 to 3.3)"."""
    return f"{ratio['median']:.3g} ({ratio['lowest']:.3g} to {ratio['highest']:.3g})"


def version_of(package: str) -> str | None:
    """Return an installed package's version, or None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def setting() -> dict[str, Any]:
    """Return what a reader needs to place the ratios: versions, threads, processor family."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def peak_bytes(script: str, *arguments: str) -> int:
    """Run a child whose last line of output is the bytes that it added to its resident memory at most."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def write(name: str, results: Mapping[str, Any]) -> None:
    """Write results as JSON under benchmarks/results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {path.relative_to(HERE.parent)}")
