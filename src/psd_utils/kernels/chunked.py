"""The kernels in plain torch, for the CPU and any accelerator: tiles of tokens × vocabulary, never N × V in memory.

Products and exponentials are float32 (float64 for float64 inputs); sums over tiles are float64. Exponentials are
powers of two, which torch computes several times faster than e^x on the CPU.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from ..correction import Correction
from . import passes
from .nodes import LOG2_E, Nodes, exponent_of
from .passes import Partition, Rest, slices
from .statistics import CorrectedMoments, HeadStatistics, Objective, Readout, interpolation


@dataclass(frozen=True)
class Tiling:
    """Tokens and head rows of one tile, and the tokens (`span`) whose running sums are kept at once."""

    tokens: int
    rows: int
    span: int

    @classmethod
    def choose(cls, device: torch.device, vocabulary: int, memory_budget: int | None = None) -> "Tiling":
        """Return tiles that stay in the caches of a CPU, or that keep an accelerator busy, within a budget in bytes."""
        if device.type == "cpu":
            tokens, rows, span = 256, min(vocabulary, 2048), 16384
        else:
            tokens, rows, span = 4096, min(vocabulary, 16384), 32768
        if memory_budget is not None:
            tokens = max(1, min(tokens, memory_budget // (16 * rows)))
        return cls(tokens, rows, span)


def compute_dtype(hidden: torch.Tensor, head: torch.Tensor) -> torch.dtype:
    """Return the dtype of products: float64 if either input is, else float32."""
    return torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32


class TorchEngine:
    """Tiles of readout(hidden @ headᵀ), each piece of the head prepared once for a span of tokens."""

    def __init__(
        self, hidden: torch.Tensor, head: torch.Tensor, readout: Readout, memory_budget: int | None = None
    ) -> None:
        self.dtype = compute_dtype(hidden, head)
        self.device = head.device
        self.vocabulary = head.shape[0]
        self.masked = readout.masked
        self.tiling = Tiling.choose(self.device, self.vocabulary, memory_budget)
        self.span = self.tiling.span
        self._readout = readout
        self._head = head
        # half-precision tensor cores with float32 results exist on CUDA alone; elsewhere the product is float32
        self._half = head.dtype == hidden.dtype and head.dtype in (torch.bfloat16, torch.float16) and head.is_cuda
        # oneDNN's float32 product is two to four times faster than torch's default one on some CPUs
        on_cpu = self.dtype == torch.float32 and head.device.type == "cpu"
        self._onednn = on_cpu and torch.backends.mkldnn.is_available()

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states on the device; they are cast tile by tile."""
        return hidden.to(self.device)

    def set_step(self, k: int) -> int:
        """Return how many tokens' logits of `k` ids fill a tile or two."""
        return max(1, min(self.tiling.tokens, 2 * self.tiling.tokens * self.tiling.rows // max(k, 1)))

    def readout_of(self, ids: slice | torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that takes states to logits [tokens, rows] of some head rows, a fresh tensor."""
        weight = self._head[ids] if self._half else self._head[ids].to(self.dtype)
        onednn = self._onednn and weight.numel() > 0
        weight = weight.to_mkldnn() if onednn else weight.T

        def logits(states: torch.Tensor) -> torch.Tensor:
            if self._half:
                product = torch.mm(states, weight, out_dtype=torch.float32)
            elif onednn:
                product = linear(states.to(self.dtype).to_mkldnn(), weight).to_dense()
            else:
                product = states.to(self.dtype) @ weight
            return self._readout.logits(product, ids)

        return logits

    def rest(
        self, states: torch.Tensor, partition: Partition, places: torch.Tensor, nodes: Nodes, weighted: bool
    ) -> Rest:
        """Return the sums over the rest of the vocabulary at every node, from one sweep over its head rows."""
        n, first = states.shape[0], partition.ids.numel()
        rest = Rest.empty(n, len(nodes.exponents), self.dtype, self.device, weighted)
        for tile in slices(partition.rest.numel(), self.tiling.rows):
            ids = partition.rest[tile]
            logits = self.readout_of(_contiguous(ids))
            for chunk in slices(n, self.tiling.tokens):
                z = logits(states[chunk])
                columns = places[chunk] - (first + tile.start)
                inside = ((columns >= 0) & (columns < z.shape[1])).nonzero()[:, 0]
                rest.target[chunk][inside] = z[inside, columns[inside]]
                _add_tile(rest, chunk, z, ids, nodes)
        return rest


def _contiguous(ids: torch.Tensor) -> slice | torch.Tensor:
    """Return ascending ids as a slice where they are one, which needs no copy of the head's rows."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == ids.numel() else ids


def _add_tile(rest: Rest, chunk: slice, z: torch.Tensor, ids: torch.Tensor, nodes: Nodes) -> None:
    """Add a tile of logits [tokens, rows], which is overwritten, to the sums of some tokens."""
    best, sums = rest.best[chunk], rest.sums[:, chunk]
    tile_best = z.amax(dim=1)
    better = (tile_best > best).nonzero()[:, 0]
    if better.numel():
        rest.best_id[chunk][better] = ids[z[better].argmax(dim=1)]
    new_best = torch.maximum(best, tile_best)
    z.sub_(new_best[:, None])
    decay = (best - new_best).double()  # −inf for the first tile, when the sums are 0
    best.copy_(new_best)
    scale = (nodes.betas[:, None] * decay).exp_()
    if rest.weighted is not None:  # Σ p·(z − new maximum) from Σ p·(z − old maximum)
        rest.weighted[:, chunk].add_(sums * decay.masked_fill(torch.isinf(decay), 0.0)).mul_(scale)
    tile_sums = torch.empty(sums.shape, dtype=z.dtype, device=z.device)
    powers = torch.empty_like(z)
    for j, exponent in enumerate(nodes.exponents):
        torch.mul(z, exponent, out=powers).exp2_()
        torch.sum(powers, dim=1, out=tile_sums[j])
        if rest.weighted is not None:
            rest.weighted[j, chunk] += powers.mul_(z).sum(dim=1)
    sums.mul_(scale).add_(tile_sums)


def head_statistics(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor,
    betas: torch.Tensor,
    readout: Readout,
    memory_budget: int | None = None,
) -> HeadStatistics:
    """Return the statistics of DESIGN §3, float32 (float64 for float64 inputs), on the head's device."""
    return passes.head_statistics(TorchEngine(hidden, head, readout, memory_budget), hidden, targets, ids, betas)


def corrected_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    corrections: Sequence[Correction],
    readout: Readout,
    memory_budget: int | None = None,
) -> torch.Tensor:
    """Return exact losses [C, N] in nats under several corrections, from one pass over the product."""
    return passes.corrected_losses(TorchEngine(hidden, head, readout, memory_budget), hidden, targets, corrections)


def corrected_moments(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    correction: Correction,
    readout: Readout,
    memory_budget: int | None = None,
) -> CorrectedMoments:
    """Return the exact loss, Σ_n p(k) on the set and E_p[z], from one pass over the product."""
    return passes.corrected_moments(TorchEngine(hidden, head, readout, memory_budget), hidden, targets, correction)


def fit_objective(statistics: HeadStatistics, beta: float, bias: torch.Tensor) -> Objective:
    """Return the mean loss and gradient at (β, b) from statistics, in chunks of tokens; the same bits every time."""
    s = statistics
    n, dtype, device = len(s), s.set_logits.dtype, s.set_logits.device
    exponent, beta = exponent_of(beta, dtype)
    low, high = s.beta_range
    values, slopes = (weights.to(device) for weights in interpolation(s.betas, min(max(beta, low), high)))
    exponent_bias = (bias.to(device).double() * LOG2_E).to(dtype)
    empty = s.rest_is_empty
    loss = torch.zeros((), dtype=torch.float64, device=device)
    slope = torch.zeros((), dtype=torch.float64, device=device)
    gradient = torch.zeros(bias.numel(), dtype=torch.float64, device=device)
    for chunk in slices(n, max(16, _cached(device) // max(1, bias.numel()))):
        z = s.set_logits[chunk]
        if empty:
            rest = torch.full((z.shape[0],), -math.inf, dtype=torch.float64, device=device)
            rest_slope = torch.zeros_like(rest)
        else:
            log_sums = s.rest_log_sum[chunk].double()
            rest, rest_slope = log_sums @ values, log_sums @ slopes
        powers = torch.add(exponent_bias, z, alpha=exponent)
        # in powers of two, as the compute dtype holds it, so that the set and the rest use the same reference
        top = (rest * LOG2_E).to(dtype)
        if bias.numel():
            top = torch.maximum(top, powers.amax(dim=1))
        powers.sub_(top[:, None]).exp2_()
        top = top.double() / LOG2_E
        rest_weight = (rest - top).exp()
        total = powers.sum(dim=1).double() + rest_weight
        loss += (total.log() + top).sum()
        gradient += total.reciprocal().to(dtype) @ powers
        expected = powers.mul_(z).sum(dim=1).double()
        slope += ((expected + rest_weight * rest_slope) / total).sum()
    target_sum = s.target_logit.double().sum()
    counts = s.target_counts().double()
    return Objective(
        loss=float((loss - beta * target_sum - counts @ (exponent_bias.double() / LOG2_E)) / n),
        gradient_beta=float((slope - target_sum) / n),
        gradient_bias=(gradient - counts) / n,
    )


def _cached(device: torch.device) -> int:
    """Return how many numbers one step of a fit works on: what a CPU's caches hold, more on an accelerator."""
    return 2**18 if device.type == "cpu" else 2**26


class FixedBetaObjective:
    """The objective in b alone: mean log(R + P·e^b) − f·b, two matrix-vector products an evaluation (DESIGN §3)."""

    def __init__(self, statistics: HeadStatistics, beta: float) -> None:
        s = statistics
        self.n, device, dtype = len(s), s.set_logits.device, s.set_logits.dtype
        exponent, beta = exponent_of(beta, dtype)
        low, high = s.beta_range
        values, _ = interpolation(s.betas, min(max(beta, low), high))
        rest = s.rest_log_sum.double() @ values.to(device)
        if s.rest_is_empty:
            rest = torch.full_like(rest, -math.inf)
        self.probabilities = torch.empty_like(s.set_logits)
        normaliser = torch.empty_like(rest)
        self.step = max(16, _cached(device) // max(1, s.ids.numel()))
        for chunk in slices(self.n, self.step):
            powers = torch.mul(s.set_logits[chunk], exponent, out=self.probabilities[chunk]).exp2_()
            normaliser[chunk] = torch.logaddexp(rest[chunk], powers.sum(dim=1).double().log())
            powers.mul_((-normaliser[chunk]).exp().to(dtype)[:, None])
        self.rest = (rest - normaliser).exp()
        self.constant = float((normaliser - beta * s.target_logit.double()).sum())
        self.counts = s.target_counts().double()

    def __call__(self, bias: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return the mean loss and its gradient float64 [K] at `bias` float64 [K]."""
        factors = bias.to(self.counts.device).exp().to(self.probabilities)
        gradient = torch.zeros_like(self.counts)
        loss = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for chunk in slices(self.n, self.step):
            p = self.probabilities[chunk]  # read from memory once for both products
            total = (p @ factors).double() + self.rest[chunk]
            loss += total.log().sum()
            gradient += total.reciprocal().to(p) @ p
        mean = (float(loss) + self.constant - float(self.counts @ factors.double().log())) / self.n
        return mean, ((gradient * factors - self.counts) / self.n).cpu()
