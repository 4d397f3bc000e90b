"""The large problems of the ladder: full-vocabulary passes with gradients, their moments, and the solver.

Problems are solved in variables in which their curvature is near 1, so that L-BFGS needs few passes and half the
squared gradient estimates the distance from the optimum in nats.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from .capture import TextStates
from .head import OutputModel
from .kernels import Readout

HISTORY, SHORT_HISTORY = 10, 4
"""How many steps L-BFGS remembers, usually and where the variables fill the memory."""

_CHUNK = 512
_MOST_EVALUATIONS = 20
_LARGEST_GAP = 1e-4


def _logits(product: torch.Tensor, readout: Readout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits and d logit / d product (None where that is the readout's scale)."""
    z = readout.logits(product)
    if readout.softcap is None:
        return z, None
    return z, readout.scale * (1 - (z / readout.softcap).square())


def _chunks(n: int) -> list[slice]:
    return [slice(start, min(start + _CHUNK, n)) for start in range(0, n, _CHUNK)]


def exact_losses(
    states: TextStates,
    head: torch.Tensor,
    readout: Readout,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return exact losses [tokens], nats, with the states changed and the logits scaled and shifted by entry."""
    dtype = torch.float64 if head.dtype == torch.float64 else torch.float32
    weights = head.to(dtype).T
    out = torch.empty(len(states.targets), dtype=torch.float64)
    for part in _chunks(len(states.targets)):
        h = states.hidden[part].to(device=head.device, dtype=dtype)
        z, _ = _logits((h if change is None else change(h)) @ weights, readout)
        if scale is not None:
            z = z * scale
        if bias is not None:
            z = z + bias
        targets = states.targets[part].to(head.device)
        out[part] = (z.logsumexp(dim=1) - z.gather(1, targets[:, None])[:, 0]).double().cpu()
    return out


class Problem:
    """Mean loss on `fit` with gradients, in full-vocabulary passes; sums over chunks in float64."""

    def __init__(self, model: OutputModel) -> None:
        self.readout = model.readout
        self.dtype = torch.float64 if model.head.dtype == torch.float64 else torch.float32
        self.head = model.head.to(self.dtype)
        states = model.splits["fit"]
        self.hidden = states.hidden.to(device=self.head.device, dtype=self.dtype)
        self.targets = states.targets.to(self.head.device)
        self.n = len(states.targets)

    def each(
        self,
        visit: Callable[[slice, torch.Tensor, torch.Tensor], None],
        head: torch.Tensor | None = None,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
        scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> float:
        """Return the mean loss; `visit(part, z, residual)` sees the logits and d loss / d product of every chunk.

        With `scale` or `bias` the residual is p − e, the derivative by the corrected logit.
        """
        weights = (self.head if head is None else head.to(self.dtype)).T
        total = 0.0
        for part in _chunks(self.n):
            h = self.hidden[part]
            z, slope = _logits((h if change is None else change(h)) @ weights, self.readout)
            corrected = z if scale is None else z * scale
            corrected = corrected if bias is None else corrected + bias
            targets = self.targets[part][:, None]
            maximum = corrected.max(dim=1, keepdim=True).values
            target = corrected.gather(1, targets) - maximum
            residual = (corrected - maximum).exp_()
            sums = residual.sum(dim=1, keepdim=True)
            total += float((sums.log() - target).double().sum())
            residual.div_(sums).scatter_add_(1, targets, torch.full_like(sums, -1.0))
            if scale is None and bias is None:
                residual = residual.mul_(self.readout.scale if slope is None else slope)
            visit(part, z, residual)
        return total / self.n


@dataclass(frozen=True)
class End:
    """Where a minimisation ended: the best x seen, the gradient's norm there, evaluations of the objective."""

    x: torch.Tensor
    gradient_norm: float
    evaluations: int

    @property
    def status(self) -> str:
        """Return "converged" (less than 1e-4 nats from the optimum, as far as the gradient says) or "stopped"."""
        return "converged" if self.gradient_norm**2 / 2 < _LARGEST_GAP else "stopped"


class _Enough(Exception):
    """The gradient is small enough."""


def minimise(
    objective: Callable[[torch.Tensor], tuple[float, torch.Tensor]],
    start: torch.Tensor,
    most: int = _MOST_EVALUATIONS,
    history: int = HISTORY,
) -> End:
    """Run torch's L-BFGS with a strong Wolfe line search; the variables must have curvatures near 1."""
    x = start.clone()
    x.grad = torch.zeros_like(x)
    evaluations, norm, best = 0, math.inf, (math.inf, math.inf, start)

    def closure() -> float:
        nonlocal evaluations, norm, best
        evaluations += 1
        loss, gradient = objective(x)
        assert x.grad is not None
        x.grad.copy_(gradient)
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if loss < best[0]:
            best = (loss, norm, x.clone())
        if norm**2 / 2 < _LARGEST_GAP or evaluations >= most:
            raise _Enough
        return loss

    solver = torch.optim.LBFGS(
        [x],
        max_iter=most,
        history_size=history,
        tolerance_grad=0.0,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    with suppress(_Enough):
        solver.step(closure)
    return End(best[2], best[1], evaluations)


@dataclass(frozen=True)
class Moments:
    """What gives every problem variables of curvature near 1, from one pass.

    `mean` [width] and `covariance` of the states; `mass` [vocabulary] = mean p(1 − p); `centre` [vocabulary] and
    `spread`: of the logits, weighted by p(1 − p); `pull` [width, width] = E[Wᵀ(diag p − ppᵀ)W].
    """

    mean: torch.Tensor
    covariance: torch.Tensor
    mass: torch.Tensor
    centre: torch.Tensor
    spread: torch.Tensor
    pull: torch.Tensor

    @classmethod
    def of(cls, problem: Problem) -> "Moments":
        """Return the moments of the uncorrected model on its `fit` text."""
        n, (rows, width) = problem.n, problem.head.shape
        hidden = problem.hidden.double()
        mean = hidden.mean(dim=0)
        centred = hidden - mean
        sums = torch.zeros(4, rows, dtype=torch.float64, device=problem.head.device)
        pull = torch.zeros(width, width, dtype=torch.float64, device=problem.head.device)

        def visit(part: slice, z: torch.Tensor, residual: torch.Tensor) -> None:
            targets = problem.targets[part][:, None]
            p = (residual / problem.readout.scale).scatter_add_(1, targets, torch.ones_like(targets, dtype=z.dtype))
            p = p.clamp_min(0.0)
            weight = p * (1 - p)
            finite = z.nan_to_num(neginf=0.0)
            sums[0] += p.sum(dim=0)
            sums[1] += weight.sum(dim=0)
            sums[2] += (weight * finite).sum(dim=0)
            sums[3] += (weight * finite.square()).sum(dim=0)
            expected = (p @ problem.head).double()
            pull.sub_(expected.T @ expected)

        problem.each(visit)
        head = problem.head.double()
        pull += (head * sums[0][:, None]).T @ head
        weight = sums[1].clamp_min(1e-12)
        centre = sums[2] / weight
        variance = (sums[3] / weight - centre.square()).clamp_min(1e-6)
        covariance = centred.T @ centred / n
        scale = problem.readout.scale**2
        return cls(mean, covariance, sums[1] / n, centre, variance.sqrt(), pull / n * scale)


@dataclass(frozen=True)
class Candidate:
    """A penalty, where its fit ended, and its loss on `select`."""

    penalty: float
    end: End
    select_loss: float


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate of least `select` loss, ties to the larger penalty."""
    return min(candidates, key=lambda c: (c.select_loss, -c.penalty))


def penalty_path(
    objective: Callable[[torch.Tensor, float], tuple[float, torch.Tensor]],
    penalties: Sequence[float],
    start: torch.Tensor,
    scale_of: Callable[[float], torch.Tensor],
    select_loss: Callable[[torch.Tensor], float],
    history: int = HISTORY,
) -> list[Candidate]:
    """Solve from the largest penalty down, each from the last end, until `select` grows worse; ends in natural units.

    Smaller penalties than that only fit the text more closely, and take the longest to solve.
    """
    ends: list[Candidate] = []
    natural = start
    for penalty in sorted(penalties, reverse=True):
        scale = scale_of(penalty)

        def scaled(
            x: torch.Tensor, penalty: float = penalty, scale: torch.Tensor = scale
        ) -> tuple[float, torch.Tensor]:
            value = x / scale
            loss, gradient = objective(value, penalty)
            square = float(value.square().sum(dtype=torch.float64))
            return loss + penalty / 2 * square, (gradient + penalty * value) / scale

        end = minimise(scaled, natural * scale, history=history)
        natural = end.x / scale
        ends.append(Candidate(penalty, replace(end, x=natural), select_loss(natural)))
        if len(ends) > 1 and ends[-1].select_loss > ends[-2].select_loss:
            break
    return ends
