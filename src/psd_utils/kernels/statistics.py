"""What the kernels take and give: the readout between a product and its logits, and the head statistics."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..errors import PsdError

DEFAULT_BETA_RANGE = (0.4, 2.5)
DEFAULT_NODES = 20


@dataclass(frozen=True)
class Readout:
    """What lies between hidden @ headᵀ and the logits: z = cap · tanh(scale · (product + bias) / cap).

    `bias` [vocabulary] is the head's own bias, `scale` a factor on the logits (Granite, Cohere), `softcap` the
    final soft-capping (Gemma-2), `masked` [vocabulary] bool marks rows that are taken out of the softmax.
    """

    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    masked: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise PsdError(f"the scale of the logits must be finite, found {self.scale}")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise PsdError(f"the soft cap must be positive and finite, or None, found {self.softcap}")
        if self.bias is not None and bool((torch.isnan(self.bias) | torch.isposinf(self.bias)).any()):
            raise PsdError("the head's bias must not be NaN or +inf")
        if self.masked is not None and self.masked.dtype != torch.bool:
            raise PsdError(f"masked rows must be given as bool, found {self.masked.dtype}")

    def logits(self, product: torch.Tensor, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Turn `product` [tokens, rows] into logits, in place where it can, and return it."""
        if self.bias is not None:
            product = product.add_(self.bias[rows].to(product))
        if self.scale != 1.0:
            product = product.mul_(self.scale)
        if self.softcap is not None:
            product = product.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.masked is not None:
            product = product.masked_fill_(self.masked[rows].to(product.device), -math.inf)
        return product


@dataclass(frozen=True)
class HeadStatistics:
    """All that a fit needs of one model on one text; logits are relative to each token's own maximum.

    N tokens, K ids of the set, J nodes:
    `ids` int64 [K]; `betas` float64 [J]; `maximum` [N], the largest logit over the whole vocabulary;
    `target_logit` [N]; `target_index` int64 [N], the target's place in `ids` or −1; `set_logits` [N, K];
    `rest_log_sum` [N, J], log Σ exp(β z) over the rest of the vocabulary (−inf where it is empty);
    `rest_maximum` [N] and `rest_argmax` int64 [N] (−1 where the rest is empty); `vocabulary` head rows.
    """

    ids: torch.Tensor
    betas: torch.Tensor
    maximum: torch.Tensor
    target_logit: torch.Tensor
    target_index: torch.Tensor
    set_logits: torch.Tensor
    rest_log_sum: torch.Tensor
    rest_maximum: torch.Tensor
    rest_argmax: torch.Tensor
    vocabulary: int

    PER_TOKEN: ClassVar[tuple[str, ...]] = (
        "maximum",
        "target_logit",
        "target_index",
        "set_logits",
        "rest_log_sum",
        "rest_maximum",
        "rest_argmax",
    )

    def __len__(self) -> int:
        return self.target_logit.shape[0]

    @property
    def beta_range(self) -> tuple[float, float]:
        """The range of β in which the rest may be interpolated."""
        return float(self.betas.min()), float(self.betas.max())

    @property
    def rest_is_empty(self) -> bool:
        """Whether the set is the whole (unmasked) vocabulary."""
        return bool((self.rest_argmax[:1] < 0).any())

    def target_counts(self) -> torch.Tensor:
        """Return how often each id of the set is a target, int64 [K]."""
        inside = self.target_index[self.target_index >= 0]
        return torch.bincount(inside, minlength=self.ids.numel())

    def tokens(self, selection: slice | torch.Tensor) -> "HeadStatistics":
        """Return the statistics of some tokens."""
        changes: dict[str, Any] = {name: getattr(self, name)[selection] for name in self.PER_TOKEN}
        return replace(self, **changes)


