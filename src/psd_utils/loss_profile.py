"""Where in a text the loss sits: summed by position in the document, and by frequency and class of the target.

A few dozen rows per model and correction, so that pictures of it need neither captures nor models.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch

from .capture import TextStates
from .token_table import CLASSES

AXES = ("position", "frequency", "class")
POSITION_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""First positions of the bins: how many tokens of the document come before the target."""
COUNT_EDGES = (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
"""First counts of the bins: how often the target occurs in `fit`."""
COLUMNS = ("pair", "member", "damage_seed", "correction", "axis", "bin", "label", "tokens", "loss_sum")


def profile_rows(
    states: TextStates,
    losses: torch.Tensor,
    corrections: Sequence[str],
    tokens: pd.DataFrame,
    labels: Mapping[str, Any],
) -> pd.DataFrame:
    """Return loss sums by bin: the columns `COLUMNS`, a row per correction, axis and bin that holds tokens.

    `losses` [corrections, tokens] are nats, of a split whose `states` say lengths and targets; `tokens` is a
    `token_table` with the counts of `fit`; `labels` gives pair, member and damage_seed. For each correction the sums of
    one axis add up to the loss of the split.
    """
    places = bins_of(states, tokens)
    frames = []
    for axis, (index, names) in places.items():
        counts = torch.bincount(index, minlength=len(names))
        sums = torch.zeros(len(corrections), len(names), dtype=torch.float64)
        sums.index_add_(1, index, losses.double().cpu())
        held = counts.nonzero()[:, 0].tolist()
        for kind, own in zip(corrections, sums, strict=True):
            columns = {
                "correction": kind,
                "axis": axis,
                "bin": held,
                "label": [names[b] for b in held],
                "tokens": counts[held].numpy(),
                "loss_sum": own[held].numpy(),
            }
            frames.append(pd.DataFrame({**labels, **columns}))
    text = dict.fromkeys(("pair", "member", "correction", "axis", "label"), "string")
    rows = pd.concat(frames, ignore_index=True).astype({**text, "damage_seed": "Int64"})
    return rows[list(COLUMNS)]


def bins_of(states: TextStates, tokens: pd.DataFrame) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """Return for each axis the bin of every token, int64 [tokens], and the names of the bins."""
    starts = states.lengths.cumsum(0) - states.lengths
    position = torch.arange(len(states.targets)) - torch.repeat_interleave(starts, states.lengths)
    count = torch.as_tensor(tokens["count"].to_numpy(np.int64, copy=True))[states.targets]
    classes = torch.tensor([CLASSES.index(name) for name in tokens["token_class"]])[states.targets]
    return {
        "position": (_bin(position, POSITION_EDGES), edge_labels(POSITION_EDGES)),
        "frequency": (_bin(count, COUNT_EDGES), edge_labels(COUNT_EDGES)),
        "class": (classes, list(CLASSES)),
    }


def _bin(values: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
    return torch.bucketize(values, torch.tensor(edges), right=True) - 1


def edge_labels(edges: Sequence[int]) -> list[str]:
    """Return the bins between first values in words, such as 0, 1–2, 3–9, …, 100,000 and more."""
    names = [f"{a:,}" if b == a + 1 else f"{a:,}–{b - 1:,}" for a, b in pairwise(edges)]
    return [*names, f"{edges[-1]:,} and more"]
