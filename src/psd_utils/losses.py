"""Output model and corrections -> the rows of losses.parquet."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from .capture import TextStates
from .corpus import SPLITS
from .correction import Correction
from .head import OutputModel


def loss_rows(
    model: OutputModel,
    corrections: Mapping[str, Correction],
    *,
    pair: str,
    member: str,
    control: str | None = None,
    damage_seed: int | None = None,
    setting: str | None = None,
    splits: Sequence[str] = SPLITS,
    known: Mapping[str, torch.Tensor] | None = None,
) -> pd.DataFrame:
    """Return loss sums of a model by correction, split and document: the columns of losses.parquet (DESIGN §5).

    Losses are exact, nats; one pass a split serves all corrections. `known` holds the losses [corrections, tokens] of
    splits that had their pass already.
    """
    frames = []
    for split in splits:
        losses = known[split] if known and split in known else model.losses(split, list(corrections.values()))
        labels = {"pair": pair, "member": member, "control": control, "damage_seed": damage_seed}
        frames += [
            rows_of(model.splits[split], values, split, kind, setting, labels)
            for kind, values in zip(corrections, losses, strict=True)
        ]
    return typed(pd.concat(frames, ignore_index=True))


def rows_of(
    states: TextStates, values: torch.Tensor, split: str, correction: str, setting: str | None, labels: Mapping
) -> pd.DataFrame:
    """Return the rows of one correction on one split, from losses [tokens] in nats; `labels` fills the rest."""
    columns = {
        **labels,
        "correction": correction,
        "setting": setting,
        "document": list(states.keys),
        "split": split,
        "tokens": states.lengths.numpy(),
        "loss_sum": states.document_sums(values).numpy(),
    }
    return pd.DataFrame(columns)


def typed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return loss rows with the column types of losses.parquet, whichever of their values are null."""
    text = ("pair", "member", "control", "correction", "setting", "document", "split")
    return rows.astype({**dict.fromkeys(text, "string"), "damage_seed": "Int64"})
