"""The kernels in plain torch, for the CPU and any accelerator: tiles of tokens × vocabulary, never N × V in memory.

Products and exponentials are float32 (float64 for float64 inputs); sums over tiles are float64.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..correction import Correction
from .statistics import CorrectedMoments, HeadStatistics, Objective, Readout, interpolation

# Beyond this a bias is not multiplied into the exponentials, where e^b could leave float32's range.
LARGEST_FACTOR_BIAS = 30.0


@dataclass(frozen=True)
class Tiling:
    """Tokens and head rows of one tile."""

    tokens: int
    rows: int

    @classmethod
    def choose(cls, device: torch.device, vocabulary: int, memory_budget: int | None = None) -> "Tiling":
        """Return tiles that stay in the caches of a CPU, or that keep an accelerator busy, within a budget in bytes."""
        if device.type == "cpu":
            tokens, rows = 512, min(vocabulary, 2048)
        else:
            tokens, rows = 4096, min(vocabulary, 16384)
        if memory_budget is not None:
            tokens = max(1, min(tokens, memory_budget // (16 * rows)))
        return cls(tokens, rows)


def compute_dtype(hidden: torch.Tensor, head: torch.Tensor) -> torch.dtype:
    """Return the dtype of products: float64 if either input is, else float32."""
    return torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32


class Product:
    """Tiles of readout(hidden @ headᵀ) with the head prepared once."""

    def __init__(self, hidden: torch.Tensor, head: torch.Tensor, readout: Readout) -> None:
        self.dtype = compute_dtype(hidden, head)
        self.readout = readout
        self.device = head.device
        self.vocabulary = head.shape[0]
        # half-precision tensor cores with float32 results exist on CUDA alone; elsewhere the product is float32
        self.half = head.dtype == hidden.dtype and head.dtype in (torch.bfloat16, torch.float16) and head.is_cuda
        self.head = head if self.half else head.to(self.dtype)

    def hidden_chunk(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a chunk of hidden states where, and in the dtype in which, products are made."""
        return hidden.to(self.device) if self.half else hidden.to(self.device, self.dtype)

    def tile(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return logits [tokens, rows] in the compute dtype, a fresh tensor."""
        if self.half:
            product = torch.mm(hidden, self.head[rows].T, out_dtype=torch.float32)
        else:
            product = hidden @ self.head[rows].T
        return self.readout.logits(product, rows)


def _rounded(beta: float, dtype: torch.dtype) -> float:
    """Return β as the compute dtype holds it, so that every term of a loss uses the same β."""
    return float(torch.tensor(beta, dtype=dtype))


def _slices(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """Return maxima that can be subtracted: 0 where every logit so far was −inf."""
    return maximum.masked_fill(torch.isinf(maximum), 0.0)


def _gather_targets(logits: torch.Tensor, targets: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
    """Copy the logits of those targets that lie in this tile to `out`."""
    local = targets - rows.start
    inside = ((local >= 0) & (local < logits.shape[1])).nonzero()[:, 0]
    out[inside] = logits[inside, local[inside]]


@dataclass(frozen=True)
class _SetColumns:
    """Where the ids of a set lie in each tile of rows."""

    order: torch.Tensor  # places in the set, by ascending id
    sorted_ids: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> "_SetColumns":
        sorted_ids, order = torch.sort(ids)
        return cls(order, sorted_ids)

    def within(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (places in the set, columns of the tile) of the ids that lie in `rows`."""
        bounds = torch.tensor([rows.start, rows.stop], device=self.sorted_ids.device)
        low, high = torch.searchsorted(self.sorted_ids, bounds).tolist()
        return self.order[low:high], self.sorted_ids[low:high] - rows.start


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
    product = Product(hidden, head, readout)
    dtype, device = product.dtype, product.device
    n, k, nodes = hidden.shape[0], ids.numel(), betas.to(dtype).tolist()
    ids, targets = ids.to(device), targets.to(device)
    tiling = Tiling.choose(device, product.vocabulary, memory_budget)
    columns = _SetColumns.of(ids)
    maximum = torch.empty(n, dtype=dtype, device=device)
    target_logit = torch.empty(n, dtype=dtype, device=device)
    set_logits = torch.empty(n, k, dtype=dtype, device=device)
    rest_log_sum = torch.empty(n, len(nodes), dtype=dtype, device=device)
    rest_maximum = torch.empty(n, dtype=dtype, device=device)
    rest_argmax = torch.empty(n, dtype=torch.int64, device=device)
    for chunk in _slices(n, tiling.tokens):
        h = product.hidden_chunk(hidden[chunk])
        size = h.shape[0]
        best = torch.full((size,), -math.inf, dtype=dtype, device=device)
        best_id = torch.full((size,), -1, dtype=torch.int64, device=device)
        sums = torch.zeros(len(nodes), size, dtype=torch.float64, device=device)
        for rows in _slices(product.vocabulary, tiling.rows):
            z = product.tile(h, rows)
            _gather_targets(z, targets[chunk], rows, target_logit[chunk])
            places, inside = columns.within(rows)
            if places.numel():
                set_logits[chunk, places] = z[:, inside]
                z[:, inside] = -math.inf
            tile_best, tile_id = z.max(dim=1)
            better = tile_best > best
            new_best = torch.where(better, tile_best, best)
            best_id = torch.where(better, tile_id + rows.start, best_id)
            shift = _finite(new_best)
            z.sub_(shift[:, None])
            decay = (best - shift).double()  # −inf before the first finite logit, when the sums are 0
            best = new_best
            buffer = torch.empty_like(z)
            for j, beta in enumerate(nodes):
                torch.mul(z, beta, out=buffer).exp_()
                sums[j].mul_((beta * decay).exp()).add_(buffer.sum(dim=1))
        top = best if k == 0 else torch.maximum(best, set_logits[chunk].max(dim=1).values)
        maximum[chunk], rest_maximum[chunk], rest_argmax[chunk] = top, best - top, best_id
        relative = (best - top).double()
        for j, beta in enumerate(nodes):
            rest_log_sum[chunk, j] = (sums[j].log() + beta * relative).to(dtype)
        target_logit[chunk] -= top
        set_logits[chunk] -= top[:, None]
    places_of_targets = torch.full((product.vocabulary,), -1, dtype=torch.int64, device=device)
    places_of_targets[ids] = torch.arange(k, device=device)
    return HeadStatistics(
        ids=ids,
        betas=betas.to(dtype).double(),
        maximum=maximum,
        target_logit=target_logit,
        target_index=places_of_targets[targets],
        set_logits=set_logits,
        rest_log_sum=rest_log_sum,
        rest_maximum=rest_maximum,
        rest_argmax=rest_argmax,
        vocabulary=product.vocabulary,
    )


class _Weights:
    """e^b of several corrections that share β, as columns over the vocabulary; None where all are unbiased."""

    def __init__(self, corrections: Sequence[Correction], vocabulary: int, dtype: torch.dtype, device: torch.device):
        self.largest = torch.tensor(
            [max(0.0, float(c.bias.max())) if c.bias.numel() else 0.0 for c in corrections],
            dtype=torch.float64,
        )
        self.factors = torch.empty(vocabulary, len(corrections), dtype=dtype, device=device)
        for column, correction in enumerate(corrections):
            weights = torch.full((vocabulary,), -float(self.largest[column]), dtype=torch.float64)
            weights[correction.ids.cpu()] += correction.bias.double().cpu()
            self.factors[:, column] = weights.exp().to(self.factors)
        self.largest = self.largest.to(device)


def corrected_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    corrections: Sequence[Correction],
    readout: Readout,
    memory_budget: int | None = None,
) -> torch.Tensor:
    """Return exact losses [C, N] in nats under several corrections, from one pass over the product.

    Corrections with the same temperature share their exponentials: the sum under a bias is a product with e^b.
    """
    product = Product(hidden, head, readout)
    dtype, device = product.dtype, product.device
    n = hidden.shape[0]
    targets = targets.to(device)
    tiling = Tiling.choose(device, product.vocabulary, memory_budget)
    groups = _group_by_beta(corrections, dtype)
    weights = {
        beta: _Weights([corrections[i] for i in members], product.vocabulary, dtype, device)
        for beta, members in groups.items()
        if any(corrections[i].bias.numel() for i in members)
    }
    losses = torch.empty(len(corrections), n, dtype=dtype, device=device)
    for chunk in _slices(n, tiling.tokens):
        h = product.hidden_chunk(hidden[chunk])
        size = h.shape[0]
        best = torch.full((size,), -math.inf, dtype=dtype, device=device)
        target = torch.empty(size, dtype=dtype, device=device)
        sums = {beta: torch.zeros(size, len(m), dtype=torch.float64, device=device) for beta, m in groups.items()}
        for rows in _slices(product.vocabulary, tiling.rows):
            z = product.tile(h, rows)
            _gather_targets(z, targets[chunk], rows, target)
            new_best = torch.maximum(best, z.max(dim=1).values)
            shift = _finite(new_best)
            z.sub_(shift[:, None])
            decay = (best - shift).double()
            best = new_best
            buffer = z if len(groups) == 1 else torch.empty_like(z)
            for beta in groups:
                torch.mul(z, beta, out=buffer).exp_()
                tile_sums = buffer @ weights[beta].factors[rows] if beta in weights else buffer.sum(dim=1, keepdim=True)
                sums[beta].mul_((beta * decay).exp()[:, None]).add_(tile_sums)
        distance = (best - target).double()
        for beta, members in groups.items():
            log_sums = sums[beta].log() + (beta * distance)[:, None]
            if beta in weights:
                log_sums += weights[beta].largest
            for column, i in enumerate(members):
                # without any bias in its group a single column of plain sums serves every member
                own = column if beta in weights else 0
                losses[i, chunk] = (log_sums[:, own] - _target_bias(corrections[i], targets[chunk])).to(dtype)
    return losses


