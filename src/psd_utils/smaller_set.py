"""Head statistics of a set -> those of a smaller set, and the correction refitted on it."""

from dataclasses import dataclass, replace

import torch

from .correction import Correction
from .errors import PsdError
from .fit import fit_correction
from .kernels import HeadStatistics
from .subsample import Subsample
from .surface import Surface


@dataclass(frozen=True)
class Refit:
    """A correction fitted to the subsample of `fit`, and its surface on that of `eval`."""

    correction: Correction
    surface: Surface


def refit(subsample: Subsample, member: str, kind: str, penalty: float, top_k: int) -> Refit:
    """Return `kind` fitted anew with a set of the `top_k` most frequent ids, at a given penalty λ.

    Raises:
        PsdError: `top_k` is not between 1 and the number of stored ids.
    """
    most = len(subsample.set_ids)
    if not 1 <= top_k <= most:
        raise PsdError(f"K must lie between 1 and the {most} stored ids, found {top_k}")
    fit = fit_correction(smaller(subsample.set_statistics(member, "fit"), top_k), kind, penalty)
    shown = smaller(subsample.set_statistics(member, "eval"), top_k)
    return Refit(fit.correction, Surface.of(shown, subsample.targets, fit.correction.bias))


def smaller(statistics: HeadStatistics, top_k: int) -> HeadStatistics:
    """Return the statistics of the first `top_k` ids of the set; the others join the rest of the vocabulary."""
    s = statistics
    joining = s.set_logits[:, top_k:]
    if joining.shape[1] == 0:
        return s
    sums = torch.stack([torch.logsumexp(beta * joining, dim=1) for beta in s.betas.tolist()], dim=1)
    best, place = joining.max(dim=1)
    higher = best > s.rest_maximum
    return replace(
        s,
        ids=s.ids[:top_k],
        set_logits=s.set_logits[:, :top_k].contiguous(),
        target_index=torch.where(s.target_index < top_k, s.target_index, -1),
        rest_log_sum=torch.logaddexp(s.rest_log_sum, sums),
        rest_maximum=torch.where(higher, best, s.rest_maximum),
        rest_argmax=torch.where(higher, s.ids[top_k:][place], s.rest_argmax),
    )
