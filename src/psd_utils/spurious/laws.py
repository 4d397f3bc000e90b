"""The published laws of collapse and erosion, as sweeps over one axis at a time and fits with their R².

In: axes and values. Out: one row per seed and cell, and the fitted numbers.

Source: Palit et al. (2026), toy model, sweeps and laws. Every cell is gate-matched, except on the dose
axis, whose values multiply the base cell's matched rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from psd_utils.spurious.memory import BASE, MemorySettings, make_world
from psd_utils.spurious.training import PAPER, Protocol, fine_tune, match_rate, pretrain
from psd_utils.spurious.trajectory import EVENT_WINDOW, Trajectory, checkpoint_steps

AXES: dict[str, tuple[float, ...]] = {
    "alpha": (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
    "n_new": (16, 32, 50, 64, 128, 256),
    "dimension": (64, 96, 128, 192, 256),
    "n_old": (64, 128, 192, 256),
    "n_values": (16, 32, 64, 128),
    "dose": (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8),
}
"""The sweep's axes and values; "dose" multiplies the matched fine-tuning rate."""


EQUAL_TRAINING = 600
"""Steps at the matched rate after which doses are compared at equal training (step × rate)."""


@dataclass(frozen=True)
class Fit:
    """A straight-line fit: slope, intercept (of the logarithms, for a power law), R² and number of points."""

    slope: float
    intercept: float
    r2: float
    n: int


def sweep(
    axes: Mapping[str, Sequence[float]] = AXES,
    seeds: Sequence[int] = (0, 1, 2),
    n_steps: int = 5000,
    base: MemorySettings = BASE,
    protocol: Protocol = PAPER,
    progress: bool = False,
) -> pd.DataFrame:
    """Run every cell of every axis.

    The event window is 400 steps, on the dose axis 400 / multiplier.

    Returns:
        setting, value, then the columns of Trajectory.summary, and matched (whether the rate met the gate). On the dose
        axis also trough_every_step and trough_step_every_step (the trough among all of the first 60 steps, not only
        every fifth), and at_equal_training (accuracy on A after 600 / multiplier steps: as much training, whatever
        the rate).

    Raises:
        ValueError: an axis that is neither "dose" nor a field of MemorySettings in AXES.
    """
    unknown = set(axes) - set(AXES)
    if unknown:
        raise ValueError(f"No axis {', '.join(sorted(unknown))}; expected some of {', '.join(AXES)}.")
    cells = [(axis, value) for axis, values in axes.items() for value in values]
    parts = []
    for axis, value in tqdm(cells, desc="sweep", disable=not progress, leave=False):
        parts.append(_cell(axis, value, seeds, n_steps, base, protocol).assign(setting=axis, value=float(value)))
    table = pd.concat(parts, ignore_index=True)
    return table[["setting", "value", *[c for c in table.columns if c not in ("setting", "value")]]]


def _cell(
    axis: str, value: float, seeds: Sequence[int], n_steps: int, base: MemorySettings, protocol: Protocol
) -> pd.DataFrame:
    dose = value if axis == "dose" else 1.0
    settings = base
    if axis != "dose":
        changes: dict[str, Any] = {axis: int(value) if isinstance(getattr(base, axis), int) else float(value)}
        settings = replace(base, **changes)
    world = make_world(settings, seeds)
    start = pretrain(world, protocol)
    matched = match_rate(world, start, protocol)
    steps = checkpoint_steps(n_steps)
    every = range(min(60, n_steps)) if axis == "dose" else ()
    run = fine_tune(world, start.weights, matched.rate * dose, n_steps, checkpoints=(*steps, *every))
    table = run.thin(steps).summary(EVENT_WINDOW / dose).assign(matched=matched.matched.numpy())
    if axis == "dose":
        fine = run.summary(EVENT_WINDOW / dose)
        table["trough_every_step"], table["trough_step_every_step"] = fine["trough"], fine["trough_step"]
        same = min(n_steps, round(EQUAL_TRAINING / dose))
        table["at_equal_training"] = run.at("accuracy_A", same).numpy()
    return table


