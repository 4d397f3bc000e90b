"""The ladder: gradients against autograd, optima against scipy, planted changes undone by the rung that can."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from psd_utils.capture import TextStates
from psd_utils.errors import PsdError
from psd_utils.head import OutputModel
from psd_utils.kernels import Readout
from psd_utils.ladder import Rung, ladder
from psd_utils.ladder_problem import Moments, Problem, exact_losses, minimise, penalty_path
from psd_utils.refitted_head import HEAD_PENALTIES, refitted_head

VOCABULARY, WIDTH = 30, 8
NO_SPECIAL = torch.empty(0, dtype=torch.int64)

pytestmark = pytest.mark.usefixtures("single_thread")


def text(
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    head_change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    readout: Readout | None = None,
    dtype: torch.dtype = torch.float64,
    n: int = 3000,
) -> OutputModel:
    """A model whose states or head were changed after its text was drawn from what they were."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3 * n, WIDTH, generator=generator, dtype=torch.float64)
    head = 0.7 * torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.multinomial((hidden @ head.T).softmax(dim=1), 1, generator=generator)[:, 0]
    hidden = hidden if change is None else change(hidden)
    head = head if head_change is None else head_change(head)
    lengths = torch.full((10,), n // 10)
    splits = {}
    for i, name in enumerate(("fit", "select", "eval")):
        part = slice(i * n, (i + 1) * n)
        keys = tuple(f"{name}{d}" for d in range(10))
        splits[name] = TextStates(hidden[part].to(dtype), targets[part], lengths, keys)
    return OutputModel(splits, head.to(dtype), readout or Readout())


def rungs(model: OutputModel, ranks: tuple[int, ...] = (1, 2)) -> dict[str, Rung]:
    ids = torch.arange(20)
    found = [*ladder(model, ids, NO_SPECIAL, VOCABULARY, ranks), refitted_head(model)]
    return {rung.name: rung for rung in found}


def loss(rung: Rung, split: str = "eval") -> float:
    return float(rung.losses(split).double().mean())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_pass_gives_the_gradient_of_autograd(softcap: float | None) -> None:
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)
    model = text(readout=Readout(bias=bias, scale=0.7, softcap=softcap), n=600)
    problem = Problem(model)
    found = torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)
    mean = problem.each(lambda part, z, residual: found.addmm_(residual.T, problem.hidden[part]))
    head = model.head.clone().requires_grad_()
    with torch.enable_grad():
        z = (model.splits["fit"].hidden @ head.T + bias) * 0.7
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        expected = torch.nn.functional.cross_entropy(z, model.splits["fit"].targets)
        expected.backward()
    assert mean == pytest.approx(expected.item(), abs=1e-12)
    assert head.grad is not None
    assert torch.allclose(found / problem.n, head.grad, atol=1e-12)
    own = exact_losses(model.splits["eval"], model.head, model.readout)
    assert torch.allclose(own, model.losses("eval", [None])[0].double(), atol=1e-10)


def test_moments_make_the_curvature_of_every_problem_near_one() -> None:
    model = text(n=1500)
    problem = Problem(model)
    moments = Moments.of(problem)
    z = model.splits["fit"].hidden @ model.head.T
    p = z.softmax(dim=1)
    hessian = torch.diag(p.mean(dim=0)) - p.T @ p / len(p)
    assert torch.allclose(moments.mass, torch.diag(hessian), atol=1e-10)
    pull = sum(model.head.T @ (torch.diag(q) - torch.outer(q, q)) @ model.head for q in p) / len(p)
    assert torch.allclose(moments.pull, pull, atol=1e-10)


def test_refitted_head_is_the_optimum_that_scipy_finds() -> None:
    model = text(head_change=lambda head: head + 0.4 * torch.ones_like(head), n=800)
    rung = rungs(model, ranks=())["head"]
    assert rung.convex
    assert rung.status == "converged"
    h, y = model.splits["fit"].hidden.numpy(), model.splits["fit"].targets.numpy()
    start = model.head.numpy()

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = x.reshape(start.shape)
        z = h @ w.T
        maximum = z.max(axis=1, keepdims=True)
        p = np.exp(z - maximum)
        total = p.sum(axis=1, keepdims=True)
        value = (np.log(total) + maximum)[:, 0].mean() - z[np.arange(len(y)), y].mean()
        p /= total
        p[np.arange(len(y)), y] -= 1
        away = w - start
        return value + rung.penalty / 2 * (away**2).sum(), (p.T @ h / len(y) + rung.penalty * away).ravel()

    best = minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 2000, "gtol": 1e-8})
    head = torch.from_numpy(best.x.reshape(start.shape))
    expected = exact_losses(model.splits["eval"], head, model.readout)
    assert loss(rung) == pytest.approx(float(expected.mean()), abs=2e-3)
    assert rung.penalty in HEAD_PENALTIES


