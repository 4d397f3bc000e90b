"""The passes over hidden × headᵀ, each behind one typed function that picks an implementation and says why."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import torch

from ..correction import Correction, check_ids
from ..errors import PsdError
from . import chunked, reference
from .statistics import (
    DEFAULT_BETA_RANGE,
    CorrectedMoments,
    HeadStatistics,
    Objective,
    Readout,
    chebyshev_betas,
    check_finite,
    check_inputs,
    check_losses,
)

__all__ = [
    "DEFAULT_BETA_RANGE",
    "Backend",
    "CorrectedMoments",
    "HeadStatistics",
    "Objective",
    "Readout",
    "chebyshev_betas",
    "choose_backend",
    "corrected_losses",
    "corrected_moments",
    "corrected_nll",
    "fit_objective",
    "head_statistics",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """A chosen implementation and the reason for it, as text."""

    name: str
    reason: str
    module: ModuleType


def choose_backend(head: torch.Tensor, name: str = "auto", hidden: torch.Tensor | None = None) -> Backend:
    """Return the implementation for a head's (or statistics') device and dtype, or the one asked for by name.

    Raises:
        PsdError: no implementation has that name, or Triton was asked for where it cannot run.
    """
    modules = {"reference": reference, "chunked": chunked}
    if name in modules:
        return Backend(name, "asked for by name", modules[name])
    if name not in ("auto", "triton"):
        raise PsdError(f"no kernels named {name!r}; known: auto, {', '.join(modules)}, triton")
    obstacle = _obstacle_to_triton(head, hidden, interpreter=name == "triton")
    if obstacle is None:
        reason = "asked for by name" if name == "triton" else f"Triton {version('triton')} serves {head.device}"
        return Backend("triton", reason, import_module(".triton", __name__))
    if name == "triton":
        raise PsdError(f"the Triton kernels cannot run: {obstacle}")
    return Backend("chunked", f"torch tiles on {head.device}, since {obstacle}", chunked)


def _obstacle_to_triton(head: torch.Tensor, hidden: torch.Tensor | None, interpreter: bool) -> str | None:
    """Return why the Triton kernels cannot run on these tensors, or None; `interpreter` allows its slow stand-in."""
    interpreted = interpreter and os.environ.get("TRITON_INTERPRET") == "1"
    if head.device.type != "cuda" and not interpreted:
        return f"Triton needs a CUDA device and these tensors are on {head.device}"
    if torch.float64 in (head.dtype, head.dtype if hidden is None else hidden.dtype):
        return "the Triton kernels are float32 and these tensors float64"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not interpreted and torch.cuda.get_device_capability(head.device) < (8, 0):
        return f"the Triton kernels need compute capability 8.0 and {head.device} has less"
    return None


@torch.no_grad()
def head_statistics(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor,
    betas: torch.Tensor | None = None,
    *,
    readout: Readout | None = None,
    backend: str = "auto",
) -> HeadStatistics:
    """Return what every fit needs of one model on one text, from one pass over hidden × headᵀ (DESIGN §3).

    Args:
        hidden: final hidden states [tokens, width]; row n predicts target n.
        head: output head [vocabulary, width]; the statistics are made on its device.
        targets: token ids, int64 [tokens].
        ids: the set of the correction, int64 [K], distinct, in any order.
        betas: values of β for the rest of the vocabulary; None: 20 points in log β on [0.4, 2.5].
        readout: head bias, scale, soft-capping and masked rows.
        backend: "auto", "triton", "chunked" or "reference" (float64, N × V in memory).

    Raises:
        PsdError: shapes, ids or targets that do not fit; a NaN or infinite hidden state.
    """
    readout = readout or Readout()
    check_inputs(hidden, head, targets, readout)
    check_ids(ids, head.shape[0])
    if readout.masked is not None and bool(readout.masked.to(ids.device)[ids].any()):
        bad = int(ids[readout.masked.to(ids.device)[ids]][0])
        raise PsdError(f"token id {bad} of the set has its head row masked out: a bias on it would do nothing")
    check_finite(hidden, head)
    betas = chebyshev_betas(*DEFAULT_BETA_RANGE) if betas is None else betas.double().cpu()
    if betas.ndim != 1 or betas.numel() == 0 or bool((betas <= 0).any()) or bool((betas.diff() <= 0).any()):
        raise PsdError("betas must be positive and ascending")
    chosen = choose_backend(head, backend, hidden)
    _LOG.debug("head_statistics by %s: %s", chosen.name, chosen.reason)
    result: HeadStatistics = chosen.module.head_statistics(hidden, head, targets.long(), ids.long(), betas, readout)
    check_losses(result.target_logit)
    return result


@torch.no_grad()
def corrected_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    corrections: Sequence[Correction | None],
    *,
    readout: Readout | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Return exact losses under several corrections from one pass, nats, [corrections, tokens].

    None, or a correction that changes nothing, is the uncorrected model.

    Raises:
        PsdError: as `corrected_nll`.
    """
    readout = readout or Readout()
    check_inputs(hidden, head, targets, readout)
    check_finite(hidden, head)
    # every correction that changes nothing shares one column, so that its losses are the uncorrected ones exactly
    plain: list[Correction] = []
    column: list[int] = []
    identity: int | None = None
    for correction in corrections:
        if correction is not None:
            check_ids(correction.ids, head.shape[0])
        unchanged = correction is None or correction.is_identity
        if unchanged and identity is not None:
            column.append(identity)
            continue
        if unchanged:
            identity = len(plain)
        column.append(len(plain))
        plain.append(Correction.identity() if correction is None or unchanged else correction)
    module = choose_backend(head, backend, hidden).module
    losses: torch.Tensor = module.corrected_losses(hidden, head, targets.long(), plain, readout)
    check_losses(losses)
    return losses[column]


