"""The kernels in plain torch, for the CPU and any accelerator: tiles of tokens × vocabulary, never N × V in memory.

Products and exponentials are float32 (float64 for float64 inputs); sums over tiles are float64. Exponentials are
powers of two, which torch computes several times faster than e^x on the CPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from ..correction import Correction
from .statistics import CorrectedMoments, HeadStatistics, Objective, Readout, interpolation

# Beyond this a bias is not multiplied into the exponentials, where e^b could leave float32's range.
LARGEST_FACTOR_BIAS = 30.0

_LOG2_E = math.log2(math.e)


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
        return cls(tokens, rows, max(tokens, span - span % tokens))


def compute_dtype(hidden: torch.Tensor, head: torch.Tensor) -> torch.dtype:
    """Return the dtype of products: float64 if either input is, else float32."""
    return torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32


class Product:
    """Tiles of readout(hidden @ headᵀ), each piece of the head prepared once for many tokens."""

    def __init__(self, hidden: torch.Tensor, head: torch.Tensor, readout: Readout) -> None:
        self.dtype = compute_dtype(hidden, head)
        self.readout = readout
        self.device = head.device
        self.vocabulary = head.shape[0]
        self.head = head
        # half-precision tensor cores with float32 results exist on CUDA alone; elsewhere the product is float32
        self.half = head.dtype == hidden.dtype and head.dtype in (torch.bfloat16, torch.float16) and head.is_cuda
        # oneDNN's float32 product is two to four times faster than torch's default on some CPUs, never slower
        on_cpu = self.dtype == torch.float32 and head.device.type == "cpu"
        self.onednn = on_cpu and torch.backends.mkldnn.is_available()

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states where, and in the dtype in which, products are made."""
        return hidden.to(self.device) if self.half else hidden.to(self.device, self.dtype)

    def rows(self, index: slice | torch.Tensor) -> "HeadRows":
        """Return some rows of the head, ready for products."""
        weight = self.head[index] if self.half else self.head[index].to(self.dtype)
        return HeadRows(self, index, weight.to_mkldnn() if self.onednn and weight.numel() else weight)


@dataclass(frozen=True)
class HeadRows:
    """Some rows of the head, prepared."""

    product: Product
    index: slice | torch.Tensor
    weight: torch.Tensor

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [tokens, rows] in the compute dtype, a fresh tensor."""
        if self.weight.shape[0] == 0:
            product = states.new_empty(states.shape[0], 0, dtype=self.product.dtype)
        elif self.product.half:
            product = torch.mm(states, self.weight.T, out_dtype=torch.float32)
        elif self.product.onednn:
            product = linear(states.to_mkldnn(), self.weight).to_dense()
        else:
            product = states @ self.weight.T
        return self.product.readout.logits(product, self.index)


def _exponent(beta: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return (β·log₂e as the compute dtype holds it, the β that this stands for): every term of a loss uses that β."""
    exponent = float(torch.tensor(beta * _LOG2_E, dtype=dtype))
    return exponent, beta if dtype == torch.float64 else exponent / _LOG2_E


