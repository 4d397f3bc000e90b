"""One fitted model of a study: its loss rows, corrections and records, kept on disk so that a killed run resumes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .correction import Correction
from .errors import PsdError
from .files import read_table, read_tensors, write_table
from .head import OutputModel
from .loss_profile import profile_rows
from .losses import loss_rows
from .recovery import DAMAGE_CONTROL
from .selection import Chosen, choose_corrections


@dataclass(frozen=True)
class Part:
    """A model's rows of losses.parquet and of loss_profile.parquet, and by kind its correction and the fit's record."""

    losses: pd.DataFrame
    profile: pd.DataFrame
    corrections: Mapping[str, Correction]
    records: Mapping[str, Mapping[str, Any]]

    def mean_loss(self, split: str) -> float:
        """Return the mean uncorrected loss on a split, nats per token: a ratio of sums."""
        rows = self.losses[(self.losses["split"] == split) & (self.losses["correction"] == "none")]
        return float(rows["loss_sum"].sum() / rows["tokens"].sum())


def fit_part(
    model: OutputModel,
    sets: Mapping[tuple[str, ...], torch.Tensor],
    *,
    pair: str,
    label: str,
    vocabulary: int,
    tokenizer: str,
    tokens: pd.DataFrame,
    facts: Mapping[str, Any],
) -> Part:
    """Return a model's fits of several kinds (`sets`: kinds -> their ids) with its exact losses on every split.

    `label` is base, derived, or damaged-0, damaged-1, …; `tokens` is the text's `token_table`; `facts` are added to
    every record.
    """
    chosen: dict[str, Chosen] = {}
    for kinds, ids in sets.items():
        chosen |= choose_corrections(model, ids, kinds)
    corrections = {
        kind: replace(c.correction, vocabulary=vocabulary, tokenizer=tokenizer) for kind, c in chosen.items()
    }
    member, _, seed = label.partition("-")
    labels: dict[str, Any] = {"pair": pair, "member": member, "damage_seed": int(seed) if seed else None}
    on_eval = model.losses("eval", list(corrections.values()))
    control = DAMAGE_CONTROL if seed else None
    losses = loss_rows(model, corrections, **labels, control=control, known={"eval": on_eval})
    profile = profile_rows(model.splits["eval"], on_eval, list(corrections), tokens, labels)
    return Part(losses, profile, corrections, {kind: {**_record(c), **facts} for kind, c in chosen.items()})


def _record(chosen: Chosen) -> dict[str, Any]:
    """Return what is kept of a fit beside its correction: penalty, selection, convergence."""
    return {
        "kind": chosen.fit.kind,
        "penalty": chosen.fit.penalty,
        "fitted_temperature": chosen.fit.correction.temperature,
        "set_size": int(chosen.fit.correction.ids.numel()),
        "selected_none": chosen.selected_none,
        "select_loss": chosen.select_loss,
        "certified_error": chosen.certified_error,
        **asdict(chosen.fit.convergence),
    }


def write_part(folder: Path, label: str, part: Part) -> None:
    """Write corrections, each with its record, then the rows: their presence says that the part is whole."""
    for kind, correction in part.corrections.items():
        correction.save(folder / "corrections" / f"{label}-{kind}.safetensors", record=part.records[kind])
    write_table(folder / "parts" / f"profile-{label}.parquet", part.profile)
    write_table(folder / "parts" / f"{label}.parquet", part.losses)


def read_part(folder: Path, label: str) -> Part | None:
    """Return a finished part, or None if it is not there.

    Raises:
        PsdError: a file of the part is damaged or missing; it names the file to delete.
    """
    path = folder / "parts" / f"{label}.parquet"
    if not path.is_file() or not path.with_name(f"profile-{path.name}").is_file():
        return None
    losses, profile = read_table(path), read_table(folder / "parts" / f"profile-{label}.parquet")
    corrections, records = {}, {}
    for kind in losses["correction"].unique():
        file = folder / "corrections" / f"{label}-{kind}.safetensors"
        try:
            corrections[kind] = Correction.load(file)
        except PsdError as error:
            raise PsdError(f"{error}; delete {path} and run again: only this model is fitted anew") from error
        records[kind] = read_tensors(file)[1]["record"]
    return Part(losses, profile, corrections, records)
