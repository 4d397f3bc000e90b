"""Matched learning rates kept on disk, so that the explorer need not search for them.

In: a grid of settings. Out: data/spurious/matched_rates.csv, made anew by `python -m
    psd_utils.spurious.rates` (minutes).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from psd_utils.spurious.acceptance import data_folder
from psd_utils.spurious.memory import MemorySettings, make_world
from psd_utils.spurious.training import Pretrained, match_rate, pretrain

GRID: dict[str, tuple[Any, ...]] = {
    "normalisation": ("rms", "none"),
    "alpha": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
    "n_new": (16, 32, 64, 96, 128, 192),
    "new_answers": ("Y", "all"),
}
"""What the explorer offers, all else as in the base model. Beyond it the gate is not met at step 200."""

SEEDS = (0, 1)
"""The seeds of the explorer, and of the stored rates."""


def match_grid(seeds: Sequence[int] = SEEDS, progress: bool = False) -> pd.DataFrame:
    """Match the rate in every cell of the grid: one column for each axis, then seed, rate, gate_step,
    matched.
    """
    parts = []
    known: dict[MemorySettings, Pretrained] = {}
    for values in tqdm(list(itertools.product(*GRID.values())), disable=not progress, leave=False):
        cell: dict[str, Any] = dict(zip(GRID, values, strict=True))
        settings = MemorySettings(**cell)
        world = make_world(settings, seeds)
        if settings.before_fine_tuning not in known:
            known[settings.before_fine_tuning] = pretrain(world)
        found = match_rate(world, known[settings.before_fine_tuning])
        columns = {"rate": found.rate, "gate_step": found.gate_step, "matched": found.matched}
        parts.append(pd.DataFrame({**cell, "seed": list(seeds), **{k: v.numpy() for k, v in columns.items()}}))
    return pd.concat(parts, ignore_index=True)


def load_rates(path: Path | None = None) -> pd.DataFrame:
    """The stored table; None reads the repository's own.

    Raises:
        FileNotFoundError: no such file.
    """
    return pd.read_csv(path or data_folder() / "matched_rates.csv")


def stored_rate(table: pd.DataFrame, settings: MemorySettings, seeds: Sequence[int] = SEEDS) -> Tensor:
    """The stored rates of some settings, one for each seed, [S].

    Raises:
        KeyError: settings or seeds that are not in the table.
    """
    cell = table["seed"].isin(seeds)
    for axis in GRID:
        cell &= table[axis] == getattr(settings, axis)
    rates = table[cell].set_index("seed")["rate"]
    if not set(seeds) <= set(rates.index):
        wanted = ", ".join(f"{axis} = {getattr(settings, axis)}" for axis in GRID)
        raise KeyError(
            f"No stored rate for {wanted}, seeds {tuple(seeds)}. The grid is {GRID}, seeds {SEEDS}; "
            "match_rate finds a rate for any other settings."
        )
    return torch.tensor(rates.loc[list(seeds)].to_numpy(), dtype=torch.float64)


if __name__ == "__main__":
    match_grid(progress=True).to_csv(data_folder() / "matched_rates.csv", index=False, float_format="%.8g")
