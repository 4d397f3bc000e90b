"""The equations of motion against autograd, and the six published checks (seed 0, matched, 3000 steps)."""

import numpy as np
import pytest
import torch

from psd_utils.spurious import equations
from psd_utils.spurious.arms import run_arms
from psd_utils.spurious.memory import (
    MemorySettings,
    initial_weights,
    logits,
    make_world,
    normalise,
    raw_states,
)


@pytest.fixture(scope="module")
def arms():
    return run_arms(["model", "linear"], [0], 200, keep_weights=("model", "linear"))


@pytest.fixture(scope="module")
def histories(arms):
    return {
        name: equations.force_history(arm.world, arm.pretrained.weights, arm.matched.rate, 3000)
        for name, arm in arms.items()
    }


@pytest.mark.parametrize("normalisation", ["rms", "none", "relu"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_state_gradient_splits_exactly(normalisation, seed):
    world = make_world(MemorySettings(), [seed])
    weights = initial_weights(world.settings, [seed])
    h = (raw_states(world.new.keys, weights) * (1 + 5 * seed)).requires_grad_()
    z = torch.bmm(normalise(h, normalisation), weights.U)
    loss = torch.nn.functional.cross_entropy(z[0], world.new.answers[0], reduction="sum")
    (true,) = torch.autograd.grad(loss, h)
    found = equations.state_gradient(h.detach(), world.new.answers, weights.U, normalisation)
    error = torch.linalg.vector_norm(found.total - true) / torch.linalg.vector_norm(true)
    assert error <= 1e-12
    assert bool((found.normaliser == 0).all()) == (normalisation != "rms")


def test_the_normaliser_lengthens_while_wrong_and_shortens_once_right(arms):
    arm = arms["model"]
    h = raw_states(arm.world.new.keys, arm.trajectory.weights_at(100))
    split = equations.state_gradient(h, arm.world.new.answers, arm.trajectory.weights_at(100).U, "rms")
    push = -(split.normaliser * h).sum(-1)
    assert bool(((push > 0) == (split.margin < 0)).all())


def test_check_1_common_shift_is_the_mean_key_times_the_change(arms):
    for arm in arms.values():
        for step in (5, 80, 200):
            change = arm.trajectory.weights_at(step).W - arm.pretrained.weights.W
            direct = torch.bmm(arm.world.A.keys, change).mean(1)
            by_key = torch.bmm(arm.world.A.keys.mean(1, keepdim=True), change)[:, 0]
            assert torch.linalg.vector_norm(direct - by_key) / torch.linalg.vector_norm(direct) < 1e-13
            torch.testing.assert_close(arm.trajectory.at("common_h", step), torch.linalg.vector_norm(direct, dim=-1))
            shared = torch.einsum("sd,sde->se", arm.world.shared_key, change) * 0.5**0.5
            cosine = torch.nn.functional.cosine_similarity(shared, direct)
            assert bool((cosine > 0.98).all())


@pytest.mark.parametrize("step", [5, 80, 200])
def test_check_2_shared_row_gradient_identity(arms, step):
    for name, arm in arms.items():
        weights, facts = arm.trajectory.weights_at(step), arm.world.new
        kind = arm.world.settings.normalisation
        W = weights.W.clone().requires_grad_()
        z = torch.bmm(normalise(torch.bmm(facts.keys, W), kind), weights.U)
        torch.nn.functional.cross_entropy(z[0], facts.answers[0]).backward()
        true = torch.einsum("sd,sde->se", arm.world.shared_key, W.grad)
        states = equations.state_gradient(raw_states(facts.keys, weights), facts.answers, weights.U, kind).total
        found = equations.shared_row_gradient(facts, states, arm.world.shared_key)
        error = torch.linalg.vector_norm(found - true) / torch.linalg.vector_norm(true)
        assert error < 1e-12, name


def test_check_3_finite_differences(arms):
    arm = arms["model"]
    weights, facts = arm.trajectory.weights_at(80), arm.world.new
    gradient = equations.weight_gradient(facts, weights, "rms")
    draws = torch.Generator().manual_seed(0)
    direction = torch.randn(weights.W.shape, generator=draws, dtype=torch.float64)
    size = 1e-5

    def loss(scale):
        moved = equations.Weights(weights.W + scale * direction, weights.U)
        return torch.nn.functional.cross_entropy(logits(facts.keys, moved, "rms")[0], facts.answers[0])

    numeric = (loss(size) - loss(-size)) / (2 * size)
    exact = (gradient.W * direction).sum()
    assert abs(numeric - exact) / abs(exact) < 1e-6


def smooth(values):
    """Mean over ten neighbouring checkpoints."""
    return np.convolve(values, np.full(10, 0.1), mode="valid")


def test_check_4_the_force_turns_only_with_the_normaliser(histories):
    for name, table in histories.items():
        total = (table["plain_s"] + table["normaliser_s"]).to_numpy()
        largest = np.abs(total).max()
        steps = table["step"].to_numpy()
        if name == "linear":
            # never negative but for minibatch noise around zero
            assert total.min() > -0.15 * largest
            assert total[steps >= 300].min() > -0.01 * largest
        else:
            turn = steps[np.flatnonzero(total < 0)[0]]
            assert 30 <= turn <= 150
            assert total[(steps >= 100) & (steps <= 1000)].max() < 0
        assert smooth(table["plain_w"].to_numpy()).min() > -0.02 * table["plain_w"].max()


def test_check_5_the_normaliser_turns_with_the_margin_and_the_total_follows(histories):
    table = histories["model"]
    steps = table["step"].to_numpy()
    margin_turn = steps[np.flatnonzero(table["margin"] > 0)[0]]
    normaliser_turn = steps[np.flatnonzero(table["normaliser_s"] < 0)[0]]
    total_turn = steps[np.flatnonzero(table["plain_s"] + table["normaliser_s"] < 0)[0]]
    assert abs(normaliser_turn - margin_turn) <= 10
    assert -10 <= total_turn - normaliser_turn <= 40


def test_check_6_the_write_moves_the_new_facts_and_alignment_follows_the_margin(histories):
    for table in histories.values():
        ratio = table["moved"] / table["write"]
        assert ratio.between(0.95, 1.05).all()
        clear = table["margin"].abs() > 0.1
        assert (np.sign(table["alignment"]) == np.sign(table["margin"]))[clear].all()


@pytest.mark.parametrize(("name", "raw", "corrected"), [("model", 0.25, 0.05), ("linear", 1.0, 0.12)])
def test_reduced_equation_with_and_without_the_finite_step(arms, name, raw, corrected):
    arm = arms[name]
    run = equations.reduced_run(arm.world, arm.pretrained.weights, arm.matched.rate)
    assert run.steps[0] == 10
    assert run.steps[-1] == 1000
    assert run.error("vector").max() < 1e-10
    assert run.error("corrected").max() < corrected
    assert run.error("corrected").max() < run.error("predicted").min() < raw
    if name == "model":
        peak = run.measured.argmax(0)
        assert bool((run.measured[-1] < 0.35 * run.measured.max(0).values).all())
        assert bool(((peak > 30) & (peak < 100)).all())


def test_reduced_equation_is_not_derived_for_relu():
    world = make_world(MemorySettings(normalisation="relu"), [0])
    with pytest.raises(ValueError, match="found 'relu'"):
        equations.reduced_run(world, initial_weights(world.settings, [0]), torch.tensor([0.1]), 20)
    with pytest.raises(ValueError, match="start is 20"):
        equations.reduced_run(world, initial_weights(world.settings, [0]), torch.tensor([0.1]), 20, 20)
