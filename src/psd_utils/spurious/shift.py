"""Common and individual parts of a change, and what happens when one of them is taken away.

In: plain tensors before and after training (hidden states, logits or weights, with any leading batch axes).
Out: plain tensors and small records of them. Nothing here knows which model they came from.

Low-precision inputs are computed in float32 and returned in float32; float32 and float64 stay as they are.
"""

import logging
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """A change of n items, split into one common part per group and what is left for every item.

    Attributes:
        common: [..., groups, features], the mean change of each group, the common shift δ of the paper.
        individual: [..., items, features], change minus the common part of the item's group (ε_a).
        groups: [items] int64, the group of each item, 0 … groups−1.
    """

    common: Tensor
    individual: Tensor
    groups: Tensor

    @property
    def common_per_item(self) -> Tensor:
        """The common part repeated for every item, [..., items, features]."""
        return self.common.index_select(-2, self.groups)

    @property
    def change(self) -> Tensor:
        """The whole change again, [..., items, features]: common + individual."""
        return self.common_per_item + self.individual


@dataclass(frozen=True)
class SingularPart:
    """The top-r part of a weight change.

    Attributes:
        left: [..., rows, r], orthonormal directions in the space of the rows (keys, for W in k W).
        values: [..., r], singular values in descending order.
        right: [..., columns, r], orthonormal directions in the space of the columns.
        share: [..., r], each direction's share of the squared Frobenius norm, 0–1 (0 for a zero change).
    """

    left: Tensor
    values: Tensor
    right: Tensor
    share: Tensor

    @property
    def matrix(self) -> Tensor:
        """The part as a matrix, [..., rows, columns]."""
        return (self.left * self.values.unsqueeze(-2)) @ self.right.transpose(-1, -2)


def split_change(before: Tensor, after: Tensor, groups: Tensor | None = None) -> Split:
    """Split after − before into a common part per group and an individual part per item.

    Source: the two-process account of Palit et al. (2026): Δ_a = δ + ε_a, with δ the mean over the old facts.
    Hidden states and logits are split alike. Where facts answer different questions (attributes, relations),
    give one group to each: a single mean over all of them mixes shifts that differ.

    Args:
        before: [..., items, features].
        after: the same shape.
        groups: [items] integers, or None for one group of all items. Every group 0 … max must have a member.

    Raises:
        ValueError: shapes that differ, values that are not finite, no items, or bad groups.
    """
    before, after = _pair(before, after)
    n_items = before.shape[-2]
    labels = _groups(groups, n_items, before.device)
    change = after - before
    n_groups = int(labels.max()) + 1
    sums = change.new_zeros((*change.shape[:-2], n_groups, change.shape[-1])).index_add_(-2, labels, change)
    counts = torch.bincount(labels, minlength=n_groups).to(change.dtype)
    common = sums / counts.unsqueeze(-1)
    return Split(common, change - common.index_select(-2, labels), labels)


def common_only(before: Tensor, split: Split) -> Tensor:
    """What the items would be had only the common part happened, [..., items, features]."""
    return _checked("before", before) + split.common_per_item


def individual_only(before: Tensor, split: Split) -> Tensor:
    """What the items would be had only the individual part happened, [..., items, features]."""
    return _checked("before", before) + split.individual


