"""The passes over hidden × headᵀ in plain torch, against the float64 definition."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from psd_utils import Correction, PsdError
from psd_utils.kernels import (
    HeadStatistics,
    Readout,
    chebyshev_betas,
    choose_backend,
    chunked,
    corrected_losses,
    corrected_moments,
    corrected_nll,
    fit_objective,
    head_statistics,
    reference,
)

# the vocabularies of the study's models divided by 64, and one off every block grid
VOCABULARIES = (768, 1568, 2374, 2376, 507)
TOKENS = (1, 7, 252, 2047)
WIDTHS = (123, 128)
SHAPES = list(itertools.product(VOCABULARIES, TOKENS, WIDTHS))
NODES = chebyshev_betas(0.4, 2.5)


class Problem:
    """Random states, head, targets and a set in random order; logits of standard deviation about 3."""

    def __init__(self, vocabulary, tokens, width, dtype=torch.float32, n_ids=None, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(tokens, width, generator=g).to(dtype)
        self.head = (torch.randn(vocabulary, width, generator=g) * 3 / math.sqrt(width)).to(dtype)
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=g)
        order = torch.randperm(vocabulary, generator=g)
        self.ids = order[: vocabulary // 5 if n_ids is None else n_ids]
        self.bias = torch.tensor([0.0, 5.0, -5.0])[torch.randint(0, 3, self.ids.shape, generator=g)]

    def correction(self, beta=1.0):
        return Correction(self.ids, self.bias, 1 / beta)

    def losses(self, corrections, readout=None):
        return corrected_losses(self.hidden, self.head, self.targets, corrections, readout=readout)

    def moments(self, correction, readout=None, backend="auto"):
        return corrected_moments(self.hidden, self.head, self.targets, correction, readout=readout, backend=backend)

    def statistics(self, readout=None, backend="auto", betas=NODES):
        return head_statistics(self.hidden, self.head, self.targets, self.ids, betas, readout=readout, backend=backend)


def assert_statistics_agree(found, expected, atol):
    for name in HeadStatistics.PER_TOKEN:
        a, b = getattr(found, name).double(), getattr(expected, name).double()
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_moments_agree(found, expected, atol):
    for name in ("nll", "expected_logit", "target_logit", "maximum"):
        a, b = getattr(found, name).double(), getattr(expected, name).double()
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    # sums over tokens of probabilities
    scale = 1e-6 if atol > 1e-7 else 1e-13
    torch.testing.assert_close(found.probability_sums, expected.probability_sums, rtol=10 * scale, atol=10 * scale)


def test_the_chosen_backend_and_why():
    chosen = choose_backend(torch.empty(2, 2))
    assert chosen.name == "chunked"
    assert "cpu" in chosen.reason
    assert choose_backend(torch.empty(2, 2), "reference").module is reference
    assert choose_backend(torch.empty(2, 2), "chunked").reason == "asked for by name"
    with pytest.raises(PsdError, match="no kernels named 'fast'; known: auto, reference, chunked, triton"):
        choose_backend(torch.empty(2, 2), "fast")


@pytest.mark.parametrize(("vocabulary", "tokens", "width"), SHAPES)
def test_statistics_agree_with_the_definition_in_every_shape(vocabulary, tokens, width):
    p = Problem(vocabulary, tokens, width)
    expected = p.statistics(backend="reference")
    assert_statistics_agree(p.statistics(), expected, 5e-5)


@pytest.mark.parametrize(("vocabulary", "tokens", "width"), SHAPES)
def test_losses_and_moments_agree_with_the_definition_in_every_shape(vocabulary, tokens, width):
    p = Problem(vocabulary, tokens, width)
    corrections = [p.correction(beta) for beta in (0.5, 1.0, 2.0)]
    losses = p.losses(corrections)
    for i, correction in enumerate(corrections):
        expected = p.moments(correction, backend="reference")
        assert_moments_agree(p.moments(correction), expected, 5e-5)
        torch.testing.assert_close(losses[i].double(), expected.nll, rtol=0, atol=5e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_float64_agrees_to_rounding(width):
    p = Problem(507, 252, width, torch.float64)
    assert_statistics_agree(p.statistics(), p.statistics(backend="reference"), 1e-12)
    for beta in (0.5, 1.0, 2.0):
        expected = p.moments(p.correction(beta), backend="reference")
        assert_moments_agree(p.moments(p.correction(beta)), expected, 1e-12)
        torch.testing.assert_close(p.losses([p.correction(beta)])[0], expected.nll, rtol=0, atol=1e-12)


READOUTS = {
    "bias": lambda v: Readout(bias=torch.linspace(-5, 5, v)),
    "scale": lambda v: Readout(scale=0.25),
    "softcap": lambda v: Readout(softcap=3.0),
    "all": lambda v: Readout(bias=torch.linspace(-5, 5, v), scale=1.5, softcap=20.0),
}


@pytest.mark.parametrize("name", READOUTS)
def test_readouts_are_honoured(name):
    p = Problem(507, 252, 123)
    readout = READOUTS[name](507)
    assert_statistics_agree(p.statistics(readout), p.statistics(readout, "reference"), 5e-5)
    assert_moments_agree(
        p.moments(p.correction(0.5), readout), p.moments(p.correction(0.5), readout, "reference"), 5e-5
    )
    # the definition itself, written out once more
    z = p.hidden.double() @ p.head.double().T
    z = (z + (0 if readout.bias is None else readout.bias.double())) * readout.scale
    z = z if readout.softcap is None else readout.softcap * torch.tanh(z / readout.softcap)
    torch.testing.assert_close(
        p.losses([None], readout)[0].double(), cross_entropy(z, p.targets, reduction="none"), rtol=0, atol=5e-5
    )


def _masked_problem(n_ids=50):
    p = Problem(507, 252, 123, n_ids=n_ids)
    masked = torch.zeros(507, dtype=torch.bool)
    masked[p.ids[:5]] = True
    masked[500:] = True
    p.targets = torch.where(masked[p.targets], torch.tensor(int((~masked).nonzero()[0])), p.targets)
    p.bias[:5] = -math.inf
    return p, Readout(masked=masked)


def test_masked_rows_and_biases_of_minus_infinity():
    p, readout = _masked_problem()
    removed = torch.full((7,), -math.inf)
    ids = torch.cat([p.ids, torch.arange(500, 507)[~torch.isin(torch.arange(500, 507), p.ids)]])
    bias = torch.cat([p.bias, removed[: ids.numel() - p.ids.numel()]])
    bias[torch.isin(ids, torch.arange(500, 507))] = -math.inf
    by_mask = p.losses([p.correction(0.5), Correction(ids, bias, 2.0)], readout)
    by_bias = p.losses([Correction(ids, bias, 2.0)])
    assert torch.isfinite(by_mask).all()
    torch.testing.assert_close(by_mask[0], by_bias[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(by_mask[1], by_bias[0], rtol=0, atol=1e-5)
    assert_moments_agree(
        p.moments(p.correction(0.5), readout), p.moments(p.correction(0.5), readout, "reference"), 5e-5
    )


def test_statistics_with_masked_rows():
    p, readout = _masked_problem(20)
    with pytest.raises(PsdError, match=f"token id {int(p.ids[0])} of the set has its head row masked out"):
        p.statistics(readout)
    p.ids = p.ids[5:]
    p.ids = p.ids[p.ids < 500]
    statistics = p.statistics(readout)
    assert_statistics_agree(statistics, p.statistics(readout, "reference"), 5e-5)
    assert not readout.masked[statistics.rest_argmax].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_set_that_is_the_whole_vocabulary_leaves_an_empty_rest_without_nan(dtype):
    p = Problem(507, 7, 123, dtype, n_ids=507)
    statistics = p.statistics()
    assert statistics.rest_is_empty
    assert (statistics.rest_log_sum == -math.inf).all()
    assert (statistics.rest_argmax == -1).all()
    assert_statistics_agree(statistics, p.statistics(backend="reference"), 1e-4)
    assert_moments_agree(p.moments(p.correction(2.0)), p.moments(p.correction(2.0), backend="reference"), 5e-5)
    at = fit_objective(statistics, 2.0, p.bias)
    torch.testing.assert_close(at.loss, float(p.losses([p.correction(2.0)]).double().mean()), rtol=0, atol=1e-5)


def test_an_empty_set():
    p = Problem(507, 7, 123, n_ids=0)
    assert_statistics_agree(p.statistics(), p.statistics(backend="reference"), 5e-5)
    temperature = Correction(p.ids, p.bias, 2.0)
    assert_moments_agree(p.moments(temperature), p.moments(temperature, backend="reference"), 5e-5)


@pytest.mark.parametrize("inside", [True, False], ids=["in the set", "in the rest"])
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_a_margin_of_40_nats(inside, beta):
    """One token of the vocabulary stands 40 nats above all others; the target is never it."""
    p = Problem(507, 252, 123)
    lone = int(p.ids[0]) if inside else int(_outside(p.ids, 507)[0])
    boost = torch.zeros(507)
    logits = p.hidden @ p.head.T
    boost[lone] = 40 + float((logits.amax(dim=1) - logits[:, lone]).max())
    readout = Readout(bias=boost)
    p.targets[p.targets == lone] = int(_outside(p.ids, 507)[1])
    expected = p.statistics(readout, "reference")
    found = p.statistics(readout)
    assert torch.isfinite(found.rest_log_sum).all()
    assert_statistics_agree(found, expected, 2e-4)
    moments = p.moments(p.correction(beta), readout)
    reference_moments = p.moments(p.correction(beta), readout, "reference")
    assert (reference_moments.nll > 30 * beta - 10).all()
    torch.testing.assert_close(moments.nll.double(), reference_moments.nll, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(p.losses([p.correction(beta)], readout)[0], moments.nll, rtol=2e-6, atol=1e-5)


def _outside(ids, vocabulary):
    return torch.arange(vocabulary)[~torch.isin(torch.arange(vocabulary), ids)]


@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_a_common_offset_changes_nothing(offset, dtype, largest):
    p = Problem(2376, 252, 128, dtype)
    moved = Readout(bias=torch.full((2376,), offset, dtype=dtype))
    corrections = [None, p.correction(1.0)]
    change = p.losses(corrections, moved).double() - p.losses(corrections).double()
    assert change.abs().max() <= largest
    moments = [p.moments(p.correction(1.0), readout) for readout in (moved, None)]
    assert (moments[0].nll.double() - moments[1].nll.double()).abs().max() <= largest
    assert (moments[0].expected_logit.double() - moments[1].expected_logit.double()).abs().max() <= largest
    statistics = [p.statistics(readout) for readout in (moved, None)]
    for beta in (0.5, 1.0, 2.0):
        losses = [fit_objective(s, beta, p.bias).loss for s in statistics]
        assert abs(losses[0] - losses[1]) <= largest


def test_ids_in_any_order_and_the_bias_follows():
    p = Problem(768, 252, 128)
    order = torch.randperm(p.ids.numel(), generator=torch.Generator().manual_seed(1))
    sorted_ids, places = torch.sort(p.ids)
    here, there = p.statistics(), None
    p_bias = p.bias.clone()
    p.ids, p.bias = p.ids[order], p.bias[order]
    there = p.statistics()
    torch.testing.assert_close(there.set_logits, here.set_logits[:, order], rtol=0, atol=1e-5)
    a, b = fit_objective(here, 2.0, p_bias), fit_objective(there, 2.0, p.bias)
    assert a.loss == pytest.approx(b.loss, abs=1e-7)
    torch.testing.assert_close(a.gradient_bias[order], b.gradient_bias, rtol=0, atol=1e-7)
    by_order = [p.losses([Correction(ids, bias, 2.0)]) for ids, bias in ((p.ids, p.bias), (sorted_ids, p_bias[places]))]
    torch.testing.assert_close(*by_order, rtol=0, atol=1e-6)
    moments = p.moments(Correction(sorted_ids, p_bias[places], 2.0))
    torch.testing.assert_close(
        moments.probability_sums[torch.argsort(places)][order],
        p.moments(p.correction(0.5)).probability_sums,
        rtol=1e-5,
        atol=1e-6,
    )


BAD_IDS = [([3, 5, 3], "token id 3 occurs more than once"), ([3, -2], "token id -2 is negative"), ([3, 507], "507")]


@pytest.mark.parametrize(("ids", "words"), BAD_IDS)
def test_bad_ids_are_refused_by_name(ids, words):
    p = Problem(507, 7, 123)
    with pytest.raises(PsdError, match=words):
        head_statistics(p.hidden, p.head, p.targets, torch.tensor(ids))
    with pytest.raises(PsdError, match=words):
        corrected_nll(p.hidden, p.head, p.targets, Correction(torch.tensor(ids), torch.zeros(len(ids))))


@pytest.mark.parametrize(("target", "words"), [(507, "target id 507"), (-1, "target id -1")])
def test_bad_targets_are_refused_by_name(target, words):
    p = Problem(507, 7, 123)
    p.targets[3] = target
    with pytest.raises(PsdError, match=f"token 3 has {words}, beyond the head's 507 rows"):
        p.losses([None])


def _half_precision_losses(p, correction):
    """The usual shortcut: the product in bf16, rounded to bf16, and a float32 cross-entropy."""
    z = (p.hidden @ p.head.T).float()
    return cross_entropy(correction.apply(z), p.targets, reduction="none")


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("vocabulary", "width"), [(507, 123), (2376, 128)])
def test_errors_are_no_larger_than_those_of_a_half_precision_product(vocabulary, width, beta):
    p = Problem(vocabulary, 252, width, torch.bfloat16)
    correction = p.correction(beta)
    truth = p.moments(correction, backend="reference").nll
    shortcut = (_half_precision_losses(p, correction).double() - truth).abs().max()
    for losses in (p.losses([correction])[0], p.moments(correction).nll):
        assert losses.dtype == torch.float32
        assert (losses.double() - truth).abs().max() <= shortcut
        assert (losses.double() - truth).abs().max() < 5e-5
    statistics = p.statistics()
    error = abs(fit_objective(statistics, beta, p.bias).loss - float(truth.mean()))
    assert error <= abs(float(_half_precision_losses(p, correction).double().mean() - truth.mean())) + 1e-6


def test_losses_are_never_rounded_to_half_precision():
    p = Problem(2376, 2047, 128, torch.bfloat16)
    losses = p.losses([None, p.correction(2.0)])
    assert losses.dtype == torch.float32
    assert (losses != losses.bfloat16().float()).float().mean() > 0.9


def test_every_pass_gives_the_same_bits_on_two_runs():
    p = Problem(2376, 2047, 128)
    first, second = p.statistics(), p.statistics()
    for name in HeadStatistics.PER_TOKEN:
        assert torch.equal(getattr(first, name), getattr(second, name))
    a, b = fit_objective(first, 1.3, p.bias), fit_objective(second, 1.3, p.bias)
    assert (a.loss, a.gradient_beta) == (b.loss, b.gradient_beta)
    assert torch.equal(a.gradient_bias, b.gradient_bias)
    assert torch.equal(p.losses([p.correction(2.0)]), p.losses([p.correction(2.0)]))
    moments = [p.moments(p.correction(2.0)) for _ in range(2)]
    assert torch.equal(moments[0].probability_sums, moments[1].probability_sums)
    assert torch.equal(moments[0].nll, moments[1].nll)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_objective_agrees_with_the_definition_and_with_the_exact_pass(tokens):
    p = Problem(1568, tokens, 128)
    statistics, truth = p.statistics(), p.statistics(backend="reference")
    for beta in (0.5, 1.0, 2.0):
        found = fit_objective(statistics, beta, p.bias)
        expected = fit_objective(truth, beta, p.bias, backend="reference")
        exact = p.moments(p.correction(beta))
        assert found.loss == pytest.approx(expected.loss, abs=2e-5)
        assert found.loss == pytest.approx(float(exact.nll.double().mean()), abs=3e-5)
        assert found.gradient_beta == pytest.approx(expected.gradient_beta, abs=2e-5)
        slope = float((exact.expected_logit - exact.target_logit).double().mean())
        assert found.gradient_beta == pytest.approx(slope, abs=2e-4)
        torch.testing.assert_close(found.gradient_bias, expected.gradient_bias, rtol=0, atol=1e-6)
        from_exact = (exact.probability_sums - statistics.target_counts()) / tokens
        torch.testing.assert_close(found.gradient_bias, from_exact, rtol=0, atol=1e-5)


def test_the_gradient_is_that_of_the_loss():
    p = Problem(507, 252, 123, torch.float64, n_ids=30)
    statistics = p.statistics()
    bias, direction = p.bias.double() / 5, torch.linspace(-1, 1, 30, dtype=torch.float64)
    at, step = fit_objective(statistics, 1.2, bias), 1e-5
    ahead, behind = (fit_objective(statistics, 1.2, bias + sign * step * direction).loss for sign in (1, -1))
    assert (ahead - behind) / (2 * step) == pytest.approx(float(at.gradient_bias @ direction), abs=1e-8)
    ahead, behind = (fit_objective(statistics, 1.2 + sign * step, bias).loss for sign in (1, -1))
    assert (ahead - behind) / (2 * step) == pytest.approx(at.gradient_beta, abs=1e-8)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_the_objective_at_a_fixed_temperature_is_the_same_function(beta):
    p = Problem(1568, 252, 128, torch.float64)
    statistics = p.statistics()
    expected = fit_objective(statistics, beta, p.bias, backend="reference")
    loss, gradient = chunked.FixedBetaObjective(statistics, beta)(p.bias.double())
    assert loss == pytest.approx(expected.loss, abs=1e-12)
    torch.testing.assert_close(gradient, expected.gradient_bias, rtol=0, atol=1e-12)


def test_biases_beyond_the_range_of_float32_factors():
    """A bias of 200 on a token 300 nats below the best: neither it nor the rest may vanish."""
    p = Problem(507, 7, 123, n_ids=3)
    boost = torch.zeros(507)
    boost[p.ids[0]] = -300.0
    readout, correction = Readout(bias=boost), Correction(p.ids, torch.tensor([300.0, -100.0, 60.0]))
    expected = p.moments(correction, readout, "reference")
    assert torch.isfinite(expected.nll).all()
    assert_moments_agree(p.moments(correction, readout), expected, 2e-4)
    torch.testing.assert_close(p.losses([correction], readout)[0].double(), expected.nll, rtol=1e-5, atol=1e-4)


def test_a_memory_budget_changes_tiles_and_not_numbers():
    p = Problem(2376, 252, 128, torch.float64)
    readout, small = Readout(), 2**18
    assert chunked.Tiling.choose(p.head.device, 2376, small).tokens < chunked.Tiling.choose(p.head.device, 2376).tokens
    a = chunked.head_statistics(p.hidden, p.head, p.targets, p.ids, NODES, readout, small)
    assert_statistics_agree(a, p.statistics(), 1e-12)
    b = chunked.corrected_moments(p.hidden, p.head, p.targets, p.correction(2.0), readout, small)
    assert_moments_agree(b, p.moments(p.correction(2.0)), 1e-12)
    c = chunked.corrected_losses(p.hidden, p.head, p.targets, [p.correction(2.0)], readout, small)
    torch.testing.assert_close(c, p.losses([p.correction(2.0)]), rtol=0, atol=1e-12)


def test_a_beta_outside_the_nodes_is_refused():
    p = Problem(507, 7, 123)
    with pytest.raises(PsdError, match=r"β = 3 lies outside the nodes of these statistics, 0\.4 to 2\.5"):
        fit_objective(p.statistics(), 3.0, p.bias)
