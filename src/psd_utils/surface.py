"""The loss of every token as a function of temperature and bias strength, small enough to be looked up while a slider
moves: log-sums over the whole vocabulary on a grid of (β, strength), and which token is the largest at every ratio.

Logits are β·z + s·b, with b a fitted bias and s its strength in [0, 1]; z is relative to the token's largest logit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import torch

from .kernels import HeadStatistics, chebyshev_betas
from .kernels.statistics import interpolation

BETAS = chebyshev_betas(0.5, 2.0, 10)
"""Grid of β, for temperatures from 0.5 to 2. With the grid of strengths it carries mean losses to about 1e-5 nats."""

# Chebyshev points of the strength itself: those of the logarithm of its exponential
STRENGTHS = chebyshev_betas(1.0, math.e, 7).log()


@dataclass(frozen=True)
class TokenReadings:
    """What a model says of each token at one (T, strength): `loss` [N] in nats, the largest probability `confidence`
    [N], and whether its token is the target, `correct` bool [N]."""

    loss: torch.Tensor
    confidence: torch.Tensor
    correct: torch.Tensor


@dataclass(frozen=True)
class Surface:
    """N tokens under one bias; J values of β, M strengths, at most P tokens that are the largest at some s/β.

    `log_sums` float32 [N, J, M], log Σ exp(β z + s b); `target_logit` and `target_bias` [N], and `target` int64 [N];
    from the ratio s/β = `starts` [N, P] on (inf where there is no such piece), the largest logit is that of token
    `largest` int64 [N, P], with logit `heights` and bias `slopes`.
    """

    log_sums: torch.Tensor
    target: torch.Tensor
    target_logit: torch.Tensor
    target_bias: torch.Tensor
    starts: torch.Tensor
    largest: torch.Tensor
    heights: torch.Tensor
    slopes: torch.Tensor

    def at(self, temperature: float, strength: float) -> TokenReadings:
        """Return loss, confidence and correctness of every token at T in [0.5, 2] and strength in [0, 1]."""
        beta = 1.0 / temperature
        n = len(self.target)
        weights = (_beta_weights(beta)[:, None] * _strength_weights(strength, self.log_sums.shape[2])).flatten()
        log_sum = self.log_sums.reshape(n, -1) @ weights.float()
        piece = (self.starts <= strength / beta).sum(dim=1, keepdim=True) - 1
        token, height, slope = (x.gather(1, piece)[:, 0] for x in (self.largest, self.heights, self.slopes))
        return TokenReadings(
            loss=log_sum - beta * self.target_logit - strength * self.target_bias,
            confidence=(beta * height + strength * slope - log_sum).exp().clamp(max=1.0),
            correct=token == self.target,
        )

    def mean_losses(self, temperatures: torch.Tensor, strength: float) -> torch.Tensor:
        """Return the mean loss at each of `temperatures` [A], float64 [A], nats per token."""
        log_sums, logit, bias = self._means
        grid = log_sums @ _strength_weights(strength, self.log_sums.shape[2])
        weights = torch.stack([_beta_weights(1.0 / t) for t in temperatures.tolist()])
        return weights @ grid - logit / temperatures - strength * bias

    @cached_property
    def _means(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_sums = self.log_sums.mean(dim=0, dtype=torch.float64)
        return log_sums, self.target_logit.mean(dtype=torch.float64), self.target_bias.mean(dtype=torch.float64)

    @classmethod
    def of(cls, statistics: HeadStatistics, targets: torch.Tensor, bias: torch.Tensor) -> "Surface":
        """Return the surface of `bias` [K] on the set of the statistics, which must have been made at `BETAS`.

        `targets` int64 [N]. An empty set gives a surface in β alone (M = 1).
        """
        s = statistics
        bias = bias.to(s.set_logits)
        strengths = STRENGTHS if bias.numel() else torch.zeros(1, dtype=torch.float64)
        factors = torch.outer(bias.double(), strengths).exp().to(bias)
        log_sums = torch.empty(len(s), len(BETAS), len(strengths))
        powers = torch.empty_like(s.set_logits)
        for j, beta in enumerate(BETAS.tolist()):
            # one exponential a logit serves all strengths, by a matrix product
            torch.mul(s.set_logits, beta, out=powers).exp_()
            of_set = (powers @ factors).double().log()
            log_sums[:, j] = torch.logaddexp(of_set, s.rest_log_sum[:, j, None].double())
        inside = s.target_index >= 0
        target_bias = torch.zeros_like(s.target_logit)
        target_bias[inside] = bias[s.target_index[inside]]
        # ids outside the set have no bias, so that the largest of them stands for all
        lines = torch.cat([s.set_logits, s.rest_maximum[:, None]], dim=1)
        starts, place = upper_envelope(lines, torch.cat([bias, bias.new_zeros(1)]), float(1.0 / BETAS[0]))
        ids = torch.cat([s.ids.expand(len(s), -1), s.rest_argmax[:, None]], dim=1)
        return cls(
            log_sums,
            targets,
            s.target_logit,
            target_bias,
            starts,
            ids.gather(1, place),
            lines.gather(1, place),
            torch.cat([bias, bias.new_zeros(1)])[place],
        )

    @classmethod
    def joined(cls, pieces: Sequence["Surface"]) -> "Surface":
        """Return the surface of all tokens of `pieces`, in order."""
        most = max(piece.starts.shape[1] for piece in pieces)
        columns = {}
        for name in (f.name for f in fields(cls)):
            values = [getattr(piece, name) for piece in pieces]
            if name in ("starts", "largest", "heights", "slopes"):
                fill = math.inf if name == "starts" else 0
                values = [torch.nn.functional.pad(v, (0, most - v.shape[1]), value=fill) for v in values]
            columns[name] = torch.cat(values)
        return cls(**columns)


def upper_envelope(heights: torch.Tensor, slopes: torch.Tensor, end: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the lines heights[n, k] + slopes[k]·r is the highest, for every r from 0 to `end`.

    Returns `starts` [N, P], the r from which on, ascending and inf where there are fewer pieces, and the lines'
    places int64 [N, P]. From one piece to the next: the first crossing with a steeper line.
    """
    rows = torch.arange(len(heights))
    # of equal heights at r = 0 the steepest goes on
    top = heights.amax(dim=1, keepdim=True)
    current = torch.where(heights == top, slopes, -math.inf).argmax(dim=1)
    starts, places = [torch.zeros(len(heights), dtype=heights.dtype)], [current]
    while rows.numel():
        gaps = heights[rows, current][:, None] - heights[rows]
        rises = slopes - slopes[current][:, None]
        at, steeper = torch.where(rises > 0, gaps / rises, math.inf).min(dim=1)
        going = at < end
        rows, current, at = rows[going], steeper[going], at[going]
        if rows.numel():
            starts.append(torch.full_like(starts[0], math.inf).index_copy(0, rows, at))
            places.append(torch.zeros_like(places[0]).index_copy(0, rows, current))
    return torch.stack(starts, dim=1), torch.stack(places, dim=1)


@lru_cache(maxsize=1024)
def _beta_weights(beta: float) -> torch.Tensor:
    return interpolation(BETAS, beta)[0]


@lru_cache(maxsize=1024)
def _strength_weights(strength: float, n: int) -> torch.Tensor:
    if n == 1:
        return torch.ones(1, dtype=torch.float64)
    return interpolation(STRENGTHS.exp(), math.exp(strength))[0]
