"""Fits at full size against an independent float64 optimum, and how fits end on degenerate texts."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from psd_utils import Correction, head_statistics
from psd_utils.capture import TextStates
from psd_utils.corpus import SPLITS
from psd_utils.fit import BETA_BOUNDS, BIAS_BOUND, fit_correction, fits_with_penalties
from psd_utils.head import OutputModel, top_k_ids
from psd_utils.kernels import Readout, chebyshev_betas, corrected_moments, corrected_nll
from psd_utils.objectives import StatisticsObjective
from psd_utils.selection import CERTIFIED_ERROR, choose_corrections

WITHIN = 1e-6  # nats per token between the objective at a fit and its optimum
PENALTY = 1e-4


def zipf_problem(vocabulary, tokens, width, seed=0, beta=1.25):
    """States and a head whose logits are Zipf-like, targets drawn from the same model at another temperature.

    A head bias falls as −log rank, in a shuffled order; the states add a signal of growing strength, so that the
    tokens' entropies span the range of a real text.
    """
    g = torch.Generator().manual_seed(seed)
    rank = torch.randperm(vocabulary, generator=g).float() + 1
    head = torch.randn(vocabulary, width, generator=g) / math.sqrt(width)
    strength = torch.linspace(0.5, 6, tokens)[torch.randperm(tokens, generator=g)]
    hidden = torch.randn(tokens, width, generator=g) * strength[:, None]
    readout = Readout(bias=-rank.log())
    tilt = torch.randn(vocabulary, generator=g) * 0.5
    targets = torch.empty(tokens, dtype=torch.int64)
    for start in range(0, tokens, 256):
        rows = slice(start, start + 256)
        p = (beta * readout.logits(hidden[rows] @ head.T) + tilt).softmax(dim=1)
        targets[rows] = torch.multinomial(p, 1, generator=g)[:, 0]
    return hidden, head, targets, readout


class FullOptimum:
    """The float64 optimum of mean loss + (λ/2)·‖b‖² on the full logits [N, V]: no statistics, no shared code.

    The logits outside the set enter through log Σ exp(β z), taken from the full array at every β.
    """

    def __init__(self, hidden, head, targets, readout, ids, penalty):
        n = targets.numel()
        z = hidden.double() @ head.double().T + readout.bias.double()
        z -= z.amax(dim=1, keepdim=True)
        self.target = z.gather(1, targets[:, None])[:, 0]
        self.set = z[:, ids].clone()
        z[:, ids] = -torch.inf
        self.rest, self.n, self.penalty = z, n, penalty
        place = torch.full((head.shape[0],), -1)
        place[ids] = torch.arange(ids.numel())
        place = place[targets]
        self.frequencies = torch.bincount(place[place >= 0], minlength=ids.numel()).double() / n
        self._beta = math.nan

    def _at(self, beta):
        """Log-sum-exp of the rest and its slope, and the unbiased set, at one β."""
        if beta != self._beta:
            self._beta = beta
            self.log_rest, self.slope_rest = torch.empty(self.n).double(), torch.empty(self.n).double()
            for start in range(0, self.n, 256):
                rows = slice(start, start + 256)
                scaled = self.rest[rows] * beta
                self.log_rest[rows] = scaled.logsumexp(dim=1)
                p = scaled.sub_(self.log_rest[rows, None]).exp_()
                self.slope_rest[rows] = (p * self.rest[rows].nan_to_num(neginf=0.0)).sum(dim=1)

    def __call__(self, beta, bias):
        """Return (objective, derivative in β, gradient in b)."""
        self._at(beta)
        u = self.set * beta + bias
        log_sum = torch.logaddexp(self.log_rest, u.logsumexp(dim=1))
        p = u.sub_(log_sum[:, None]).exp_()
        loss = (log_sum - beta * self.target).mean() - self.frequencies @ bias
        rest = (self.log_rest - log_sum).exp()
        slope = ((p * self.set).sum(dim=1) + rest * self.slope_rest - self.target).mean()
        gradient = p.mean(dim=0) - self.frequencies + self.penalty * bias
        return float(loss + self.penalty / 2 * bias @ bias), float(slope), gradient

    def gap_bound(self, beta, bias, free_beta):
        """Return an upper estimate of objective − optimum from the gradient in variables of curvature near 1."""
        _, slope, gradient = self(beta, bias)
        return float((gradient.square() / (self.frequencies + self.penalty)).sum()) / 2 + free_beta * slope**2 / 2

    def optimum(self, start_beta, start_bias, free_beta):
        """Return the lowest objective that L-BFGS finds from a start, in float64, to a gradient of 1e-9."""
        scale = (self.frequencies + self.penalty).sqrt().numpy()

        def objective(x):
            beta = float(x[0]) if free_beta else start_beta
            value, slope, gradient = self(beta, torch.from_numpy(x[1:] / scale))
            return value, np.concatenate(([slope if free_beta else 0.0], gradient.numpy() / scale))

        x0 = np.concatenate(([start_beta], start_bias.numpy() * scale))
        options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 60, "maxcor": 20}
        return float(minimize(objective, x0, jac=True, method="L-BFGS-B", options=options).fun)


@cache
def middle_problem():
    hidden, head, targets, readout = zipf_problem(5003, 2048, 32)
    ids = top_k_ids(targets, 512, torch.empty(0, dtype=torch.int64), 5003)
    return hidden, head, targets, readout, ids


@cache
def middle_statistics():
    hidden, head, targets, readout, ids = middle_problem()
    return head_statistics(hidden, head, targets, ids, readout=readout)


@pytest.mark.parametrize("kind", ["temperature", "bias", "bias_temperature"])
def test_the_objective_is_within_a_millionth_of_the_float64_optimum(kind):
    hidden, head, targets, readout, ids = middle_problem()
    assert_near_the_optimum(kind, hidden, head, targets, readout, ids, middle_statistics())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bias", "bias_temperature"])
def test_the_same_at_the_size_of_a_real_vocabulary(kind):
    hidden, head, targets, readout = zipf_problem(50_000, 4096, 64)
    # 4,096 targets hold fewer than 4,096 distinct ids: the set is filled up with ids that do not occur
    occurring = top_k_ids(targets, 4096, torch.empty(0, dtype=torch.int64), 50_000)
    others = torch.ones(50_000, dtype=torch.bool)
    others[occurring] = False
    ids = torch.cat([occurring, others.nonzero()[: 4096 - occurring.numel(), 0]])
    statistics = head_statistics(hidden, head, targets, ids, readout=readout)
    assert_near_the_optimum(kind, hidden, head, targets, readout, ids, statistics)


def assert_near_the_optimum(kind, hidden, head, targets, readout, ids, statistics):
    penalty = 0.0 if kind == "temperature" else PENALTY
    fit = fit_correction(statistics, kind, penalty)
    assert fit.convergence.status == "converged"
    full = FullOptimum(hidden, head, targets, readout, ids, penalty)
    beta, bias = fit.correction.beta, torch.zeros(ids.numel(), dtype=torch.float64)
    if kind != "temperature":
        bias = fit.correction.bias.double()
    value, slope, _ = full(beta, bias)
    if kind == "temperature":
        # in one dimension the derivative bounds the distance: curvature × distance² / 2
        curvature = (full(beta + 1e-3, bias)[1] - full(beta - 1e-3, bias)[1]) / 2e-3
        assert slope**2 / curvature / 2 < WITHIN
        return
    free = kind == "bias_temperature"
    best = full.optimum(beta, bias, free)
    assert value - best < WITHIN
    assert best > value - max(10 * full.gap_bound(beta, bias, free), 1e-9)  # two independent estimates agree


@pytest.mark.parametrize("start", [0.5, 1.0, 1.5])
def test_every_start_ends_at_the_same_answer(start):
    *_, ids = middle_problem()
    zero = Correction(ids, torch.zeros(ids.numel()), start)
    found = fit_correction(middle_statistics(), "bias_temperature", PENALTY, zero)
    default = fit_correction(middle_statistics(), "bias_temperature", PENALTY)
    assert found.convergence.status == "converged"
    assert found.correction.temperature == pytest.approx(default.correction.temperature, abs=2e-3)
    objective = [f.convergence.loss + PENALTY / 2 * float(f.correction.bias.square().sum()) for f in (found, default)]
    assert objective[0] == pytest.approx(objective[1], abs=2 * WITHIN)


def output_model(targets=None, scale=1.0):
    hidden, head, own, readout, _ = middle_problem()
    targets = own if targets is None else targets
    bounds = (0, 1400, 1700, len(own))
    splits = {}
    for split, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
        tokens = slice(start, stop)
        lengths = torch.tensor([stop - start])
        splits[split] = TextStates(hidden[tokens] * scale, targets[tokens], lengths, (split,))
    assert readout.bias is not None
    ids = top_k_ids(splits["fit"].targets, 512, torch.empty(0, dtype=torch.int64), head.shape[0])
    return OutputModel(splits, head, Readout(bias=readout.bias * scale)), ids


KINDS = ("temperature", "prior_ratio", "bias", "bias_temperature")


def test_certification_passes_from_wide_nodes():
    model, ids = output_model()
    for kind, chosen in choose_corrections(model, ids, KINDS).items():
        assert chosen.certified_error <= CERTIFIED_ERROR, kind
        assert chosen.fit.convergence.status in ("converged", "closed_form"), kind


@pytest.mark.parametrize(("scale", "low", "high"), [(5.0, 0.05, 0.4), (0.25, 2.5, 20.0)])
def test_certification_passes_after_a_recentring(scale, low, high):
    """Logits so large, or so small, that the best β lies outside the nodes of the first statistics."""
    model, ids = output_model(scale=scale)
    statistics = model.statistics("fit", ids)
    for kind, chosen in choose_corrections(model, ids, ("temperature", "bias_temperature")).items():
        assert fit_correction(statistics, kind, PENALTY).convergence.status == "node_edge"
        assert chosen.fit.convergence.status == "converged"
        assert chosen.certified_error <= CERTIFIED_ERROR
        assert low < chosen.fit.correction.beta < high


def test_too_few_nodes_fail_the_certificate_and_more_pass_it():
    """The exact pass, not the interpolation, decides: nodes too coarse for these logits are found out."""
    model, ids = output_model(scale=2.0)
    coarse = model.statistics("fit", ids, chebyshev_betas(0.05, 20.0, 4))
    fit = fit_correction(coarse, "temperature")
    assert abs(fit.convergence.loss - model.mean_loss("fit", fit.correction)) > CERTIFIED_ERROR
    fine = model.statistics("fit", ids)
    fit = fit_correction(fine, "temperature")
    assert abs(fit.convergence.loss - model.mean_loss("fit", fit.correction)) <= CERTIFIED_ERROR


@pytest.mark.parametrize("labels", ["random", "anti-correlated"])
@pytest.mark.parametrize("kind", ["temperature", "bias_temperature"])
def test_hopeless_labels_end_at_a_bound_that_is_reported(labels, kind):
    hidden, head, targets, readout, _ = middle_problem()
    if labels == "random":
        targets = torch.randint(0, head.shape[0], targets.shape, generator=torch.Generator().manual_seed(2))
    else:
        targets = torch.cat([readout.logits(h @ head.T).argmin(dim=1) for h in hidden.split(256)])
    model, _ = output_model(targets)
    ids = top_k_ids(model.splits["fit"].targets, 64, torch.empty(0, dtype=torch.int64), head.shape[0])
    chosen = choose_corrections(model, ids, (kind,))[kind]
    assert chosen.fit.convergence.status == "at_bound"
    assert chosen.fit.correction.beta == pytest.approx(BETA_BOUNDS[0], rel=1e-6)
    assert math.isfinite(chosen.fit.convergence.loss)
    if kind != "temperature":
        assert chosen.fit.correction.bias.abs().max() <= BIAS_BOUND


def test_ids_that_never_occur_are_not_in_the_set():
    targets = torch.tensor([7, 7, 3, 5, 3, 7])
    assert top_k_ids(targets, 100, torch.empty(0, dtype=torch.int64), 5003).tolist() == [3, 5, 7]


def test_the_gradient_at_a_fit_vanishes_in_the_exact_pass():
    """Statistics out of the picture: the moments of the whole vocabulary say that the point is stationary."""
    hidden, head, targets, readout, _ = middle_problem()
    fit = fit_correction(middle_statistics(), "bias_temperature", PENALTY)
    exact = corrected_moments(hidden, head, targets, fit.correction, readout=readout)
    counts = middle_statistics().target_counts()
    gradient = (exact.probability_sums - counts) / len(targets) + PENALTY * fit.correction.bias.double()
    slope = float((exact.expected_logit - exact.target_logit).double().mean())
    scale = counts / len(targets) + PENALTY
    assert float((gradient.square() / scale).sum()) / 2 + slope**2 / 2 < WITHIN
    exact_loss = corrected_nll(hidden, head, targets, fit.correction, readout=readout).double().mean()
    assert fit.convergence.loss == pytest.approx(float(exact_loss), abs=WITHIN)


def test_fits_repeat_bit_by_bit():
    first, second = (
        fits_with_penalties(StatisticsObjective(middle_statistics()), "bias_temperature") for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.correction.bias, b.correction.bias)
        assert a.correction.temperature == b.correction.temperature
        assert a.convergence == b.convergence