def test_each_planted_change_is_undone_by_the_rung_that_can() -> None:
    plain = float(text().losses("eval", [None]).double().mean())
    u = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    v = torch.cos(torch.arange(WIDTH, dtype=torch.float64))
    low_rank = torch.eye(WIDTH, dtype=torch.float64) + 0.6 * torch.outer(u, v)
    moved = rungs(text(change=lambda h: h @ low_rank.T + 0.5))
    stretched = rungs(
        text(head_change=lambda w: w * torch.linspace(0.4, 1.6, VOCABULARY, dtype=torch.float64)[:, None])
    )
    lost_moved = float(text(change=lambda h: h @ low_rank.T + 0.5).losses("eval", [None]).double().mean()) - plain
    assert lost_moved > 0.1
    # a rank-1 change of the state is what a rank-1 map undoes; bias and temperature cannot
    assert loss(moved["map_rank_1"]) - plain < 0.1 * lost_moved
    assert loss(moved["map_full"]) - plain < 0.1 * lost_moved
    assert loss(moved["bias_temperature"]) - plain > 0.3 * lost_moved
    assert loss(stretched["scale_bias_all"]) - plain < 0.02
    assert loss(stretched["scale_bias_all"]) < loss(stretched["bias_all"])
    shifted = text(change=lambda h: h + 0.5)
    lost_shifted = float(shifted.losses("eval", [None]).double().mean()) - plain
    offset = rungs(shifted, ranks=())["offset"]
    assert offset.convex
    assert loss(offset) - plain < 0.05 * lost_shifted
    for rung in (*moved.values(), *stretched.values()):
        assert rung.status in ("converged", "stopped", "at_bound")
        assert np.isfinite(rung.gradient_norm)
    assert not moved["map_rank_1"].convex
    assert moved["map_full"].convex


def test_a_rung_that_does_not_pay_on_select_is_not_used() -> None:
    model = text(n=100)
    plain = model.losses("eval", [None])[0].double()
    for rung in rungs(model, ranks=(1,)).values():
        worse = float(rung.losses("select").double().mean()) > float(model.losses("select", [None]).double().mean())
        assert not worse or rung.selected_none
        if rung.selected_none:
            assert torch.allclose(rung.losses("eval").double(), plain, atol=1e-9)


def test_float32_models_have_the_same_ladder() -> None:
    def half(head: torch.Tensor) -> torch.Tensor:
        return head + 0.3

    precise = rungs(text(head_change=half), ranks=(2,))
    single = rungs(text(head_change=half, dtype=torch.float32), ranks=(2,))
    for name, rung in precise.items():
        assert loss(single[name]) == pytest.approx(loss(rung), abs=2e-3)


def test_soft_capped_rungs_are_not_called_convex() -> None:
    found = rungs(text(readout=Readout(softcap=5.0), n=300), ranks=(1,))
    assert not found["head"].convex
    assert not found["map_full"].convex


def test_path_stops_when_select_grows_worse_and_the_solver_reaches_a_quadratics_minimum() -> None:
    def quadratic(x: torch.Tensor) -> tuple[float, torch.Tensor]:
        return float(((x - 3.0) ** 2).sum() / 2), x - 3.0

    end = minimise(quadratic, torch.zeros(4, dtype=torch.float64))
    assert end.status == "converged"
    assert torch.allclose(end.x, torch.full((4,), 3.0, dtype=torch.float64), atol=1e-2)
    losses = iter([1.0, 0.5, 0.7, 0.1])
    path = penalty_path(
        lambda x, _: quadratic(x),
        (1.0, 0.1, 0.01, 0.001),
        torch.zeros(4, dtype=torch.float64),
        lambda penalty: torch.full((4,), (1 + penalty) ** 0.5, dtype=torch.float64),
        lambda _: next(losses),
    )
    assert [candidate.penalty for candidate in path] == [1.0, 0.1, 0.01]


def test_a_head_that_the_memory_cannot_hold_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text()
    monkeypatch.setattr("psd_utils.refitted_head.free_memory", lambda device: 1000)
    with pytest.raises(PsdError, match=rf"head of {model.head.numel():,} numbers anew needs about .* GiB of memory"):
        refitted_head(model)


def test_a_short_history_ends_at_the_same_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text(head_change=lambda head: head + 0.4 * torch.ones_like(head), n=800)
    usual = refitted_head(model).losses("eval").mean()
    monkeypatch.setattr("psd_utils.refitted_head.LARGE_HEAD", 1)
    assert float(refitted_head(model).losses("eval").mean()) == pytest.approx(float(usual), abs=2e-4)