def subtract_offset(
    before: Tensor, after: Tensor, from_items: Tensor | None = None, groups: Tensor | None = None
) -> Tensor:
    """Take the mean change of some items away from all items: the repair that needs no training.

    Args:
        before: [..., items, features].
        after: the same shape.
        from_items: which items to estimate the offset from: [k], or [..., k] with the leading axes of
            `before`; None for all. Score the repair on the other items, or the offset has seen its answers.
        groups: [items], one offset per group; each group then needs at least one of the chosen items, and
            `from_items` must be [k].

    Returns:
        [..., items, features], after minus the estimated common shift of each item's group.

    Raises:
        ValueError: shapes that differ, values that are not finite, indices out of range, or a group none of
            whose items were chosen.
    """
    if from_items is None:
        return _pair(before, after)[1] - split_change(before, after, groups).common_per_item
    before, after = _pair(before, after)
    n_items = before.shape[-2]
    chosen = torch.as_tensor(from_items, device=before.device)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.numel() == 0 or chosen.ndim == 0:
        raise ValueError(
            f"from_items must be a non-empty list of item numbers; found {chosen.dtype} of shape "
            f"{tuple(chosen.shape)}. Give integers 0 … {n_items - 1}."
        )
    chosen = chosen.long()
    if int(chosen.min()) < 0 or int(chosen.max()) >= n_items:
        raise ValueError(
            f"from_items goes from {int(chosen.min())} to {int(chosen.max())}, with {n_items} items. "
            f"Give integers 0 … {n_items - 1}."
        )
    change = after - before
    if groups is not None:
        if chosen.ndim != 1:
            raise ValueError(
                f"With groups, from_items must have one axis; found shape {tuple(chosen.shape)}. "
                "Call once for each draw of items."
            )
        labels = _groups(groups, n_items, before.device)
        n_groups = int(labels.max()) + 1
        missing = sorted(set(range(n_groups)) - set(labels[chosen].tolist()))
        if missing:
            raise ValueError(
                f"No item was chosen from groups {missing}: their offset cannot be estimated. "
                "Choose at least one item of every group."
            )
        part = change.index_select(-2, chosen)
        offset = split_change(torch.zeros_like(part), part, labels[chosen]).common
        return after - offset.index_select(-2, labels)
    if chosen.ndim > 1 and chosen.shape[:-1] != before.shape[:-2]:
        raise ValueError(
            f"from_items has leading axes {tuple(chosen.shape[:-1])}, the states have "
            f"{tuple(before.shape[:-2])}. Give [k], or [..., k] with the states' leading axes."
        )
    index = chosen.expand(*before.shape[:-2], chosen.shape[-1]).unsqueeze(-1)
    part = change.gather(-2, index.expand(*index.shape[:-1], change.shape[-1]))
    return after - part.mean(dim=-2, keepdim=True)


def shared_part(change: Tensor, direction: Tensor) -> Tensor:
    """The part of a weight change that one direction of its rows writes: u uᵀ ΔW.

    Args:
        change: [..., rows, columns], ΔW in the convention output = input @ W. For torch.nn.Linear, whose
            weight is [out, in], pass weight.T, or the direction of the outputs.
        direction: [..., rows] (or [rows], for all), of any length but zero.

    Returns:
        [..., rows, columns], of rank one. change − shared_part is ΔW_⊥ of the paper.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or a zero direction.
    """
    change = _matrix(change)
    unit = _checked("direction", direction).to(change)
    if unit.shape[-1] != change.shape[-2] or (unit.ndim > 1 and unit.shape[:-1] != change.shape[:-2]):
        raise ValueError(
            f"direction has shape {tuple(unit.shape)}, the change {tuple(change.shape)}. "
            f"Expected [{change.shape[-2]}] or {[*change.shape[:-1]]}: one entry per row of the change."
        )
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    if bool((length == 0).any()):
        raise ValueError("direction is zero, so it names no row. Give a direction with a length above zero.")
    unit = unit / length
    return unit.unsqueeze(-1) * torch.matmul(unit.unsqueeze(-2), change)


def remove_direction(change: Tensor, direction: Tensor) -> Tensor:
    """ΔW without the row that `direction` writes, ΔW − u uᵀ ΔW. Arguments and errors of `shared_part`."""
    return _matrix(change) - shared_part(change, direction)


def top_directions(change: Tensor, rank: int) -> SingularPart:
    """The top singular directions of a weight change.

    Args:
        change: [..., rows, columns].
        rank: how many, 1 … min(rows, columns).

    Raises:
        ValueError: a change that is not a finite matrix, or a rank out of range.
    """
    change = _matrix(change)
    _check_rank(rank, change)
    left, values, right_t = _svd(change)
    total = values.square().sum(-1, keepdim=True)
    share = torch.where(total > 0, values.square() / torch.where(total > 0, total, 1.0), 0.0)
    return SingularPart(
        left[..., :rank], values[..., :rank], right_t[..., :rank, :].transpose(-1, -2), share[..., :rank]
    )


def remove_top_directions(change: Tensor, rank: int) -> Tensor:
    """ΔW without its top singular directions, [..., rows, columns]. Arguments and errors of
    `top_directions`.
    """
    return _matrix(change) - top_directions(change, rank).matrix


