"""Surgery on the weight update: what is recalled when its leading directions are taken away or kept alone.

In: an Observer and the model at some step. Out: recall of A and of the new people for each edit.

Only the matrices of the blocks are edited; embeddings, norms, biases and head stay as they are at that step.
Source: Palit et al. (2026), weight-update direction removal. At one step an edit also takes away what the new people
had gained, so edits must be compared at equal recall of the new people: `equal_recall`.
"""

import copy
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor

from psd_utils.spurious.biographies import generator
from psd_utils.spurious.shift import remove_random_part, remove_top_directions, top_directions
from psd_utils.spurious.transformer import Decoder
from psd_utils.spurious.transformer_measure import Observer

Edit = Callable[[Tensor, torch.Generator], Tensor]
EDITS: dict[str, Edit] = {
    "without_top_1": lambda change, draws: remove_top_directions(change, 1),
    "without_top_4": lambda change, draws: remove_top_directions(change, 4),
    "without_random_1": lambda change, draws: remove_random_part(change, 1, draws),
    "without_random_4": lambda change, draws: remove_random_part(change, 4, draws),
    "only_top_1": lambda change, draws: top_directions(change, 1).matrix,
    "only_top_4": lambda change, draws: top_directions(change, 4).matrix,
}
"""Edits of ΔW, the change of one matrix."""


@torch.no_grad()
def edited(start: Decoder, model: Decoder, edit: Edit, draws: torch.Generator) -> Decoder:
    """A copy of the model in which every block matrix is W(0) + edit(ΔW)."""
    copied = copy.deepcopy(model)
    for old, new in zip(start.blocks.parameters(), copied.blocks.parameters(), strict=True):
        if new.ndim == 2:
            new.copy_(old + edit(new - old, draws))
    return copied


def surgeries(observer: Observer, model: Decoder, seed: int, step: int) -> dict[str, float]:
    """EDIT_A and EDIT_new, the recalls under every edit, and share_1, share_4: the mean share of ‖ΔW‖² they concern."""
    row: dict[str, float] = {}
    for i, (name, edit) in enumerate(EDITS.items()):
        draws = generator(seed, "surgery", step, i)
        recalls = observer.recalls(edited(observer.start, model, edit, draws))
        row |= {f"{name}_{population}": recalls[f"recall_{population}"] for population in ("A", "new")}
    shares = [
        top_directions(new.detach() - old.detach(), 4).share.sum(-1)
        for old, new in zip(observer.start.blocks.parameters(), model.blocks.parameters(), strict=True)
        if new.ndim == 2
    ]
    return row | {"share_4": float(torch.stack(shares).mean())}


def equal_recall(table: pd.DataFrame, levels: Sequence[float] = (0.3, 0.5, 0.7, 0.9)) -> pd.DataFrame:
    """Recall of A where each edited model first recalls as many of the new people as a level says.

    Args:
        table: rows of one condition with the columns of `surgeries`.
        levels: recalls of the new people, 0–1.

    Returns:
        seed, edit ("trained" for none), level, step, recall_A, recall_new; a level never reached is left out.
    """
    rows = []
    columns = {"trained": ("recall_A", "recall_new")} | {e: (f"{e}_A", f"{e}_new") for e in EDITS}
    for seed, run in table.groupby("seed"):
        run = run.sort_values("step")
        for edit, (old, new) in columns.items():
            for level in levels:
                reached = run[run[new] >= level]
                if len(reached):
                    first = reached.iloc[0]
                    values = {"step": int(first["step"]), "recall_A": first[old], "recall_new": first[new]}
                    rows.append({"seed": seed, "edit": edit, "level": level, **values})
    return pd.DataFrame(rows)
