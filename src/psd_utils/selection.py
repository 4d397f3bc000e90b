"""Output model -> for each kind the correction that `select` picks, certified by an exact pass over `fit`."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .correction import Correction
from .errors import PsdError
from .fit import BETA_BOUNDS, PENALTIES, Fit, fits_with_penalties
from .head import OutputModel
from .kernels import HeadStatistics, chebyshev_betas, fit_objective

_LOG = logging.getLogger(__name__)

CERTIFIED_ERROR = 1e-5
"""How far statistics and exact pass may disagree on the mean loss of `fit`, nats per token (DESIGN §3)."""

STATISTICS_BUDGET = 4 * 2**30
"""Bytes that the statistics of one split may take."""

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
    around it.

    Raises:
        PsdError: the statistics would not fit in the memory budget, or no range of β certifies.
    """
    needed = 4 * ids.numel() * len(model.splits["fit"].targets)
    if needed > STATISTICS_BUDGET:
        raise PsdError(
            f"statistics of {ids.numel()} ids need {needed / 2**30:.1f} GiB, more than the budget of "
            f"{STATISTICS_BUDGET / 2**30:.0f} GiB: lower top_k or n_tokens"
        )
    texts = {split: model.statistics(split, ids) for split in ("fit", "select")}
    fits = {kind: _select(fits_with_penalties(texts["fit"], kind, penalties), texts["select"]) for kind in kinds}
    exact = model.losses("fit", [fit.correction for fit in fits.values()]).double().mean(dim=1).tolist()
    errors = {}
    for kind, exact_loss in zip(kinds, exact, strict=True):
        errors[kind] = abs(fits[kind].convergence.loss - exact_loss)
        if fits[kind].convergence.status == "node_edge" or errors[kind] > CERTIFIED_ERROR:
            fits[kind], errors[kind] = _recentred(model, ids, fits[kind], errors[kind], penalties)
    # the choice between a correction and none is made on exact losses, whatever the nodes were
    corrections = [None, *(fits[kind].correction for kind in kinds)]
    uncorrected, *corrected = model.losses("select", corrections).double().mean(dim=1).tolist()
    chosen = {}
    for kind, loss in zip(kinds, corrected, strict=True):
        worse = uncorrected < loss
        correction = Correction.identity() if worse else fits[kind].correction
        chosen[kind] = Chosen(fits[kind], correction, worse, min(uncorrected, loss), errors[kind])
    return chosen


def select_loss(statistics: HeadStatistics, correction: Correction) -> float:
    """Return the mean loss of a correction fitted on the same set, from the statistics of `select`."""
    bias = torch.zeros(statistics.ids.shape, dtype=torch.float64)
    if correction.ids.numel():
        bias = correction.bias.double()
    return fit_objective(statistics, correction.beta, bias).loss


def _select(fits: list[Fit], select: HeadStatistics) -> Fit:
    """Return the fit with the lowest loss on `select`; ties go to the larger penalty."""
    return min(fits, key=lambda fit: (select_loss(select, fit.correction), -fit.penalty))


def _recentred(
    model: OutputModel, ids: torch.Tensor, fit: Fit, error: float, penalties: Sequence[float]
) -> tuple[Fit, float]:
    """Make statistics around the fit's β, wider where it ran into an edge, narrower where it disagreed."""
    half_width = math.log(2.5 / 0.4) / 2
    for _ in range(_MOST_RECENTRINGS):
        if fit.convergence.status != "node_edge":
            half_width /= 2
        low, high = _range_around(fit.correction.beta, half_width)
        _LOG.info(
            "%s: β = %.4g (%s, off by %.1e): statistics again on [%.3g, %.3g]",
            fit.kind,
            fit.correction.beta,
            fit.convergence.status,
            error,
            low,
            high,
        )
        betas = chebyshev_betas(low, high)
        statistics = model.statistics("fit", ids, betas)
        select = model.statistics("select", ids, betas)
        fit = _select(fits_with_penalties(statistics, fit.kind, penalties), select)
        error = abs(fit.convergence.loss - model.mean_loss("fit", fit.correction))
        if fit.convergence.status != "node_edge" and error <= CERTIFIED_ERROR:
            return fit, error
    raise PsdError(
        f"the {fit.kind} fit could not be certified: at β = {fit.correction.beta:.4g} statistics and exact pass "
        f"differ by {error:.2g} nats per token"
    )


def _range_around(beta: float, half_width: float) -> tuple[float, float]:
    low = max(BETA_BOUNDS[0], beta * math.exp(-half_width))
    high = min(BETA_BOUNDS[1], beta * math.exp(half_width))
    return low, high