def random_part(change: Tensor, rank: int, norm: Tensor, generator: torch.Generator) -> Tensor:
    """A random matrix of the same shape, given rank and given Frobenius norm: the control for a removal.

    Args:
        change: [..., rows, columns], for shape, dtype and device only.
        rank: 1 … min(rows, columns).
        norm: [...] (or a scalar), the Frobenius norm wanted, ≥ 0: that of the part removed.
        generator: where the draw comes from, on the CPU.

    Raises:
        ValueError: a change that is not a finite matrix, a rank out of range, or norms that do not fit.
    """
    change = _matrix(change)
    _check_rank(rank, change)
    wanted = _checked("norm", torch.as_tensor(norm)).to(change)
    if wanted.ndim > 0 and wanted.shape != change.shape[:-2]:
        raise ValueError(
            f"norm has shape {tuple(wanted.shape)}, the change has leading axes {tuple(change.shape[:-2])}. "
            "Give one number per matrix."
        )
    lead, (rows, columns) = change.shape[:-2], change.shape[-2:]
    left = torch.randn((*lead, rows, rank), generator=generator, dtype=change.dtype).to(change.device)
    right = torch.randn((*lead, rank, columns), generator=generator, dtype=change.dtype).to(change.device)
    product = left @ right
    return product * (wanted / torch.linalg.matrix_norm(product)).unsqueeze(-1).unsqueeze(-1)


def remove_random_part(change: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """ΔW minus a random rank-r matrix as large as its top-r part: the control for `remove_top_directions`.

    Returns [..., rows, columns]. Arguments and errors of `top_directions` and `random_part`.
    """
    top = top_directions(change, rank)
    norm = torch.linalg.vector_norm(top.values, dim=-1)
    return _matrix(change) - random_part(change, rank, norm, generator)


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition, with LAPACK's slower gesvd where the fast driver does not converge."""
    try:
        left, values, right_t = torch.linalg.svd(matrix, full_matrices=False)
        if bool(torch.isfinite(values).all()):
            return left, values, right_t
    except torch.linalg.LinAlgError:
        pass
    log.warning("The fast singular value decomposition did not converge; using LAPACK gesvd instead.")
    lead = matrix.shape[:-2]
    flat = matrix.detach().reshape(-1, *matrix.shape[-2:]).cpu().double().numpy()
    parts = [scipy.linalg.svd(m, full_matrices=False, lapack_driver="gesvd") for m in flat]
    stacked = (np.stack([part[i] for part in parts]) for i in range(3))
    like = (torch.from_numpy(array).to(matrix) for array in stacked)
    left, values, right_t = (t.reshape(*lead, *t.shape[1:]) for t in like)
    return left, values, right_t


def _checked(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor; found {type(tensor).__name__}. Convert it first.")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(
            f"{name} holds {bad} values that are NaN or infinite, of {tensor.numel()}. "
            "A diverged run or a broken checkpoint has no shift to split: check the training first."
        )
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _pair(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    before, after = _checked("before", before), _checked("after", after)
    if before.shape != after.shape:
        raise ValueError(
            f"before has shape {tuple(before.shape)}, after {tuple(after.shape)}. "
            "Both must be [..., items, features], the same items in the same order."
        )
    if before.ndim < 2 or before.shape[-2] == 0 or before.shape[-1] == 0:
        raise ValueError(
            f"before and after have shape {tuple(before.shape)}; expected [..., items, features] "
            "with at least one item and one feature."
        )
    if before.dtype != after.dtype:
        wide = torch.promote_types(before.dtype, after.dtype)
        before, after = before.to(wide), after.to(wide)
    return before, after


def _groups(groups: Tensor | None, n_items: int, device: torch.device) -> Tensor:
    if groups is None:
        return torch.zeros(n_items, dtype=torch.int64, device=device)
    labels = torch.as_tensor(groups, device=device)
    if labels.shape != (n_items,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"groups must be {n_items} integers, one per item; found {labels.dtype} of shape {tuple(labels.shape)}."
        )
    labels = labels.long()
    found = torch.unique(labels)
    if int(found[0]) != 0 or int(found[-1]) != len(found) - 1:
        raise ValueError(
            f"groups are {found.tolist()[:10]}; expected 0, 1, … with no number left out. "
            "torch.unique(groups, return_inverse=True)[1] numbers them so."
        )
    return labels


def _matrix(change: Tensor) -> Tensor:
    change = _checked("change", change)
    if change.ndim < 2 or 0 in change.shape[-2:]:
        raise ValueError(
            f"change has shape {tuple(change.shape)}; expected [..., rows, columns]: the weights after minus "
            "the weights before."
        )
    return change


def _check_rank(rank: int, change: Tensor) -> None:
    largest = min(change.shape[-2:])
    if not 1 <= rank <= largest:
        raise ValueError(f"rank is {rank}; expected 1 … {largest} for a {tuple(change.shape[-2:])} change.")