def _group_by_beta(corrections: Sequence[Correction], dtype: torch.dtype) -> dict[float, list[int]]:
    groups: dict[float, list[int]] = {}
    for i, correction in enumerate(corrections):
        groups.setdefault(_rounded(correction.beta, dtype), []).append(i)
    return groups


def _target_bias(correction: Correction, targets: torch.Tensor) -> torch.Tensor | float:
    """Return the bias of each target, float64 [N]; 0 outside the set."""
    if correction.ids.numel() == 0:
        return 0.0
    sorted_ids, order = torch.sort(correction.ids.to(targets.device))
    at = torch.searchsorted(sorted_ids, targets).clamp(max=sorted_ids.numel() - 1)
    bias = correction.bias.to(targets.device).double()[order][at]
    return torch.where(sorted_ids[at] == targets, bias, 0.0)


def corrected_moments(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    correction: Correction,
    readout: Readout,
    memory_budget: int | None = None,
) -> CorrectedMoments:
    """Return the exact loss, Σ_n p(k) on the set and E_p[z], from one pass over the product."""
    product = Product(hidden, head, readout)
    dtype, device = product.dtype, product.device
    n, beta = hidden.shape[0], _rounded(correction.beta, dtype)
    ids, bias, targets = correction.ids.to(device), correction.bias.to(device, dtype), targets.to(device)
    tiling = Tiling.choose(device, product.vocabulary, memory_budget)
    columns = _SetColumns.of(ids)
    maximum = torch.empty(n, dtype=dtype, device=device)
    target_logit, expected, nll = (torch.empty(n, dtype=dtype, device=device) for _ in range(3))
    probability_sums = torch.zeros(ids.numel(), dtype=torch.float64, device=device)
    target_bias = _target_bias(correction, targets)
    largest = max(0.0, float(bias.max())) if bias.numel() else 0.0
    for chunk in _slices(n, tiling.tokens):
        h = product.hidden_chunk(hidden[chunk])
        size = h.shape[0]
        best = torch.full((size,), -math.inf, dtype=dtype, device=device)
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        weighted = torch.zeros(size, dtype=torch.float64, device=device)
        set_logits = torch.empty(size, ids.numel(), dtype=dtype, device=device)
        for rows in _slices(product.vocabulary, tiling.rows):
            z = product.tile(h, rows)
            _gather_targets(z, targets[chunk], rows, target_logit[chunk])
            places, inside = columns.within(rows)
            set_logits[:, places] = z[:, inside]
            new_best = torch.maximum(best, z.max(dim=1).values)
            shift = _finite(new_best)
            z.sub_(shift[:, None])
            decay = (best - shift).double()
            scale = (beta * decay).exp()
            # Σ p·(z − new maximum) from Σ p·(z − old maximum)
            weighted.add_(sums * decay.masked_fill(torch.isinf(decay), 0.0)).mul_(scale)
            sums.mul_(scale)
            best = new_best
            p = torch.mul(z, beta)
            p[:, inside] += bias[places]
            p.sub_(largest).exp_()
            sums.add_(p.sum(dim=1))
            if readout.masked is not None:
                z.masked_fill_(torch.isinf(z), 0.0)  # a masked row has p = 0, and 0 · −inf is not 0
            weighted.add_(p.mul_(z).sum(dim=1))
        maximum[chunk] = best
        target_logit[chunk] -= best
        expected[chunk] = (weighted / sums).to(dtype)
        log_sum = sums.log() + largest
        loss = log_sum - beta * target_logit[chunk].double()
        nll[chunk] = (loss - (target_bias[chunk] if isinstance(target_bias, torch.Tensor) else 0.0)).to(dtype)
        shifted = set_logits.sub_(best[:, None]).mul_(beta).add_(bias).sub_(log_sum.to(dtype)[:, None])
        probability_sums += shifted.exp_().sum(dim=0)
    return CorrectedMoments(nll, probability_sums, expected, target_logit, maximum)


