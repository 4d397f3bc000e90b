"""Update surgery on a whole model: the leading directions of every block matrix's change are taken out again.

In: a fine-tuned model and the block matrices of its base. Out: the same model with edited weights, for as long as a
`with` block lasts. Embeddings, output head, norms and biases stay as they were trained.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import svds
from torch import Tensor, nn

from psd_utils.spurious.recall import output_head
from psd_utils.spurious.shift import SingularPart, random_part, top_directions

log = logging.getLogger(__name__)

FULL_SVD = 512
"""Up to this smaller side all singular values are computed; beyond it Lanczos finds the leading ones alone."""


@dataclass(frozen=True)
class Edit:
    """What is done to an update: nothing ("trained"), or a part of some rank removed ("remove", "random")."""

    kind: str = "trained"
    rank: int = 0

    @property
    def name(self) -> str:
        """The edit as one word, such as remove_1."""
        return f"{self.kind}_{self.rank}" if self.rank else self.kind


TRAINED = Edit()


def edits_of(ranks: tuple[int, ...]) -> tuple[Edit, ...]:
    """The trained model, and for every rank the removal and its random control."""
    return (TRAINED, *(Edit(kind, rank) for rank in ranks for kind in ("remove", "random")))


def block_matrices(model: Any) -> dict[str, Tensor]:
    """Name -> weight (a view, no copy) of every matrix that is neither an embedding nor the output head."""
    head = output_head(model).weight
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(head)}
    weights = {name: p for name, p in model.named_parameters() if id(p) not in outside}
    stacked = [name for name, p in weights.items() if p.ndim > 2]
    if stacked:
        log.warning("%d stacked weights, such as %s, are left as trained by surgery.", len(stacked), stacked[0])
    return {name: p.detach() for name, p in weights.items() if p.ndim == 2}


def leading_parts(base: Mapping[str, Tensor], model: Any, rank: int) -> dict[str, SingularPart]:
    """Name -> leading singular part (at most `rank` directions) of each block matrix's change, float32 on the CPU.

    Raises:
        ValueError: matrices that the base does not have in that shape, or weights that are not finite.
    """
    parts = {}
    for name, weight in block_matrices(model).items():
        if name not in base or base[name].shape != weight.shape:
            found = tuple(base[name].shape) if name in base else "nothing"
            raise ValueError(
                f"{name} is {tuple(weight.shape)} here and {found} in the base: not the same architecture."
            )
        parts[name] = leading_part(weight.float().cpu() - base[name].float().cpu(), rank)
    return parts


def leading_part(change: Tensor, rank: int) -> SingularPart:
    """The leading singular part of one matrix, of at most `rank` directions (never more than its smaller side).

    Raises:
        ValueError: values that are not finite.
    """
    if not bool(torch.isfinite(change).all()):
        raise ValueError("A weight change holds NaN or infinity: the checkpoint is broken.")
    rank = min(rank, *change.shape)
    norm = change.double().square().sum()
    if min(change.shape) <= FULL_SVD or rank == min(change.shape) or norm == 0:
        return top_directions(change, rank)
    # a fixed start, so that the same update always gives the same digits
    start = np.random.default_rng(0).standard_normal(min(change.shape)).astype(np.float32)
    u, s, vt = svds(change.numpy(), k=rank, v0=start)
    order = np.argsort(-s)
    left, values, right = (torch.tensor(a) for a in (u[:, order], s[order], vt[order].T))
    return SingularPart(left, values, right, (values.double().square() / norm).to(values))


@contextmanager
def edited(model: Any, parts: Mapping[str, SingularPart], edit: Edit, seed: int = 0) -> Iterator[None]:
    """The model with an edit applied; afterwards its weights are what they were, bit for bit.

    The control subtracts, from every matrix, a random matrix of the same rank and Frobenius norm as the removed part.

    Args:
        model: the fine-tuned model; changed in place inside the block.
        parts: from `leading_parts`, of at least the edit's rank.
        edit: what to do.
        seed: of the control's draws.
    """
    if edit.kind == "trained":
        yield
        return
    weights = block_matrices(model)
    saved = {name: weight.clone().cpu() for name, weight in weights.items()}
    draws = torch.Generator().manual_seed(seed)
    try:
        for name, weight in weights.items():
            part = _cut(parts[name], edit.rank)
            removed = part.matrix
            if edit.kind == "random":
                removed = random_part(removed, part.values.shape[-1], torch.linalg.vector_norm(part.values), draws)
            # in float32: a rank-one part is often smaller than the steps of bfloat16
            weight.copy_((weight.float() - removed.to(weight.device)).to(weight.dtype))
        yield
    finally:
        for name, weight in weights.items():
            weight.copy_(saved[name])


def _cut(part: SingularPart, rank: int) -> SingularPart:
    return SingularPart(part.left[:, :rank], part.values[:rank], part.right[:, :rank], part.share[:rank])
