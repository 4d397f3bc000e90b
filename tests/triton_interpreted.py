"""The Triton kernels in Triton's interpreter, against the float64 definition.

Run by test_kernels_triton.py in a process of its own, because Triton decides at import whether to interpret; by hand:
TRITON_INTERPRET=1 pytest tests/triton_interpreted.py
"""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from psd_utils import Correction
from psd_utils.kernels import HeadStatistics, Readout, chebyshev_betas, choose_backend, reference
from psd_utils.kernels import triton as kernels
from psd_utils.kernels.nodes import Nodes
from psd_utils.kernels.passes import Partition

# three tiles or more along tokens, head rows, set and width, none of them full at the end
BLOCKS = kernels.Blocks(16, 16, 16, 4, 1)
TOKENS, VOCABULARY, WIDTH, N_IDS = 41, 131, 51, 35
NODES = chebyshev_betas(0.4, 2.5, 5)
DTYPES = [torch.float32, torch.bfloat16]


class Problem:
    def __init__(self, dtype, tokens=TOKENS, n_ids=N_IDS, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(tokens, WIDTH, generator=g).to(dtype)
        self.head = (torch.randn(VOCABULARY, WIDTH, generator=g) * 3 / math.sqrt(WIDTH)).to(dtype)
        self.targets = torch.randint(0, VOCABULARY, (tokens,), generator=g)
        self.ids = torch.randperm(VOCABULARY, generator=g)[:n_ids]
        self.bias = torch.tensor([0.0, 5.0, -5.0])[torch.arange(n_ids) % 3]

    def correction(self, beta):
        return Correction(self.ids, self.bias, 1 / beta)

    def statistics(self, module, readout=None, betas=NODES):
        extra = {"blocks": BLOCKS} if module is kernels else {}
        return module.head_statistics(
            self.hidden, self.head, self.targets, self.ids, betas, readout or Readout(), **extra
        )

    def moments(self, module, beta, readout=None):
        extra = {"blocks": BLOCKS} if module is kernels else {}
        correction = self.correction(beta)
        return module.corrected_moments(self.hidden, self.head, self.targets, correction, readout or Readout(), **extra)

    def losses(self, corrections, readout=None):
        return kernels.corrected_losses(self.hidden, self.head, self.targets, corrections, readout or Readout(), BLOCKS)


def assert_same(found, expected, names, atol):
    for name in names:
        a, b = getattr(found, name).double(), getattr(expected, name).double()
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


MOMENTS = ("nll", "probability_sums", "expected_logit", "target_logit", "maximum")


def readouts():
    masked = torch.zeros(VOCABULARY, dtype=torch.bool)
    masked[-20:] = True
    bias = torch.linspace(-5, 5, VOCABULARY)
    return {
        "plain": Readout(),
        "bias, scale and soft-capping": Readout(bias=bias, scale=1.5, softcap=20.0),
        "masked": Readout(masked=masked),
    }


@pytest.mark.parametrize("name", readouts())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pass_agrees_with_the_definition(dtype, name):
    p, readout = Problem(dtype), readouts()[name]
    if readout.masked is not None:
        p.targets = p.targets.clamp(max=VOCABULARY - 21)
        p.ids[p.ids >= VOCABULARY - 20] = _free_ids(p.ids, readout.masked)
    expected = p.statistics(reference, readout)
    statistics = p.statistics(kernels, readout)
    assert_same(statistics, expected, HeadStatistics.PER_TOKEN, 2e-5)
    moments = {beta: p.moments(reference, beta, readout) for beta in (0.5, 2.0)}
    assert_same(p.moments(kernels, 0.5, readout), moments[0.5], MOMENTS, 2e-5)
    losses = p.losses([p.correction(0.5), p.correction(2.0)], readout)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses[0].double(), moments[0.5].nll, rtol=0, atol=2e-5)
    torch.testing.assert_close(losses[1].double(), moments[2.0].nll, rtol=0, atol=2e-5)


def _free_ids(ids, masked):
    free = torch.ones(VOCABULARY, dtype=torch.bool)
    free[ids] = False
    return (free & ~masked).nonzero()[: int((ids >= VOCABULARY - 20).sum()), 0]