def fit_objective(statistics: HeadStatistics, beta: float, bias: torch.Tensor) -> Objective:
    """Return the mean loss and gradient at (β, b) from statistics, in chunks of tokens; the same bits every time."""
    s = statistics
    n, dtype, device = len(s), s.set_logits.dtype, s.set_logits.device
    beta = _rounded(beta, dtype)
    values, slopes = (weights.to(device) for weights in interpolation(s.betas, beta))
    b = bias.to(device, dtype)
    empty = s.rest_is_empty
    loss = torch.zeros((), dtype=torch.float64, device=device)
    slope = torch.zeros((), dtype=torch.float64, device=device)
    gradient = torch.zeros(b.numel(), dtype=torch.float64, device=device)
    for chunk in _slices(n, max(64, 2**20 // max(1, b.numel()))):
        z = s.set_logits[chunk]
        if empty:
            rest = torch.full((z.shape[0],), -math.inf, dtype=torch.float64, device=device)
            rest_slope = torch.zeros_like(rest)
        else:
            log_sums = s.rest_log_sum[chunk].double()
            rest, rest_slope = log_sums @ values, log_sums @ slopes
        corrected = torch.mul(z, beta).add_(b)
        top = rest if b.numel() == 0 else torch.maximum(rest, corrected.max(dim=1).values.double())
        p = corrected.sub_(top.to(dtype)[:, None]).exp_()
        # the float32 rounding of `top` is made good in the rest, so that both use the same reference
        top = top.to(dtype).double()
        rest_weight = (rest - top).exp()
        total = p.sum(dim=1).double() + rest_weight
        loss += (total.log() + top).sum()
        p.div_(total.to(dtype)[:, None])
        gradient += p.sum(dim=0)
        expected = p.mul_(z).sum(dim=1).double()
        slope += (expected + rest_weight / total * rest_slope).sum()
    target_sum = s.target_logit.double().sum()
    counts = s.target_counts().double()
    return Objective(
        loss=float((loss - beta * target_sum - counts @ b.double()) / n),
        gradient_beta=float((slope - target_sum) / n),
        gradient_bias=(gradient - counts) / n,
    )


class FixedBetaObjective:
    """The objective in b alone: mean log(R + P·e^b) − f·b, two matrix-vector products an evaluation (DESIGN §3)."""

    def __init__(self, statistics: HeadStatistics, beta: float) -> None:
        s = statistics
        self.n, device = len(s), s.set_logits.device
        beta = _rounded(beta, s.set_logits.dtype)
        values, _ = interpolation(s.betas, beta)
        rest = s.rest_log_sum.double() @ values.to(device)
        if s.rest_is_empty:
            rest = torch.full_like(rest, -math.inf)
        normaliser = torch.logaddexp(rest, (s.set_logits * beta).logsumexp(dim=1).double())
        self.rest = (rest - normaliser).exp()
        self.probabilities = torch.mul(s.set_logits, beta).sub_(normaliser.to(s.set_logits)[:, None]).exp_()
        self.constant = float((normaliser - beta * s.target_logit.double()).sum())
        self.counts = s.target_counts().double()

    def __call__(self, bias: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return the mean loss and its gradient float64 [K] at `bias` float64 [K]."""
        p = self.probabilities
        factors = bias.to(p.device).exp().to(p)
        total = (p @ factors).double() + self.rest
        gradient = torch.zeros_like(self.counts)
        for chunk in _slices(self.n, 4096):
            gradient += total[chunk].reciprocal().to(p) @ p[chunk]
        loss = float(total.log().sum()) + self.constant - float(self.counts @ factors.double().log())
        return loss / self.n, ((gradient * factors - self.counts) / self.n).cpu()