def _slices(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """Return maxima that can be subtracted: 0 where every logit so far was −inf."""
    return maximum.masked_fill(torch.isinf(maximum), 0.0)


def _gather_targets(logits: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the logits of those targets that lie in this tile to `out`; `columns` [tokens] counts from the tile."""
    inside = ((columns >= 0) & (columns < logits.shape[1])).nonzero()[:, 0]
    out[inside] = logits[inside, columns[inside]]


@dataclass(frozen=True)
class _Partition:
    """The vocabulary as the set, in its own order, followed by the rest, by ascending id."""

    ids: torch.Tensor
    rest: torch.Tensor
    place: torch.Tensor  # [vocabulary]: where a token lies, in the set (0 … K−1) or after it

    @classmethod
    def of(cls, ids: torch.Tensor, vocabulary: int) -> "_Partition":
        outside = torch.ones(vocabulary, dtype=torch.bool, device=ids.device)
        outside[ids] = False
        rest = outside.nonzero()[:, 0]
        place = torch.empty(vocabulary, dtype=torch.int64, device=ids.device)
        place[ids] = torch.arange(ids.numel(), device=ids.device)
        place[rest] = torch.arange(ids.numel(), vocabulary, device=ids.device)
        return cls(ids, rest, place)

    def rest_tiles(self, product: Product, size: int) -> Iterator[tuple[HeadRows, torch.Tensor, int]]:
        """Yield (head rows, their ids, the place of the first) over the rest of the vocabulary."""
        for tile in _slices(self.rest.numel(), size):
            ids = self.rest[tile]
            contiguous = int(ids[-1]) - int(ids[0]) + 1 == ids.numel()
            index = slice(int(ids[0]), int(ids[-1]) + 1) if contiguous else ids
            yield product.rows(index), ids, self.ids.numel() + tile.start


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
    n, k, n_nodes = hidden.shape[0], ids.numel(), betas.numel()
    ids = ids.to(device)
    tiling = Tiling.choose(device, product.vocabulary, memory_budget)
    partition = _Partition.of(ids, product.vocabulary)
    places = partition.place[targets.to(device)]
    nodes = _Nodes.of(betas, dtype, device)
    set_logits = torch.empty(n, k, dtype=dtype, device=device)
    target_logit, rest_best, set_best = (torch.full((n,), -math.inf, dtype=dtype, device=device) for _ in range(3))
    rest_id = torch.full((n,), -1, dtype=torch.int64, device=device)
    rest_log_sum = torch.empty(n, n_nodes, dtype=dtype, device=device)
    for span in _slices(n, tiling.span):
        states = hidden[span].to(device)
        sums = torch.zeros(n_nodes, states.shape[0], dtype=torch.float64, device=device)
        for columns in _slices(k, tiling.rows):
            rows = product.rows(ids[columns])
            for chunk, at in _chunks(span, tiling.tokens):
                z = rows.logits(product.states(states[chunk]))
                set_logits[at, columns] = z
                torch.maximum(set_best[at], z.amax(dim=1), out=set_best[at])
                _gather_targets(z, places[at] - columns.start, target_logit[at])
        for rows, tile_ids, first in partition.rest_tiles(product, tiling.rows):
            for chunk, at in _chunks(span, tiling.tokens):
                z = rows.logits(product.states(states[chunk]))
                _gather_targets(z, places[at] - first, target_logit[at])
                nodes.add(z, rest_best[at], rest_id[at], sums[:, chunk], tile_ids)
        top = torch.maximum(rest_best[span], set_best[span])
        rest_log_sum[span] = nodes.log_sums(sums, (rest_best[span] - top).double()).to(dtype)
    maximum = torch.maximum(rest_best, set_best)
    for span in _slices(n, tiling.span):
        set_logits[span] -= maximum[span, None]
    return HeadStatistics(
        ids=ids,
        betas=betas,
        maximum=maximum,
        target_logit=target_logit - maximum,
        target_index=places.masked_fill(places >= k, -1),
        set_logits=set_logits,
        rest_log_sum=rest_log_sum,
        rest_maximum=rest_best - maximum,
        rest_argmax=rest_id,
        vocabulary=product.vocabulary,
    )


def _chunks(span: slice, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yield the chunks of a span, as slices of the span and of the whole text."""
    for chunk in _slices(span.stop - span.start, tokens):
        yield chunk, slice(span.start + chunk.start, span.start + chunk.stop)


@dataclass(frozen=True)
class _Nodes:
    """Running log Σ exp(β z) at several β."""

    exponents: list[float]
    betas: torch.Tensor  # the β for which `exponents` stand, float64 [J]
    to_asked: torch.Tensor  # takes log sums from those β, within 1e-7 of them, to the ones asked for

    @classmethod
    def of(cls, betas: torch.Tensor, dtype: torch.dtype, device: torch.device) -> "_Nodes":
        pairs = [_exponent(beta, dtype) for beta in betas.tolist()]
        held = torch.tensor([beta for _, beta in pairs], dtype=torch.float64)
        to_asked = torch.stack([interpolation(held, beta)[0] for beta in betas.tolist()], dim=1)
        return cls([exponent for exponent, _ in pairs], held.to(device), to_asked.to(device))

    def add(
        self, z: torch.Tensor, best: torch.Tensor, best_id: torch.Tensor, sums: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Add a tile of logits, which is overwritten, to `sums` [J, tokens], relative to the maxima `best`."""
        tile_best = z.amax(dim=1)
        better = (tile_best > best).nonzero()[:, 0]
        if better.numel():
            best_id[better] = ids[z[better].argmax(dim=1)]
        new_best = torch.maximum(best, tile_best)
        shift = _finite(new_best)
        decay = (best - shift).double()  # −inf before the first finite logit, when the sums are 0
        best.copy_(new_best)
        z.sub_(shift[:, None])
        tile_sums = torch.empty(sums.shape, dtype=z.dtype, device=z.device)
        powers = torch.empty_like(z)
        for j, exponent in enumerate(self.exponents):
            torch.mul(z, exponent, out=powers)
            torch.sum(powers.exp2_(), dim=1, out=tile_sums[j])
        sums.mul_((self.betas[:, None] * decay).exp_()).add_(tile_sums)

    def log_sums(self, sums: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Return log sums [tokens, J] float64 at the β asked for, relative to a maximum `distance` above."""
        logs = (sums.log() + self.betas[:, None] * distance).T
        identity = torch.eye(len(self.exponents), dtype=torch.float64, device=logs.device)
        return logs + logs.masked_fill(torch.isinf(logs), 0.0) @ (self.to_asked - identity)


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
    for span in _slices(n, tiling.span):
        states = hidden[span].to(device)
        size = states.shape[0]
        best = torch.full((size,), -math.inf, dtype=dtype, device=device)
        target = torch.empty(size, dtype=dtype, device=device)
        sums = {beta: torch.zeros(size, len(m), dtype=torch.float64, device=device) for beta, m in groups.items()}
        for tile in _slices(product.vocabulary, tiling.rows):
            rows = product.rows(tile)
            for chunk, at in _chunks(span, tiling.tokens):
                z = rows.logits(product.states(states[chunk]))
                _gather_targets(z, targets[at] - tile.start, target[chunk])
                new_best = torch.maximum(best[chunk], z.amax(dim=1))
                shift = _finite(new_best)
                z.sub_(shift[:, None])
                decay = (best[chunk] - shift).double()
                best[chunk] = new_best
                powers = z if len(groups) == 1 else torch.empty_like(z)
                for beta in groups:
                    torch.mul(z, _exponent(beta, dtype)[0], out=powers).exp2_()
                    tile_sums = powers @ weights[beta].factors[tile] if beta in weights else powers.sum(1, keepdim=True)
                    sums[beta][chunk] = sums[beta][chunk] * (beta * decay).exp()[:, None] + tile_sums
        distance = (best - target).double()
        for beta, members in groups.items():
            log_sums = sums[beta].log() + (beta * distance)[:, None]
            if beta in weights:
                log_sums += weights[beta].largest
            for column, i in enumerate(members):
                # without any bias in its group a single column of plain sums serves every member
                own = column if beta in weights else 0
                losses[i, span] = (log_sums[:, own] - _target_bias(corrections[i], targets[span])).to(dtype)
    return losses


def _group_by_beta(corrections: Sequence[Correction], dtype: torch.dtype) -> dict[float, list[int]]:
    groups: dict[float, list[int]] = {}
    for i, correction in enumerate(corrections):
        groups.setdefault(_exponent(correction.beta, dtype)[1], []).append(i)
    return groups


def _target_bias(correction: Correction, targets: torch.Tensor) -> torch.Tensor | float:
    """Return the bias of each target, float64 [N]; 0 outside the set."""
    if correction.ids.numel() == 0:
        return 0.0
    sorted_ids, order = torch.sort(correction.ids.to(targets.device))
    at = torch.searchsorted(sorted_ids, targets).clamp(max=sorted_ids.numel() - 1)
    bias = correction.bias.to(targets.device).double()[order][at]
    return torch.where(sorted_ids[at] == targets, bias, 0.0)


@dataclass(frozen=True)
class _Running:
    """Of the rest of the vocabulary, token by token: largest logit m, Σ exp(β(z − m)) and Σ exp(β(z − m))(z − m)."""

    best: torch.Tensor
    sums: torch.Tensor
    weighted: torch.Tensor

    @classmethod
    def empty(cls, size: int, dtype: torch.dtype, device: torch.device) -> "_Running":
        zeros = torch.zeros(2, size, dtype=torch.float64, device=device)
        return cls(torch.full((size,), -math.inf, dtype=dtype, device=device), zeros[0], zeros[1])

    def at(self, chunk: slice) -> "_Running":
        return _Running(self.best[chunk], self.sums[chunk], self.weighted[chunk])

    def add(self, z: torch.Tensor, exponent: float, beta: float, masked: bool) -> None:
        """Add a tile of logits, which is overwritten."""
        new_best = torch.maximum(self.best, z.amax(dim=1))
        shift = _finite(new_best)
        decay = (self.best - shift).double()
        scale = (beta * decay).exp()
        self.weighted.add_(self.sums * decay.masked_fill(torch.isinf(decay), 0.0)).mul_(scale)
        self.sums.mul_(scale)
        self.best.copy_(new_best)
        z.sub_(shift[:, None])
        powers = torch.mul(z, exponent).exp2_()
        self.sums.add_(powers.sum(dim=1))
        if masked:
            z.masked_fill_(torch.isinf(z), 0.0)  # a masked row has p = 0, and 0 · −inf is not 0
        self.weighted.add_(powers.mul_(z).sum(dim=1))


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
    dtype, device, masked = product.dtype, product.device, readout.masked is not None
    n, k = hidden.shape[0], correction.ids.numel()
    exponent, beta = _exponent(correction.beta, dtype)
    targets = targets.to(device)
    tiling = Tiling.choose(device, product.vocabulary, memory_budget)
    partition = _Partition.of(correction.ids.to(device), product.vocabulary)
    places = partition.place[targets]
    target_bias = _target_bias(correction, targets)
    set_rows = product.rows(partition.ids)
    exponent_bias = (correction.bias.to(device).double() * _LOG2_E).to(dtype)
    maximum, target_logit, expected, nll = (torch.empty(n, dtype=dtype, device=device) for _ in range(4))
    probability_sums = torch.zeros(k, dtype=torch.float64, device=device)
    for span in _slices(n, tiling.span):
        states = hidden[span].to(device)
        rest = _Running.empty(states.shape[0], dtype, device)
        for rows, _, first in partition.rest_tiles(product, tiling.rows):
            for chunk, at in _chunks(span, tiling.tokens):
                z = rows.logits(product.states(states[chunk]))
                _gather_targets(z, places[at] - first, target_logit[at])
                rest.at(chunk).add(z, exponent, beta, masked)
        # the whole set at once: its probabilities need the sum over everything, which is known only now
        for chunk, at in _chunks(span, max(1, min(tiling.tokens, tiling.tokens * tiling.rows // max(k, 1)))):
            here = rest.at(chunk)
            z = set_rows.logits(product.states(states[chunk]))
            _gather_targets(z, places[at], target_logit[at])
            top = torch.maximum(here.best, z.amax(dim=1)) if k else here.best
            z.sub_(top[:, None])
            powers = torch.add(exponent_bias, z, alpha=exponent)
            shift = _finite(powers.amax(dim=1)) if k else torch.zeros_like(top)
            powers.sub_(shift[:, None]).exp2_()
            distance = (here.best - top).double()
            log_rest = here.sums.log() + beta * distance
            log_shift = shift.double() / _LOG2_E
            log_sum = torch.logaddexp(log_rest, powers.sum(dim=1).double().log() + log_shift)
            probability_sums += (log_shift - log_sum).exp().to(dtype) @ powers
            if masked:
                z.masked_fill_(torch.isinf(z), 0.0)
            rest_expected = (here.weighted / here.sums + distance).nan_to_num(nan=0.0, neginf=0.0)
            set_expected = powers.mul_(z).sum(dim=1).double() * (log_shift - log_sum).exp()
            expected[at] = ((log_rest - log_sum).exp() * rest_expected + set_expected).to(dtype)
            maximum[at] = top
            target_logit[at] -= top
            nll[at] = (log_sum - beta * target_logit[at].double()).to(dtype)
    if isinstance(target_bias, torch.Tensor):
        nll = (nll.double() - target_bias).to(dtype)
    return CorrectedMoments(nll, probability_sums, expected, target_logit, maximum)


def fit_objective(statistics: HeadStatistics, beta: float, bias: torch.Tensor) -> Objective:
    """Return the mean loss and gradient at (β, b) from statistics, in chunks of tokens; the same bits every time."""
    s = statistics
    n, dtype, device = len(s), s.set_logits.dtype, s.set_logits.device
    exponent, beta = _exponent(beta, dtype)
    low, high = s.beta_range
    values, slopes = (weights.to(device) for weights in interpolation(s.betas, min(max(beta, low), high)))
    exponent_bias = (bias.to(device).double() * _LOG2_E).to(dtype)
    empty = s.rest_is_empty
    loss = torch.zeros((), dtype=torch.float64, device=device)
    slope = torch.zeros((), dtype=torch.float64, device=device)
    gradient = torch.zeros(bias.numel(), dtype=torch.float64, device=device)
    for chunk in _slices(n, max(16, _cached(device) // max(1, bias.numel()))):
        z = s.set_logits[chunk]
        if empty:
            rest = torch.full((z.shape[0],), -math.inf, dtype=torch.float64, device=device)
            rest_slope = torch.zeros_like(rest)
        else:
            log_sums = s.rest_log_sum[chunk].double()
            rest, rest_slope = log_sums @ values, log_sums @ slopes
        powers = torch.add(exponent_bias, z, alpha=exponent)
        # in powers of two, as the compute dtype holds it, so that the set and the rest use the same reference
        top = (rest * _LOG2_E).to(dtype)
        if bias.numel():
            top = torch.maximum(top, powers.amax(dim=1))
        powers.sub_(top[:, None]).exp2_()
        top = top.double() / _LOG2_E
        rest_weight = (rest - top).exp()
        total = powers.sum(dim=1).double() + rest_weight
        loss += (total.log() + top).sum()
        gradient += total.reciprocal().to(dtype) @ powers
        expected = powers.mul_(z).sum(dim=1).double()
        slope += ((expected + rest_weight * rest_slope) / total).sum()
    target_sum = s.target_logit.double().sum()
    counts = s.target_counts().double()
    return Objective(
        loss=float((loss - beta * target_sum - counts @ (exponent_bias.double() / _LOG2_E)) / n),
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
        exponent, beta = _exponent(beta, dtype)
        low, high = s.beta_range
        values, _ = interpolation(s.betas, min(max(beta, low), high))
        rest = s.rest_log_sum.double() @ values.to(device)
        if s.rest_is_empty:
            rest = torch.full_like(rest, -math.inf)
        self.probabilities = torch.empty_like(s.set_logits)
        normaliser = torch.empty_like(rest)
        self.step = max(16, _cached(device) // max(1, s.ids.numel()))
        for chunk in _slices(self.n, self.step):
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
        for chunk in _slices(self.n, self.step):
            p = self.probabilities[chunk]  # read from memory once for both products
            total = (p @ factors).double() + self.rest[chunk]
            loss += total.log().sum()
            gradient += total.reciprocal().to(p) @ p
        mean = (float(loss) + self.constant - float(self.counts @ factors.double().log())) / self.n
        return mean, ((gradient * factors - self.counts) / self.n).cpu()
