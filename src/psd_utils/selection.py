"""Output model -> for each kind the correction that `select` picks, certified by an exact pass over `fit`."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .correction import Correction
from .errors import PsdError
from .fit import PENALTIES, Fit, fits_with_penalties
from .head import OutputModel
from .kernels import chebyshev_betas
from .objectives import BETA_BOUNDS, ExactObjective, FitObjective, StatisticsObjective

_LOG = logging.getLogger(__name__)

CERTIFIED_ERROR = 1e-5
"""How far statistics and exact pass may disagree on the mean loss of `fit`, nats per token (DESIGN §3)."""

STATISTICS_BUDGET = 8 * 2**30
"""Bytes that the set's logits on `fit` may take (the solver holds their exponentials too); a larger set is fitted by
exact passes instead."""

_MOST_RECENTRINGS = 8


@dataclass(frozen=True)
class Chosen:
    """The correction reported for a kind.

    `correction` is the identity where `selected_none`: the uncorrected model was better on `select`. `fit` is the
    fit that was selected among the penalties; `certified_error` is |statistics − exact| on `fit`, nats per token.
    """

    fit: Fit
    correction: Correction
    selected_none: bool
    select_loss: float
    certified_error: float


def choose_corrections(
    model: OutputModel, ids: torch.Tensor, kinds: Sequence[str], penalties: Sequence[float] = PENALTIES
) -> dict[str, Chosen]:
    """Return the certified choice for each of `kinds`, all on the set `ids`.

    Fitted on `fit`, λ selected among `penalties` on `select` (ties to the larger λ), nothing of `eval` looked at.
    Where β ends at the edge of the nodes, or statistics and exact pass disagree, statistics are made again on a range
    around it. A set whose statistics would exceed the budget is fitted by exact passes.

    Raises:
        PsdError: no range of β certifies.
    """
    source = _source(model, ids)
    candidates = {kind: fits_with_penalties(source, kind, penalties) for kind in kinds}
    best = _best_on_select(model, candidates)
    exact = model.losses("fit", [fit.correction for fit, _ in best.values()]).double().mean(dim=1).tolist()
    uncorrected = model.mean_loss("select")
    chosen = {}
    for (kind, (fit, loss)), exact_loss in zip(best.items(), exact, strict=True):
        error = abs(fit.convergence.loss - exact_loss)
        if _clipped(candidates[kind]) or error > CERTIFIED_ERROR:
            fit, loss, error = _recentred(model, ids, candidates[kind], penalties)
        worse = kind != "none" and uncorrected < loss
        correction = Correction.identity() if worse else fit.correction
        chosen[kind] = Chosen(fit, correction, worse, min(uncorrected, loss), error)
    return chosen


def _source(model: OutputModel, ids: torch.Tensor, betas: torch.Tensor | None = None) -> FitObjective:
    """Return what the fits minimise: statistics of `fit` where they fit in the budget, else exact passes."""
    states = model.splits["fit"]
    needed = 4 * ids.numel() * len(states.targets)
    if needed <= STATISTICS_BUDGET:
        return StatisticsObjective(model.statistics("fit", ids, betas))
    _LOG.info("statistics of %d ids would take %.0f GiB: fitted by exact passes", ids.numel(), needed / 2**30)
    return ExactObjective(states.hidden, model.head, states.targets, ids, model.readout)


def _best_on_select(model: OutputModel, candidates: Mapping[str, list[Fit]]) -> dict[str, tuple[Fit, float]]:
    """Return, for each kind, the fit with the lowest exact loss on `select`, and that loss; ties to the larger λ."""
    fits = [fit for own in candidates.values() for fit in own]
    means = model.losses("select", [fit.correction for fit in fits]).double().mean(dim=1).tolist()
    best: dict[str, tuple[Fit, float]] = {}
    for fit, loss in zip(fits, means, strict=True):
        if fit.kind not in best or (loss, -fit.penalty) < (best[fit.kind][1], -best[fit.kind][0].penalty):
            best[fit.kind] = fit, loss
    return best


def _recentred(
    model: OutputModel, ids: torch.Tensor, candidates: list[Fit], penalties: Sequence[float]
) -> tuple[Fit, float, float]:
    """Make statistics around the β of all candidates: moved where one ran into an edge, else narrower.

    Returns the chosen fit, its loss on `select` and its certified error.
    """
    kind = candidates[0].kind
    half_width = math.log(2.5 / 0.4) / 2
    for _ in range(_MOST_RECENTRINGS):
        if not _clipped(candidates):
            half_width /= 2
        betas = [fit.correction.beta for fit in candidates]
        low = max(BETA_BOUNDS[0], min(betas) * math.exp(-half_width))
        high = min(BETA_BOUNDS[1], max(betas) * math.exp(half_width))
        _LOG.info(
            "%s ended at β = %.4g to %.4g: statistics again on [%.3g, %.3g]", kind, min(betas), max(betas), low, high
        )
        candidates = fits_with_penalties(_source(model, ids, chebyshev_betas(low, high)), kind, penalties)
        fit, loss = _best_on_select(model, {kind: candidates})[kind]
        error = abs(fit.convergence.loss - model.mean_loss("fit", fit.correction))
        if not _clipped(candidates) and error <= CERTIFIED_ERROR:
            return fit, loss, error
    raise PsdError(
        f"the {kind} fit could not be certified: at β = {fit.correction.beta:.4g} statistics and exact pass "
        f"differ by {error:.2g} nats per token"
    )


def _clipped(candidates: Sequence[Fit]) -> bool:
    """Whether any candidate stopped at the edge of the nodes, and so was compared before its optimum."""
    return any(fit.convergence.status == "node_edge" for fit in candidates)