def corrected_nll(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    correction: Correction | None,
    *,
    readout: Readout | None = None,
) -> torch.Tensor:
    """Return the exact loss of every token under a correction (None: uncorrected), nats, [tokens].

    A pass over the full vocabulary; float32, or float64 for float64 inputs; never rounded to half precision.

    Raises:
        PsdError: shapes, ids or targets that do not fit the head; a NaN or infinite hidden state.
    """
    return corrected_losses(hidden, head, targets, [correction], readout=readout)[0]


@torch.no_grad()
def corrected_moments(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    correction: Correction,
    *,
    readout: Readout | None = None,
    backend: str = "auto",
) -> CorrectedMoments:
    """Return the exact loss with Σ_n p(k) on the set and E_p[z], which make the exact gradient, from one pass.

    Raises:
        PsdError: as `corrected_nll`.
    """
    readout = readout or Readout()
    check_inputs(hidden, head, targets, readout)
    check_finite(hidden, head)
    check_ids(correction.ids, head.shape[0])
    module = choose_backend(head, backend, hidden).module
    result: CorrectedMoments = module.corrected_moments(hidden, head, targets.long(), correction, readout)
    check_losses(result.nll)
    return result


def fit_objective(statistics: HeadStatistics, beta: float, bias: torch.Tensor, *, backend: str = "auto") -> Objective:
    """Return mean loss and gradient at (β, b) from statistics, without a penalty; deterministic, float64 sums.

    Raises:
        PsdError: β lies outside the nodes, or `bias` does not match the set.
    """
    low, high = statistics.beta_range
    if not low <= beta <= high and not statistics.rest_is_empty:
        raise PsdError(f"β = {beta:g} lies outside the nodes of these statistics, {low:g} to {high:g}")
    if bias.shape != statistics.ids.shape:
        raise PsdError(f"the set has {statistics.ids.numel()} ids, the bias shape {tuple(bias.shape)}")
    module = choose_backend(statistics.set_logits, backend).module
    result: Objective = module.fit_objective(statistics, beta, bias)
    return result
