"""Fits from statistics: optimality, bounds, node edges, and the choice that `select` makes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import psd_utils as psd
from psd_utils import selection
from psd_utils.capture import TextStates
from psd_utils.fit import PENALTIES, fits_with_penalties, prior_ratio
from psd_utils.head import real_ids, top_k_ids
from psd_utils.kernels import chebyshev_betas, corrected_moments
from psd_utils.objectives import ExactObjective, StatisticsObjective
from psd_utils.selection import CERTIFIED_ERROR, choose_corrections


def problem(
    n: int = 3000,
    vocabulary: int = 80,
    width: int = 16,
    beta: float = 0.7,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, and targets drawn from softmax(β z + c): the exact answer is near T = 1/β, b = c."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=generator, dtype=dtype)
    head = torch.randn(vocabulary, width, generator=generator, dtype=dtype) * 0.5
    shift = torch.randn(vocabulary, generator=generator, dtype=dtype) * 0.7
    p = (beta * hidden @ head.T + shift).softmax(dim=1)
    return hidden, head, torch.multinomial(p, 1, generator=generator)[:, 0]


def model(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, fit: int, select: int) -> psd.OutputModel:
    """An output model whose splits are consecutive runs of tokens, one document each."""
    pieces = {"fit": slice(0, fit), "select": slice(fit, fit + select), "eval": slice(fit + select, None)}
    states = {
        name: TextStates(hidden[s], targets[s], torch.tensor([len(targets[s])]), (f"{name}:1:0",))
        for name, s in pieces.items()
    }
    return psd.OutputModel(states, head, psd.Readout())


@given(seed=st.integers(0, 10_000), k=st.integers(1, 80), joint=st.booleans())
@settings(max_examples=15, deadline=None)
def test_unpenalised_optimum_reproduces_every_count_of_the_set(seed: int, k: int, joint: bool) -> None:
    hidden, head, targets = problem(seed=seed)
    ids = top_k_ids(targets, k, torch.empty(0, dtype=torch.int64), 80)
    statistics = psd.head_statistics(hidden, head, targets, ids)
    fit = psd.fit_correction(statistics, kind="bias_temperature" if joint else "bias")
    assert fit.convergence.status == "converged"
    moments = corrected_moments(hidden, head, targets, fit.correction)
    counts = torch.bincount(targets, minlength=80)[ids]
    # interpolation of the rest limits how exactly the statistics know the probabilities
    slack = max(fit.convergence.gradient_norm * len(targets), 1e-4)
    assert torch.allclose(moments.probability_sums, counts.double(), rtol=0, atol=slack)


def test_prior_ratio_is_the_first_step_of_iterative_scaling() -> None:
    hidden, head, targets = problem()
    ids = top_k_ids(targets, 40, torch.empty(0, dtype=torch.int64), 80)
    statistics = psd.head_statistics(hidden, head, targets, ids)
    p = (hidden @ head.T).softmax(dim=1)
    expected = (torch.bincount(targets, minlength=80)[ids] / p[:, ids].sum(dim=0)).log()
    assert torch.allclose(prior_ratio(StatisticsObjective(statistics)), expected, atol=1e-12)
    fit = psd.fit_correction(statistics, kind="prior_ratio")
    assert fit.convergence.status == "closed_form"
    assert torch.allclose(fit.correction.bias, expected, atol=1e-12)


def test_bias_on_the_whole_vocabulary_has_mean_zero() -> None:
    hidden, head, targets = problem(n=6000)
    statistics = psd.head_statistics(hidden, head, targets, torch.arange(80))
    for kind in ("bias", "bias_temperature"):
        fit = psd.fit_correction(statistics, kind=kind)
        assert fit.convergence.status == "converged"
        assert float(fit.correction.bias.mean()) == pytest.approx(0.0, abs=1e-12)


def test_bias_follows_the_order_in_which_ids_are_given() -> None:
    hidden, head, targets = problem()
    ids = torch.tensor([7, 3, 60, 12])
    shuffled = ids[[2, 0, 3, 1]]
    a = psd.fit_correction(psd.head_statistics(hidden, head, targets, ids), kind="bias")
    b = psd.fit_correction(psd.head_statistics(hidden, head, targets, shuffled), kind="bias")
    assert torch.allclose(a.correction.bias[[2, 0, 3, 1]], b.correction.bias, atol=1e-9)


def test_larger_penalty_gives_a_smaller_bias_and_a_larger_loss_on_fit() -> None:
    hidden, head, targets = problem()
    fits = fits_with_penalties(
        StatisticsObjective(psd.head_statistics(hidden, head, targets, torch.arange(40))), "bias"
    )
    assert [fit.penalty for fit in fits] == sorted(PENALTIES, reverse=True)
    norms = [float(fit.correction.bias.norm()) for fit in fits]
    losses = [fit.convergence.loss for fit in fits]
    assert norms == sorted(norms)
    assert losses == sorted(losses, reverse=True)


def test_random_labels_end_at_the_edge_of_the_nodes_and_say_so() -> None:
    hidden, head, _ = problem()
    targets = torch.randint(0, 80, (3000,), generator=torch.Generator().manual_seed(3))
    fit = psd.fit_correction(psd.head_statistics(hidden, head, targets, torch.arange(10)), kind="temperature")
    assert fit.convergence.status == "node_edge"
    assert fit.correction.temperature == pytest.approx(2.5)


def test_anticorrelated_labels_end_at_the_bound_after_recentring_and_say_so() -> None:
    hidden, head, _ = problem()
    targets = (hidden @ head.T).argmin(dim=1)
    chosen = choose_corrections(model(hidden, head, targets, 2000, 500), torch.arange(10), ("temperature",))
    fit = chosen["temperature"].fit
    assert fit.convergence.status == "at_bound"
    assert fit.correction.beta == pytest.approx(0.05)


def test_edge_of_the_nodes_is_passed_by_statistics_around_it_and_certified() -> None:
    hidden, head, targets = problem(beta=0.15, n=8000)
    output = model(hidden, head, targets, 5000, 1500)
    ids = torch.arange(30)
    default = psd.fit_correction(output.statistics("fit", ids), kind="temperature")
    assert default.convergence.status == "node_edge"
    chosen = choose_corrections(output, ids, ("none", "temperature", "bias_temperature"))
    # an independent optimum on full logits
    z = hidden[:5000] @ head.T
    beta = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([beta], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        value = torch.nn.functional.cross_entropy(beta * z, targets[:5000])
        value.backward()
        return value

    solver.step(loss)
    assert chosen["temperature"].fit.correction.beta == pytest.approx(float(beta.detach()), rel=1e-4)
    for choice in chosen.values():
        assert choice.certified_error <= CERTIFIED_ERROR
        assert choice.fit.convergence.status in ("converged", "closed_form")


def test_identity_is_chosen_where_no_correction_helps_on_select() -> None:
    hidden, head, targets = problem(beta=1.0, n=4000)
    targets = torch.multinomial((hidden @ head.T).softmax(dim=1), 1, generator=torch.Generator().manual_seed(9))[:, 0]
    chosen = choose_corrections(model(hidden, head, targets, 200, 2000), torch.arange(60), ("none", "bias"))
    assert chosen["bias"].selected_none
    assert chosen["bias"].correction.is_identity
    assert not chosen["bias"].fit.correction.is_identity


def test_node_ranges_do_not_change_the_answer() -> None:
    hidden, head, targets = problem()
    ids = torch.arange(25)
    answers = []
    for low, high in ((0.4, 2.5), (0.3, 1.5), (0.6, 0.9)):
        statistics = psd.head_statistics(hidden, head, targets, ids, chebyshev_betas(low, high))
        answers.append(psd.fit_correction(statistics).correction)
    for other in answers[1:]:
        assert other.temperature == pytest.approx(answers[0].temperature, abs=1e-7)
        assert torch.allclose(other.bias, answers[0].bias, atol=1e-6)


def test_top_k_ids_are_the_most_frequent_targets_and_ties_go_to_the_smaller_id() -> None:
    targets = torch.tensor([5, 5, 5, 2, 2, 9, 9, 1, 30, 30, 30, 30])
    special = torch.tensor([30])
    assert top_k_ids(targets, 3, special, 32).tolist() == [2, 5, 9]
    assert top_k_ids(targets, 2, special, 32).tolist() == [2, 5]
    assert top_k_ids(targets, 10, special, 32).tolist() == [1, 2, 5, 9]
    assert top_k_ids(targets, 10, special, 9).tolist() == [1, 2, 5]  # 9 and beyond are padded rows
    assert real_ids(special, 32).tolist() == [*range(30), 31]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bais"}, "no correction of kind 'bais': did you mean 'bias'"),
        ({"penalty": -1.0}, "the penalty must be finite and not negative, found -1.0"),
        ({"penalty": math.nan}, "the penalty must be finite and not negative, found nan"),
    ],
)
def test_bad_settings_are_refused_in_words(options: dict[str, object], message: str) -> None:
    hidden, head, targets = problem(n=50)
    statistics = psd.head_statistics(hidden, head, targets, torch.arange(5))
    with pytest.raises(psd.PsdError, match=message):
        psd.fit_correction(statistics, **options)


def test_bias_without_a_set_is_refused() -> None:
    hidden, head, targets = problem(n=50)
    statistics = psd.head_statistics(hidden, head, targets, torch.empty(0, dtype=torch.int64))
    with pytest.raises(psd.PsdError, match="needs a set of ids"):
        psd.fit_correction(statistics, kind="bias")


@pytest.mark.parametrize("kind", ["temperature", "prior_ratio", "bias", "bias_temperature"])
def test_fits_by_exact_passes_and_by_statistics_agree(kind: str) -> None:
    hidden, head, targets = problem()
    ids = torch.tensor([4, 9, 2, 70, 33])
    exact = psd.fit_correction(ExactObjective(hidden, head, targets, ids, psd.Readout()), kind, 1e-4)
    other = psd.fit_correction(psd.head_statistics(hidden, head, targets, ids), kind, 1e-4)
    assert exact.convergence.status == other.convergence.status
    assert exact.correction.temperature == pytest.approx(other.correction.temperature, abs=1e-7)
    assert torch.allclose(exact.correction.bias, other.correction.bias, atol=1e-6)


def test_set_beyond_the_budget_is_fitted_by_exact_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = problem()
    output = model(hidden, head, targets, 2000, 500)
    expected = choose_corrections(output, torch.arange(40), ("bias", "bias_temperature"))
    monkeypatch.setattr(selection, "STATISTICS_BUDGET", 1000)
    monkeypatch.setattr(psd.OutputModel, "statistics", None)  # no statistics may be made
    found = choose_corrections(output, torch.arange(40), ("bias", "bias_temperature"))
    for kind, choice in expected.items():
        assert torch.allclose(found[kind].correction.bias, choice.correction.bias, atol=1e-6)
        assert found[kind].correction.temperature == pytest.approx(choice.correction.temperature, abs=1e-7)