def cell_means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds for every axis and value."""
    return table.drop(columns=["seed"]).groupby(["setting", "value"], sort=False).mean().reset_index()


def line(x: ArrayLike, y: ArrayLike) -> Fit:
    """Least squares y = slope·x + intercept.

    Raises:
        ValueError: fewer than two different x.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(np.unique(x)) < 2:
        raise ValueError(f"A line needs at least two different x; found {np.unique(x).tolist()}.")
    slope, intercept = np.polyfit(x, y, 1)
    residual = ((y - slope * x - intercept) ** 2).sum()
    total = ((y - y.mean()) ** 2).sum()
    return Fit(float(slope), float(intercept), float(1 - residual / total) if total > 0 else math.nan, len(x))


def power_law(x: ArrayLike, y: ArrayLike) -> Fit:
    """Least squares log y = slope·log x + intercept; the slope is the exponent."""
    return line(np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float)))


def erosion_in_time(run: Trajectory, since: int = 1000) -> pd.DataFrame:
    """ε(t) = c ln t + k for t ≥ since, one row per seed: seed, c, k, r2, A_since, A_end.

    ε is the mean length of A's individual displacements on the readout states.
    """
    steps = np.array(run.steps)
    late = steps >= since
    rows = []
    for i, seed in enumerate(run.seeds):
        fit = line(np.log(steps[late]), run["individual"][:, i].numpy()[late])
        accuracies = run["accuracy_A"][:, i].numpy()[late]
        rows.append(
            {
                "seed": seed,
                "c": fit.slope,
                "k": fit.intercept,
                "r2": fit.r2,
                "A_since": accuracies[0],
                "A_end": accuracies[-1],
            }
        )
    return pd.DataFrame(rows)


def long_run(seeds: Sequence[int] = (0, 1, 2), n_steps: int = 30_000, base: MemorySettings = BASE) -> Trajectory:
    """The model arm over a long time, for the law of erosion."""
    world = make_world(base, seeds)
    start = pretrain(world)
    return fine_tune(world, start.weights, match_rate(world, start).rate, n_steps)


def timing(table: pd.DataFrame) -> dict[str, Fit]:
    """Power laws of the trough's and the recovery's step in the rate, from the dose axis (means over seeds).

    "trough_every_step" is the trough's among all of the first 60 steps, which resolves the fast runs. Cells without
    a recovery of at least 0.25 say nothing about its step and are left out of that fit.
    """
    dose = cell_means(table[table["setting"] == "dose"])
    back = dose[dose["recovery"] >= 0.25]
    return {
        "trough": power_law(dose["value"], dose["trough_step"]),
        "trough_every_step": power_law(dose["value"], dose["trough_step_every_step"]),
        "recovery": power_law(back["value"], back["recovery_step"]),
    }


def depth(table: pd.DataFrame) -> dict[str, Fit]:
    """Power laws of the peak of ⟨s,w⟩ in n_new, in α (above 0) and in √α·n_new jointly (means over seeds)."""
    alpha_axis = cell_means(table[(table["setting"] == "alpha") & (table["value"] > 0)])
    size_axis = cell_means(table[table["setting"] == "n_new"])
    base = BASE
    both_x = np.concatenate([np.sqrt(alpha_axis["value"]) * base.n_new, math.sqrt(base.alpha) * size_axis["value"]])
    both_y = np.concatenate([alpha_axis["peak_content"], size_axis["peak_content"]])
    return {
        "n_new": power_law(size_axis["value"], size_axis["peak_content"]),
        "alpha": power_law(alpha_axis["value"], alpha_axis["peak_content"]),
        "joint": power_law(both_x, both_y),
    }


@dataclass(frozen=True)
class Withdrawal:
    """The recovery-level law f = 1 − K/peak: K, its spread over runs, R² of f, and the number of runs."""

    K: float
    sd: float
    r2: float
    n: int


def withdrawal(table: pd.DataFrame, smallest_peak: float = 0.3) -> Withdrawal:
    """Fit the constant K: how much of the shift's content stays, whatever its peak was.

    f is the withdrawn share of ⟨s,w⟩, (peak − end)/peak; runs with a smaller peak than `smallest_peak` are
    left out. K is the mean of what stays, and R² compares 1 − K/peak with f over runs.
    """
    runs = table[table["peak_content"] >= smallest_peak]
    peak, stays = runs["peak_content"].to_numpy(), runs["end_content"].to_numpy()
    withdrawn = 1 - stays / peak
    K = float(stays.mean())
    residual = ((withdrawn - 1 + K / peak) ** 2).sum()
    total = ((withdrawn - withdrawn.mean()) ** 2).sum()
    return Withdrawal(K, float(stays.std(ddof=1)), float(1 - residual / total), len(runs))
