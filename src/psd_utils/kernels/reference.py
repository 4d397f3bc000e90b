"""The definition of every kernel, in float64, in the plainest form: slow, N × V in memory, and the truth in tests."""

from collections.abc import Sequence

import torch

from ..correction import Correction
from .statistics import CorrectedMoments, HeadStatistics, Objective, Readout, interpolation


def logits(hidden: torch.Tensor, head: torch.Tensor, readout: Readout) -> torch.Tensor:
    """Return the model's logits, float64 [N, V]."""
    return readout.logits(hidden.double() @ head.double().T)


def head_statistics(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor,
    betas: torch.Tensor,
    readout: Readout,
) -> HeadStatistics:
    """Return the statistics of DESIGN §3 in float64."""
    z = logits(hidden, head, readout)
    maximum = z.max(dim=1).values
    z = z - maximum[:, None]
    rest = z.clone()
    rest[:, ids] = -torch.inf
    rest_maximum, rest_argmax = rest.max(dim=1)
    place = torch.full((head.shape[0],), -1).index_copy(0, ids, torch.arange(ids.numel()))
    return HeadStatistics(
        ids=ids,
        betas=betas,
        maximum=maximum,
        target_logit=z.gather(1, targets[:, None])[:, 0],
        target_index=place[targets],
        set_logits=z[:, ids],
        rest_log_sum=torch.stack([(beta * rest).logsumexp(dim=1) for beta in betas.tolist()], dim=1),
        rest_maximum=rest_maximum,
        rest_argmax=rest_argmax.where(rest_maximum > -torch.inf, -1),
        vocabulary=head.shape[0],
    )


def corrected_moments(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, correction: Correction, readout: Readout
) -> CorrectedMoments:
    """Return the exact loss of the corrected model, Σ_n p(k) on the set and E_p[z], in float64."""
    z = logits(hidden, head, readout)
    log_p = correction.apply(z).log_softmax(dim=1)
    p = log_p.exp()
    maximum = z.max(dim=1).values
    relative = z - maximum[:, None]
    return CorrectedMoments(
        nll=-log_p.gather(1, targets[:, None])[:, 0],
        probability_sums=p[:, correction.ids].sum(dim=0),
        expected_logit=(p * relative.where(p > 0, 0.0)).sum(dim=1),
        target_logit=relative.gather(1, targets[:, None])[:, 0],
        maximum=maximum,
    )


def corrected_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    corrections: Sequence[Correction],
    readout: Readout,
) -> torch.Tensor:
    """Return the exact losses [C, N] of the corrected models, in float64."""
    return torch.stack([corrected_moments(hidden, head, targets, c, readout).nll for c in corrections])


def fit_objective(statistics: HeadStatistics, beta: float, bias: torch.Tensor) -> Objective:
    """Return the mean loss and gradient from statistics: log(e^r + Σ_k e^(β z_k + b_k)) − β z_y − b_y."""
    s = statistics
    n = len(s)
    values, slopes = interpolation(s.betas, beta)
    log_sums = s.rest_log_sum.double()
    if s.rest_is_empty:
        rest, rest_slope = (
            torch.full((n,), -torch.inf, dtype=torch.float64),
            torch.zeros(n, dtype=torch.float64),
        )
    else:
        rest, rest_slope = log_sums @ values, log_sums @ slopes
    z = s.set_logits.double()
    corrected = torch.cat([beta * z + bias.double(), rest[:, None]], dim=1)
    p = corrected.softmax(dim=1)
    target_bias = torch.where(s.target_index >= 0, bias.double()[s.target_index], 0.0) if bias.numel() else 0.0
    target = s.target_logit.double()
    expected = (p[:, :-1] * z).sum(dim=1) + p[:, -1] * rest_slope
    return Objective(
        loss=float((corrected.logsumexp(dim=1) - beta * target - target_bias).mean()),
        gradient_beta=float((expected - target).mean()),
        gradient_bias=(p[:, :-1].sum(dim=0) - s.target_counts()) / n,
    )