def test_twenty_nodes_and_the_objective_with_its_gradient():
    p = Problem(torch.bfloat16, tokens=33)
    betas = chebyshev_betas(0.4, 2.5)
    expected, statistics = p.statistics(reference, betas=betas), p.statistics(kernels, betas=betas)
    assert_same(statistics, expected, HeadStatistics.PER_TOKEN, 2e-5)
    for beta in (0.5, 1.0, 2.0):
        truth = reference.fit_objective(expected, beta, p.bias)
        found = kernels.fit_objective(statistics, beta, p.bias, (16, 16))
        assert found.loss == pytest.approx(truth.loss, abs=1e-5)
        assert found.gradient_beta == pytest.approx(truth.gradient_beta, abs=1e-5)
        assert found.gradient_bias.dtype == torch.float64
        torch.testing.assert_close(found.gradient_bias, truth.gradient_bias, rtol=0, atol=1e-6)


def test_the_vocabulary_is_split_across_programs():
    p = Problem(torch.float32, tokens=7)
    engine = kernels.TritonEngine(p.hidden, p.head, Readout(), BLOCKS)
    partition = Partition.of(p.ids, VOCABULARY)
    n_splits = []
    launch = kernels.rest_kernel.__class__.__getitem__

    class Spy:
        def __getitem__(self, grid):
            n_splits.append(grid[1])
            return launch(original, grid)

    original, kernels.rest_kernel = kernels.rest_kernel, Spy()
    try:
        nodes = Nodes.of([1.0], torch.float32, p.head.device)
        engine.rest(p.hidden, partition, partition.place[p.targets], nodes, weighted=True)
    finally:
        kernels.rest_kernel = original
    assert n_splits[0] >= 3


@pytest.mark.parametrize(("tokens", "n_ids"), [(1, N_IDS), (5, 0), (5, VOCABULARY)])
def test_one_token_an_empty_set_and_an_empty_rest(tokens, n_ids):
    p = Problem(torch.float32, tokens, n_ids)
    statistics, expected = p.statistics(kernels), p.statistics(reference)
    assert_same(statistics, expected, HeadStatistics.PER_TOKEN, 2e-5)
    assert_same(p.moments(kernels, 2.0), p.moments(reference, 2.0), MOMENTS, 2e-5)
    found, truth = kernels.fit_objective(statistics, 2.0, p.bias), reference.fit_objective(expected, 2.0, p.bias)
    assert found.loss == pytest.approx(truth.loss, abs=1e-5)
    torch.testing.assert_close(found.gradient_bias, truth.gradient_bias, rtol=0, atol=1e-6)


def test_a_margin_of_40_nats_and_a_common_offset():
    p = Problem(torch.float32, tokens=20)
    bias = torch.zeros(VOCABULARY)
    lone = int((torch.bincount(p.ids, minlength=VOCABULARY) == 0).nonzero()[0])
    bias[lone] = 50.0
    p.targets[p.targets == lone] += 1
    for beta in (0.5, 2.0):
        expected = p.moments(reference, beta, Readout(bias=bias))
        torch.testing.assert_close(
            p.moments(kernels, beta, Readout(bias=bias)).nll.double(), expected.nll, rtol=2e-6, atol=2e-5
        )
        moved = p.moments(kernels, beta, Readout(bias=torch.full((VOCABULARY,), 1e4))).nll
        assert (moved - p.moments(kernels, beta).nll).abs().max() < 2e-3


def test_errors_are_no_larger_than_those_of_a_half_precision_product():
    p = Problem(torch.bfloat16)
    truth = p.moments(reference, 2.0).nll
    product = (p.hidden @ p.head.T).float()
    shortcut = cross_entropy(p.correction(2.0).apply(product), p.targets, reduction="none")
    found = p.losses([p.correction(2.0)])[0]
    assert (found.double() - truth).abs().max() <= (shortcut.double() - truth).abs().max()
    assert (found != found.bfloat16().float()).float().mean() > 0.9


def test_two_runs_give_the_same_bits():
    p = Problem(torch.bfloat16, tokens=33)
    first, second = p.statistics(kernels), p.statistics(kernels)
    for name in HeadStatistics.PER_TOKEN:
        assert torch.equal(getattr(first, name), getattr(second, name))
    a, b = (kernels.fit_objective(first, 1.3, p.bias, (16, 16)) for _ in range(2))
    assert a.loss == b.loss
    assert torch.equal(a.gradient_bias, b.gradient_bias)


def test_the_interpreter_serves_only_those_who_ask_by_name():
    assert choose_backend(torch.empty(2, 2), "triton").name == "triton"
    assert choose_backend(torch.empty(2, 2)).name == "chunked"