def chebyshev_betas(low: float, high: float, n_nodes: int = DEFAULT_NODES) -> torch.Tensor:
    """Return `n_nodes` values of β, float64 ascending: Chebyshev points of log β whose outermost are the ends.

    Stretched so that the interpolation never has to reach beyond its nodes (DESIGN §3).
    """
    if not 0 < low < high:
        raise PsdError(f"a range of β needs 0 < low < high, found {low} and {high}")
    points = -np.cos((2 * np.arange(n_nodes) + 1) * np.pi / (2 * n_nodes))
    points /= points[-1]
    centre, half_width = (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2
    betas = torch.from_numpy(np.exp(centre + half_width * points))
    betas[0], betas[-1] = low, high
    return betas


def interpolation(betas: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 weights [J] that take values at the nodes to the value, and to the β-derivative, at `beta`.

    Barycentric Lagrange interpolation in log β.
    """
    x = np.log(betas.cpu().double().numpy())
    # the nodes are scaled to length 4, the logarithmic capacity 1 that keeps the products of differences near 1
    stretch = 4.0 / (x[-1] - x[0]) if len(x) > 1 else 1.0
    x, at = x * stretch, math.log(beta) * stretch
    differences = x[:, None] - x[None, :]
    np.fill_diagonal(differences, 1.0)
    barycentric = 1.0 / differences.prod(axis=1)
    distance = at - x
    if (distance == 0.0).any():
        values = (distance == 0.0).astype(float)
    else:
        values = barycentric / distance
        values /= values.sum()
    # the derivative of a polynomial is a polynomial: differentiate at the nodes, then interpolate, which is
    # stable however near `beta` lies to a node
    differentiation = barycentric[None, :] / barycentric[:, None] / differences
    np.fill_diagonal(differentiation, 0.0)
    np.fill_diagonal(differentiation, -differentiation.sum(axis=1))
    slopes = values @ differentiation
    return torch.from_numpy(values), torch.from_numpy(slopes * (stretch / beta))


@dataclass(frozen=True)
class Objective:
    """Mean loss of the corrected model and its gradient, without any penalty.

    `loss` in nats per token; `gradient_beta` = Σ (E_p[z] − z_target)/N; `gradient_bias` float64 [K] =
    (Σ p(k) − count_k)/N.
    """

    loss: float
    gradient_beta: float
    gradient_bias: torch.Tensor


@dataclass(frozen=True)
class CorrectedMoments:
    """One exact pass: `nll` [N] in nats, `probability_sums` float64 [K] = Σ_n p(k), `expected_logit` [N] = E_p[z].

    `target_logit` [N] and `expected_logit` are relative to `maximum` [N], the token's largest raw logit.
    """

    nll: torch.Tensor
    probability_sums: torch.Tensor
    expected_logit: torch.Tensor
    target_logit: torch.Tensor
    maximum: torch.Tensor


def check_inputs(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, readout: Readout) -> None:
    """Check shapes, dtypes and the range of the targets.

    Raises:
        PsdError: naming the shape or the token that is wrong.
    """
    for name, tensor in (("hidden", hidden), ("head", head), ("targets", targets)):
        if not isinstance(tensor, torch.Tensor):
            raise PsdError(f"{name} must be a torch tensor, found {type(tensor).__name__}")
    for name, tensor in (("hidden", hidden), ("head", head)):
        if not tensor.dtype.is_floating_point:
            raise PsdError(f"{name} must be floating point, found {tensor.dtype}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise PsdError(f"targets must be int64 or int32 token ids, found {targets.dtype}")
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise PsdError(
            f"hidden must be [tokens, width] and head [vocabulary, width], found {tuple(hidden.shape)} "
            f"and {tuple(head.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise PsdError(f"{hidden.shape[0]} hidden states but targets of shape {tuple(targets.shape)}")
    for name, entry in (("head bias", readout.bias), ("mask", readout.masked)):
        if entry is not None and entry.shape != head.shape[:1]:
            raise PsdError(f"the {name} has shape {tuple(entry.shape)}, the head {head.shape[0]} rows")
    if targets.numel() == 0:
        return
    bad = ((targets < 0) | (targets >= head.shape[0])).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise PsdError(f"token {at} has target id {int(targets[at])}, beyond the head's {head.shape[0]} rows")
    if readout.masked is not None:
        masked = readout.masked.to(targets.device)[targets].nonzero()
        if masked.numel():
            at = int(masked[0])
            raise PsdError(f"token {at} has target id {int(targets[at])}, whose head row is masked out")


def check_finite(hidden: torch.Tensor, head: torch.Tensor) -> None:
    """Raise PsdError naming the first token, or head row, with a NaN or infinite entry."""
    for what, rows in (("hidden state of token", hidden), ("head row", head)):
        bad = (~torch.isfinite(rows).all(dim=1)).nonzero()
        if bad.numel():
            raise PsdError(f"the {what} {int(bad[0])} is NaN or infinite")


def check_losses(losses: torch.Tensor) -> None:
    """Raise PsdError naming the first token whose loss, in the last dimension, is NaN: the logits overflowed."""
    bad = torch.isnan(losses).nonzero()
    if bad.numel():
        raise PsdError(f"the loss of token {int(bad[0][-1])} is not a number: its logits overflow {losses.dtype}")
