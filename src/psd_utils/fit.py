"""Head statistics -> the best correction of a kind, with a record of how the solver ended."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq, minimize

from .correction import FITTED_BIAS_KINDS, KINDS, Correction
from .errors import PsdError, nearest
from .kernels import HeadStatistics
from .objectives import BETA_BOUNDS, BiasObjective, FitObjective, StatisticsObjective

BIAS_BOUND = 20.0
PENALTIES = (0.0, 1e-5, 1e-4, 1e-3)
"""The λ from which `select` chooses (DESIGN §2)."""

# Half the squared gradient, in variables of curvature near 1, estimates how far the loss is from its optimum (nats).
_LARGEST_GAP = 1e-7
# From here on float32 statistics have little more to say.
_SMALLEST_GAP = 1e-9


@dataclass(frozen=True)
class Convergence:
    """How a fit ended.

    `status`: "converged"; "at_bound" (the optimum within the bounds lies on one); "node_edge" (β reached the edge of
    the statistics' nodes: make statistics around it); "not_converged"; "closed_form" (nothing was iterated).
    `gradient_norm` is the largest absolute component of the gradient of the objective in (β, b) over the directions
    that no bound blocks, nats per unit; `iterations` counts evaluations of the objective; `loss` is the mean loss on
    the fitted text, without the penalty.
    """

    status: str
    iterations: int
    gradient_norm: float
    loss: float


@dataclass(frozen=True)
class Fit:
    """A fitted correction, its kind and penalty λ, and its convergence record."""

    correction: Correction
    convergence: Convergence
    kind: str
    penalty: float


def fit_correction(
    statistics: HeadStatistics | FitObjective,
    kind: str = "bias_temperature",
    penalty: float = 0.0,
    start: Correction | None = None,
) -> Fit:
    """Return the correction of `kind` that minimises mean loss + (λ/2)·‖b‖² on the statistics' text.

    `statistics` may also be another objective, such as one of exact passes.

    The problem is jointly convex in (β, b); bounds 0.05 ≤ β ≤ 20, |b| ≤ 20, and β within the nodes. `start` gives
    the point to start from (default: `prior_ratio`). Where the set is the whole vocabulary, b has mean zero.

    Raises:
        PsdError: an unknown kind, a negative penalty, or a bias kind on statistics with an empty set.
    """
    if kind not in KINDS:
        raise PsdError(f"no correction of kind {kind!r}: {nearest(kind, list(KINDS))}")
    if not (math.isfinite(penalty) and penalty >= 0):
        raise PsdError(f"the penalty must be finite and not negative, found {penalty}")
    source = StatisticsObjective(statistics) if isinstance(statistics, HeadStatistics) else statistics
    if kind not in ("none", "temperature") and source.ids.numel() == 0:
        raise PsdError(f"a correction of kind {kind!r} needs a set of ids, and these statistics have none")
    if source.n_tokens == 0:
        raise PsdError("there are no tokens to fit on")
    low, high = source.beta_interval
    if kind not in ("temperature", "bias_temperature") and not low <= 1.0 <= high:
        raise PsdError(
            f"a correction of kind {kind!r} has β = 1, outside the nodes of these statistics, {low:g} to {high:g}"
        )
    if kind == "none":
        loss = source(1.0, torch.zeros(source.ids.shape)).loss
        return Fit(Correction.identity(), Convergence("closed_form", 0, 0.0, loss), kind, 0.0)
    if kind == "temperature":
        return _fit_temperature(source)
    if kind == "prior_ratio":
        return _fit_prior_ratio(source)
    return _fit_bias(source, kind, penalty, start)


def _fit_temperature(source: FitObjective) -> Fit:
    """The derivative in β is monotone, so a bracketing root finder cannot miss its root."""
    zero = torch.zeros(source.ids.shape, dtype=torch.float64)
    evaluations = 0

    def slope(beta: float) -> float:
        nonlocal evaluations
        evaluations += 1
        return source(beta, zero).gradient_beta

    low, high = source.beta_interval
    if slope(low) >= 0:
        beta = low
    elif slope(high) <= 0:
        beta = high
    else:
        tolerance = 1e-13 if source.precise else 1e-8
        beta = float(brentq(slope, low, high, xtol=tolerance, rtol=tolerance))
    end = source(beta, zero)
    blocked = beta in (low, high)
    status = _edge_status(source, beta) or "converged"
    correction = Correction(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64), 1.0 / beta)
    gradient = 0.0 if blocked else abs(end.gradient_beta)
    return Fit(correction, Convergence(status, evaluations, gradient, end.loss), "temperature", 0.0)


def _fit_prior_ratio(source: FitObjective) -> Fit:
    """The first step of iterative scaling: b_k = log(count_k / Σ p(k)), β = 1 (DESIGN §2)."""
    bias = prior_ratio(source)
    loss, _ = source.at_beta_one()(bias)
    status = "at_bound" if bool((bias.abs() >= BIAS_BOUND).any()) else "closed_form"
    return Fit(Correction(source.ids, bias), Convergence(status, 0, 0.0, loss), "prior_ratio", 0.0)


def prior_ratio(source: FitObjective, beta: float = 1.0) -> torch.Tensor:
    """Return log(count_k / Σ_n p(k)) for the model at β, float64 [K], within ±20."""
    zero = torch.zeros(source.ids.shape, dtype=torch.float64)
    frequencies = source.counts / source.n_tokens
    probabilities = source(beta, zero).gradient_bias.cpu() + frequencies
    return (frequencies.log() - probabilities.log()).nan_to_num(nan=0.0).clamp(-BIAS_BOUND, BIAS_BOUND)


@dataclass(frozen=True)
class _Problem:
    """A fit in the solver's variables: x = (β·s, b·√f) or b·√f alone, in which the curvatures are near 1."""

    objective: Callable[..., tuple[float, Any]]
    scale: np.ndarray
    bounds: list[tuple[float, float]]

    def solve(self, start: np.ndarray, precise: bool) -> tuple[np.ndarray, int]:
        """Return (x, evaluations of the objective)."""
        # float32 statistics carry the objective to about 1e-9; asking for more sends the line search into noise
        stop = {"ftol": 0.0, "gtol": 1e-11} if precise else {"ftol": 1e-9, "gtol": 1e-6}
        options: Any = {"maxcor": 20, "maxiter": 2000, "maxfun": 4000, **stop}
        gap = math.inf

        def objective(x: np.ndarray) -> tuple[float, Any]:
            nonlocal gap
            value, gradient = self.objective(x)
            gap = float(gradient @ gradient) / 2
            return value, gradient

        def near_enough(xk: np.ndarray) -> None:
            if not precise and gap < _SMALLEST_GAP:
                raise StopIteration

        result: Any = minimize(
            objective,
            np.clip(start, *np.array(self.bounds).T),
            jac=True,
            method="L-BFGS-B",
            bounds=self.bounds,
            options=options,
            callback=near_enough,
        )
        return result.x, int(result.nfev)


def _fit_bias(
    source: FitObjective,
    kind: str,
    penalty: float,
    start: Correction | None,
    evaluate: BiasObjective | None = None,
) -> Fit:
    """Fit a bias, and β for `bias_temperature`; `evaluate` is the objective at β = 1 where a caller has made it."""
    with_beta = kind == "bias_temperature"
    frequencies = source.counts.numpy() / source.n_tokens
    # an id that never occurs has no curvature of its own; half a count keeps the scaling finite
    root = np.sqrt(np.maximum(frequencies, 0.5 / source.n_tokens) + penalty)
    if with_beta:
        problem = _joint_problem(source, penalty, root)
    else:
        problem = _bias_problem(evaluate or source.at_beta_one(), penalty, root)
    low, high = source.beta_interval
    beta = min(max(1.0 if start is None else start.beta, low), high)
    bias = prior_ratio(source, beta) if start is None else _bias_on(source.ids, start)
    x = np.concatenate(([beta], bias.numpy())) if with_beta else bias.numpy()
    x, evaluations = problem.solve(x * problem.scale, source.precise)
    x = x / problem.scale
    beta, bias = (float(x[0]), torch.from_numpy(x[1:].copy())) if with_beta else (1.0, torch.from_numpy(x.copy()))
    if source.whole_vocabulary and bias.abs().max() < BIAS_BOUND:
        bias = bias - bias.mean()  # a common bias changes no probability
    return _finish(source, kind, penalty, beta, bias, root, evaluations)


def _finish(
    source: FitObjective,
    kind: str,
    penalty: float,
    beta: float,
    bias: torch.Tensor,
    root: np.ndarray,
    evaluations: int,
) -> Fit:
    end = source(beta, bias)
    gradient = end.gradient_bias.cpu() + penalty * bias
    blocked = ((bias >= BIAS_BOUND) & (gradient < 0)) | ((bias <= -BIAS_BOUND) & (gradient > 0))
    gradient = gradient.masked_fill(blocked, 0.0)
    edge, slope = None, 0.0
    if kind == "bias_temperature":
        edge = _edge_status(source, beta)
        slope = end.gradient_beta if edge is None else 0.0
    gap = (float((gradient / torch.from_numpy(root)).square().sum()) + slope**2) / 2
    if edge:
        status = edge
    elif gap > _LARGEST_GAP:
        status = "not_converged"
    else:
        status = "at_bound" if bool((bias.abs() >= BIAS_BOUND).any()) else "converged"
    largest = max(float(gradient.abs().max()), abs(slope))
    dtype = torch.float64 if source.precise else torch.float32
    correction = Correction(source.ids, bias.to(dtype), 1.0 / beta)
    return Fit(correction, Convergence(status, evaluations, largest, end.loss), kind, penalty)


def _bias_problem(evaluate: BiasObjective, penalty: float, root: np.ndarray) -> _Problem:
    def objective(u: np.ndarray) -> tuple[float, np.ndarray]:
        b = u / root
        loss, gradient = evaluate(torch.from_numpy(b))
        return loss + penalty / 2 * float(b @ b), (gradient.numpy() + penalty * b) / root

    return _Problem(objective, root, [(-BIAS_BOUND * r, BIAS_BOUND * r) for r in root])


def _joint_problem(source: FitObjective, penalty: float, root: np.ndarray) -> _Problem:
    low, high = source.beta_interval
    scale = np.concatenate(([1.0], root))

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        beta, b = min(max(float(x[0]), low), high), x[1:] / root
        at = source(beta, torch.from_numpy(b))
        gradient = (at.gradient_bias.cpu().numpy() + penalty * b) / root
        return at.loss + penalty / 2 * float(b @ b), np.concatenate(([at.gradient_beta], gradient))

    return _Problem(objective, scale, [(low, high), *[(-BIAS_BOUND * r, BIAS_BOUND * r) for r in root]])


def _edge_status(source: FitObjective, beta: float) -> str | None:
    low, high = source.beta_interval
    if beta <= BETA_BOUNDS[0] * (1 + 1e-9) or beta >= BETA_BOUNDS[1] * (1 - 1e-9):
        return "at_bound"
    if beta <= low * (1 + 1e-9) or beta >= high * (1 - 1e-9):
        return "node_edge"
    return None


def _bias_on(ids: torch.Tensor, start: Correction) -> torch.Tensor:
    """Return the bias of `start` in the order of `ids`, 0 for ids it does not have."""
    bias = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
    known = start.ids < bias.numel()
    bias[start.ids[known]] = start.bias[known].double()
    return bias[ids]


def fits_with_penalties(source: FitObjective, kind: str, penalties: Sequence[float] = PENALTIES) -> list[Fit]:
    """Return the fits from which `select` chooses: one, or one per penalty for the kinds with a fitted bias.

    From the largest penalty down, each starts where the last one ended.
    """
    if kind not in FITTED_BIAS_KINDS:
        return [fit_correction(source, kind)]
    fits: list[Fit] = []
    evaluate = None if kind == "bias_temperature" else source.at_beta_one()
    for penalty in sorted(penalties, reverse=True):
        start = fits[-1].correction if fits else None
        fits.append(_fit_bias(source, kind, penalty, start, evaluate))
    return fits
