"""The passes over hidden × headᵀ, written once: logits of the set, sums over the rest, and how the two join.

An engine (`chunked`, `triton`) supplies the two pieces of work; everything here is small beside them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..correction import Correction
from .nodes import LOG2_E, Nodes
from .statistics import CorrectedMoments, HeadStatistics


@dataclass(frozen=True)
class Partition:
    """The vocabulary as the set, in its own order, followed by the rest, by ascending id, without masked rows.

    `place` [vocabulary] says where a token lies: 0 … K−1 in the set, K … in the rest, −1 where masked.
    """

    ids: torch.Tensor
    rest: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, vocabulary: int, masked: torch.Tensor | None = None) -> "Partition":
        """Return the partition of `vocabulary` head rows by the set `ids`, on the device of `ids`."""
        outside = torch.ones(vocabulary, dtype=torch.bool, device=ids.device)
        if masked is not None:
            outside &= ~masked.to(ids.device)
        outside[ids] = False
        rest = outside.nonzero()[:, 0]
        place = torch.full((vocabulary,), -1, dtype=torch.int64, device=ids.device)
        place[ids] = torch.arange(ids.numel(), device=ids.device)
        place[rest] = torch.arange(ids.numel(), ids.numel() + rest.numel(), device=ids.device)
        return cls(ids, rest, place)


@dataclass(frozen=True)
class Rest:
    """Sums over the rest of the vocabulary, token by token, relative to its own largest logit m.

    `best` [N] is m (−inf where the rest is empty) and `best_id` int64 [N] its id (−1); `target` [N] the target's
    logit where the target is in the rest; `sums` float64 [J, N] = Σ exp(β(z − m)); `weighted` float64 [J, N] =
    Σ exp(β(z − m))·(z − m), where asked for.
    """

    best: torch.Tensor
    best_id: torch.Tensor
    target: torch.Tensor
    sums: torch.Tensor
    weighted: torch.Tensor | None

    @classmethod
    def empty(cls, tokens: int, nodes: int, dtype: torch.dtype, device: torch.device, weighted: bool) -> "Rest":
        """Return the sums over nothing."""
        zeros = torch.zeros(2, nodes, tokens, dtype=torch.float64, device=device)
        lowest = torch.full((2, tokens), -math.inf, dtype=dtype, device=device)
        best_id = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        return cls(lowest[0], best_id, lowest[1], zeros[0], zeros[1] if weighted else None)


class Engine(Protocol):
    """What does the work on one device: dtype of results, and how many tokens are worked on at once."""

    dtype: torch.dtype
    device: torch.device
    vocabulary: int
    masked: torch.Tensor | None
    span: int

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a span of hidden states where work is done."""

    def set_step(self, k: int) -> int:
        """Return how many tokens' logits of a set of `k` ids are worked on at once."""

    def readout_of(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that takes states to logits [tokens, K] of some head rows, a fresh tensor."""

    def rest(
        self, states: torch.Tensor, partition: Partition, places: torch.Tensor, nodes: Nodes, weighted: bool
    ) -> Rest:
        """Return the sums over the rest; `places` [tokens] are those of the targets."""


def slices(n: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover 0 … n."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def finite(maximum: torch.Tensor) -> torch.Tensor:
    """Return maxima that can be subtracted: 0 where every number was −inf."""
    return maximum.masked_fill(torch.isinf(maximum), 0.0)


def _target_logits(rest: torch.Tensor, z: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the targets' logits, from the set's logits `z` where they lie in the set, else from the rest."""
    if z.shape[1] == 0:
        return rest
    in_set = z.gather(1, places.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    return torch.where(places < z.shape[1], in_set, rest)


def _top(rest: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return rest if z.shape[1] == 0 else torch.maximum(rest, z.amax(dim=1))


def head_statistics(
    engine: Engine, hidden: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, betas: torch.Tensor
) -> HeadStatistics:
    """Return the statistics of DESIGN §3 in the engine's dtype, on its device."""
    dtype, device, n, k = engine.dtype, engine.device, hidden.shape[0], ids.numel()
    ids = ids.to(device)
    partition = Partition.of(ids, engine.vocabulary, engine.masked)
    places = partition.place[targets.to(device)]
    nodes = Nodes.of(betas.tolist(), dtype, device)
    readout = engine.readout_of(ids)
    set_logits = torch.empty(n, k, dtype=dtype, device=device)
    rest_log_sum = torch.empty(n, betas.numel(), dtype=dtype, device=device)
    maximum, target_logit, rest_maximum = (torch.empty(n, dtype=dtype, device=device) for _ in range(3))
    rest_argmax = torch.empty(n, dtype=torch.int64, device=device)
    for span in slices(n, engine.span):
        states = engine.states(hidden[span])
        rest = engine.rest(states, partition, places[span], nodes, weighted=False)
        rest_argmax[span] = rest.best_id
        for chunk in slices(states.shape[0], engine.set_step(k)):
            at = slice(span.start + chunk.start, span.start + chunk.stop)
            z, best = readout(states[chunk]), rest.best[chunk]
            top = _top(best, z)
            maximum[at], rest_maximum[at] = top, best - top
            target_logit[at] = _target_logits(rest.target[chunk], z, places[at]) - top
            torch.sub(z, top[:, None], out=set_logits[at])
            log_sums = rest.sums[:, chunk].log() + nodes.betas[:, None] * rest_maximum[at].double()
            rest_log_sum[at] = nodes.moved_to(betas, log_sums.T).to(dtype)
    return HeadStatistics(
        ids=ids,
        betas=betas,
        maximum=maximum,
        target_logit=target_logit,
        target_index=places.masked_fill(places >= k, -1),
        set_logits=set_logits,
        rest_log_sum=rest_log_sum,
        rest_maximum=rest_maximum,
        rest_argmax=rest_argmax,
        vocabulary=engine.vocabulary,
    )


def _union(corrections: Sequence[Correction], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ids of some corrections, ascending, and float64 biases [C, K] on them."""
    ids = torch.cat([c.ids.to(device) for c in corrections]).unique()
    bias = torch.zeros(len(corrections), ids.numel(), dtype=torch.float64, device=device)
    for row, correction in enumerate(corrections):
        bias[row, torch.searchsorted(ids, correction.ids.to(device))] = correction.bias.to(device).double()
    return ids, bias


@dataclass(frozen=True)
class _SetSum:
    """The set's share of a softmax: 2^(shift) · Σ powers, in nats `log_sum`."""

    powers: torch.Tensor
    shift: torch.Tensor  # nats, float64
    log_sum: torch.Tensor  # nats, float64

    @classmethod
    def of(cls, z: torch.Tensor, exponent: float, bias: torch.Tensor) -> "_SetSum":
        """Sum exp(β z + b) over the set; `bias` in powers of two, so that no size of a bias can overflow."""
        powers = torch.add(bias, z, alpha=exponent)
        shift = finite(powers.amax(dim=1)) if z.shape[1] else z.new_zeros(z.shape[0])
        powers.sub_(shift[:, None]).exp2_()
        nats = shift.double() / LOG2_E
        return cls(powers, nats, powers.sum(dim=1).double().log() + nats)


def corrected_losses(
    engine: Engine, hidden: torch.Tensor, targets: torch.Tensor, corrections: Sequence[Correction]
) -> torch.Tensor:
    """Return exact losses [C, N] in nats under several corrections, from one pass over the product.

    Corrections with the same temperature share the exponentials of the rest; a bias costs work on the set alone.
    """
    dtype, device, n = engine.dtype, engine.device, hidden.shape[0]
    ids, bias = _union(corrections, device)
    exponent_bias = (bias * LOG2_E).to(dtype)
    partition = Partition.of(ids, engine.vocabulary, engine.masked)
    places = partition.place[targets.to(device)]
    betas = sorted({c.beta for c in corrections})
    nodes = Nodes.of(betas, dtype, device)
    readout = engine.readout_of(ids)
    losses = torch.empty(len(corrections), n, dtype=dtype, device=device)
    for span in slices(n, engine.span):
        states = engine.states(hidden[span])
        rest = engine.rest(states, partition, places[span], nodes, weighted=False)
        for chunk in slices(states.shape[0], engine.set_step(ids.numel())):
            at = slice(span.start + chunk.start, span.start + chunk.stop)
            z, best = readout(states[chunk]), rest.best[chunk]
            top = _top(best, z)
            target = (_target_logits(rest.target[chunk], z, places[at]) - top).double()
            z.sub_(top[:, None])
            log_rest = rest.sums[:, chunk].log() + nodes.betas[:, None] * (best - top).double()
            for row, correction in enumerate(corrections):
                node = betas.index(correction.beta)
                in_set = _SetSum.of(z, nodes.exponents[node], exponent_bias[row])
                log_sum = torch.logaddexp(log_rest[node], in_set.log_sum)
                losses[row, at] = (log_sum - nodes.betas[node] * target - _bias_at(bias[row], places[at])).to(dtype)
    return losses


def _bias_at(bias: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the bias of each target, float64 [N]; 0 outside the set."""
    if bias.numel() == 0:
        return torch.zeros(places.shape, dtype=torch.float64, device=places.device)
    return torch.where(places < bias.numel(), bias[places.clamp(max=bias.numel() - 1)], 0.0)


def corrected_moments(
    engine: Engine, hidden: torch.Tensor, targets: torch.Tensor, correction: Correction
) -> CorrectedMoments:
    """Return the exact loss, Σ_n p(k) on the set and E_p[z], from one pass over the product."""
    dtype, device, n, k = engine.dtype, engine.device, hidden.shape[0], correction.ids.numel()
    bias = correction.bias.to(device).double()
    exponent_bias = (bias * LOG2_E).to(dtype)
    partition = Partition.of(correction.ids.to(device), engine.vocabulary, engine.masked)
    places = partition.place[targets.to(device)]
    nodes = Nodes.of([correction.beta], dtype, device)
    beta = nodes.betas[0]
    readout = engine.readout_of(partition.ids)
    maximum, target_logit, expected, nll = (torch.empty(n, dtype=dtype, device=device) for _ in range(4))
    probability_sums = torch.zeros(k, dtype=torch.float64, device=device)
    for span in slices(n, engine.span):
        states = engine.states(hidden[span])
        rest = engine.rest(states, partition, places[span], nodes, weighted=True)
        assert rest.weighted is not None
        # probabilities need the sum over everything, so the set comes after the rest
        for chunk in slices(states.shape[0], engine.set_step(k)):
            at = slice(span.start + chunk.start, span.start + chunk.stop)
            z, best = readout(states[chunk]), rest.best[chunk]
            top = _top(best, z)
            target = _target_logits(rest.target[chunk], z, places[at]) - top
            z.sub_(top[:, None])
            in_set = _SetSum.of(z, nodes.exponents[0], exponent_bias)
            distance = (best - top).double()
            log_rest = rest.sums[0, chunk].log() + beta * distance
            log_sum = torch.logaddexp(log_rest, in_set.log_sum)
            share = (in_set.shift - log_sum).exp()
            probability_sums += share.to(dtype) @ in_set.powers
            z.masked_fill_(torch.isinf(z), 0.0)  # a masked row has p = 0, and 0 · −inf is not 0
            of_set = in_set.powers.mul_(z).sum(dim=1).double() * share
            of_rest = (rest.weighted[0, chunk] / rest.sums[0, chunk] + distance).nan_to_num(nan=0.0, neginf=0.0)
            expected[at] = ((log_rest - log_sum).exp() * of_rest + of_set).to(dtype)
            maximum[at], target_logit[at] = top, target
            nll[at] = (log_sum - beta * target.double() - _bias_at(bias, places[at])).to(dtype)
    return CorrectedMoments(nll, probability_sums, expected, target_logit, maximum)
