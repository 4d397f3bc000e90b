import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from psd_utils.spurious import descent, equations, memory, training
from psd_utils.spurious.arms import ARMS, run_arms
from psd_utils.spurious.memory import MemorySettings, Weights, make_world
from psd_utils.spurious.training import Replay, fine_tune, match_rate, pretrain
from psd_utils.spurious.trajectory import checkpoint_steps

SMALL = MemorySettings(dimension=48, n_values=8, n_old=24, n_new=20, batch_size=8)


def test_keys_and_answers_have_the_stated_geometry():
    world = make_world(MemorySettings(n_old=400), range(3))
    for facts in (world.A, world.B, world.new):
        gram = torch.bmm(facts.keys, facts.keys.transpose(1, 2))
        n = gram.shape[1]
        off_diagonal = (gram.sum((1, 2)) - gram.diagonal(dim1=1, dim2=2).sum(1)) / (n * (n - 1))
        # α plus the chance overlap of 2√(α(1−α)) μ·e, of order 1/√(d n)
        torch.testing.assert_close(off_diagonal, torch.full((3,), 0.5, dtype=torch.float64), atol=0.03, rtol=0)
    assert int(world.A.answers.max()) < 16 <= int(world.B.answers.min())
    assert int(world.new.answers.min()) >= 16
    control = make_world(MemorySettings(new_answers="all"), [0])
    assert int(control.new.answers.min()) < 16 <= int(control.new.answers.max())
    torch.testing.assert_close(torch.linalg.vector_norm(world.shared_key, dim=-1), torch.ones(3, dtype=torch.float64))


def test_no_shared_key_means_random_keys():
    world = make_world(MemorySettings(alpha=0.0), [0])
    torch.testing.assert_close(torch.linalg.vector_norm(world.A.keys, dim=-1), torch.ones(1, 128, dtype=torch.float64))


@pytest.mark.parametrize("normalisation", ["rms", "none", "relu"])
def test_weight_gradient_agrees_with_autograd(normalisation):
    world = make_world(SMALL, [3, 4])
    start = memory.initial_weights(SMALL, [3, 4])
    W, U = start.W.clone().requires_grad_(), start.U.clone().requires_grad_()
    z = memory.logits(world.new.keys, Weights(W, U), normalisation)
    loss = torch.nn.functional.cross_entropy(z.flatten(0, 1), world.new.answers.flatten(), reduction="sum")
    (loss / world.new.answers.shape[1]).backward()
    found = equations.weight_gradient(world.new, start, normalisation)
    torch.testing.assert_close(found.W, W.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.U, U.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("normalisation", ["rms", "none", "relu"])
@pytest.mark.parametrize("readout_rate", [1.0, 0.5, 0.0])
def test_descent_is_sgd_on_autograd_gradients(normalisation, readout_rate):
    settings = replace(SMALL, normalisation=normalisation)
    world = make_world(settings, [1])
    start = memory.initial_weights(settings, [1])
    rate = 0.3
    W, U = start.W.clone(), start.U.clone()
    batches = list(descent.Batches([1], "fine_tuning", settings.n_new, 8).steps(20))
    for items in batches:
        W.requires_grad_(), U.requires_grad_()
        z = memory.logits(world.new.keys[:, items[0]], Weights(W, U), normalisation)
        loss = torch.nn.functional.cross_entropy(z[0], world.new.answers[0, items[0]])
        grads = torch.autograd.grad(loss, [W, U])
        W, U = W.detach() - rate * grads[0], U.detach() - rate * readout_rate * grads[1]
    now = start.clone()
    for _ in descent.descend(now, world.new, batches, rate, settings, readout_rate):
        pass
    torch.testing.assert_close(now.W, W, rtol=0, atol=1e-12)
    torch.testing.assert_close(now.U, U, rtol=0, atol=1e-12)
    if readout_rate == 0:
        assert torch.equal(now.U, start.U)


def test_projection_is_what_the_formula_says():
    world = make_world(SMALL, [0, 5])
    start = memory.initial_weights(SMALL, world.seeds)
    batches = list(descent.Batches(world.seeds, "fine_tuning", SMALL.n_new, 8).steps(15))
    literal = start.clone()
    mu = world.shared_key.unsqueeze(-1)
    for items in batches:
        for _ in descent.descend(literal, world.new, [items], 0.3, SMALL):
            pass
        change = literal.W - start.W
        literal.W.copy_(start.W + change - mu @ (mu.transpose(1, 2) @ change))
    now = start.clone()
    for _ in descent.descend(now, world.new, batches, 0.3, SMALL, project=world.shared_key):
        pass
    torch.testing.assert_close(now.W, literal.W, rtol=0, atol=1e-12)


def test_a_seed_does_not_depend_on_the_others():
    alone = run_arms(["model"], [2], 120, base=SMALL)["model"]
    among = run_arms(["model"], [0, 2, 7], 120, base=SMALL)["model"]
    for part in ("A", "B", "new"):
        assert torch.equal(getattr(alone.world, part).keys[0], getattr(among.world, part).keys[1])
        assert torch.equal(getattr(alone.world, part).answers[0], getattr(among.world, part).answers[1])
    assert alone.matched.rate[0] == among.matched.rate[1]
    for name, values in alone.trajectory.quantities.items():
        torch.testing.assert_close(values[:, 0], among.trajectory[name][:, 1], rtol=1e-8, atol=1e-9)


def test_longer_runs_begin_like_shorter_ones():
    short = list(descent.Batches([4], "fine_tuning", 50, 8).steps(300))
    long = list(descent.Batches([4], "fine_tuning", 50, 8).steps(700))
    assert len(short) == 300
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=False))


def test_old_facts_do_not_depend_on_the_number_of_new_ones():
    few, many = make_world(replace(SMALL, n_new=4), [0]), make_world(SMALL, [0])
    assert torch.equal(few.A.keys, many.A.keys)
    assert torch.equal(few.B.answers, many.B.answers)
    assert few.settings.before_fine_tuning == many.settings.before_fine_tuning


def test_no_global_random_state_and_threads_are_put_back():
    torch.manual_seed(11)
    np.random.seed(11)  # noqa: NPY002
    before, legacy, threads = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads()  # noqa: NPY002
    world = make_world(SMALL, [0])
    start = pretrain(world)
    fine_tune(world, start.weights, match_rate(world, start).rate, 30)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(legacy, np.random.get_state()[1])  # noqa: NPY002
    assert torch.get_num_threads() == threads


def test_pretraining_learns_and_matching_meets_the_gate():
    world = make_world(SMALL, range(3))
    start = pretrain(world)
    for facts in (world.A, world.B):
        assert bool((memory.fact_accuracy(facts, start.weights, "rms") >= 0.99).all())
    matched = match_rate(world, start)
    steps = training.gate_step(world, start.weights, matched.rate, 230)
    assert torch.equal(steps, matched.gate_step)
    assert bool(matched.matched.all())
    assert bool(((steps - 200).abs() <= 30).all())


def test_a_rate_that_cannot_meet_the_gate_is_reported(caplog):
    world = make_world(SMALL, [0])
    start = pretrain(world)
    matched = match_rate(world, start, training.Protocol(n_bisections=1, gate_step=5))
    assert not bool(matched.matched.any())
    assert "nearest rate used" in caplog.text


def test_a_diverging_seed_is_refused_in_words():
    settings = replace(SMALL, normalisation="none")
    world = make_world(settings, [0])
    with pytest.raises(FloatingPointError, match=r"diverged by step .* seeds \[0\]"):
        fine_tune(world, memory.initial_weights(settings, [0]), 1e6, 50)


def test_replay_keeps_the_replayed_and_scores_the_others():
    world = make_world(SMALL, [0, 1])
    start = pretrain(world)
    rate = match_rate(world, start).rate
    run = fine_tune(world, start.weights, rate, 200, replay=Replay(6, 4))
    assert bool((run["accuracy_A_replayed"][-1] == 1).all())
    whole = (6 * run["accuracy_A_replayed"] + 18 * run["accuracy_A_others"]) / 24
    torch.testing.assert_close(whole, run["accuracy_A"])
    assert torch.equal(training.replayed_facts(world, 3), training.replayed_facts(world, 6)[:, :3])


def test_checkpoints():
    steps = checkpoint_steps(5000)
    assert steps[:3] == (0, 5, 10)
    assert steps[-1] == 5000
    assert {100, 200} <= set(steps)
    assert len([s for s in steps if s > 200]) == 60
    assert checkpoint_steps(7) == (0, 5, 7)


def test_measured_quantities_at_step_zero_and_by_hand():
    arm = run_arms(["model"], [0, 1], 60, base=SMALL)["model"]
    run = arm.trajectory
    for name in ("shared_write", "shift_content", "common", "individual", "common_h", "individual_h"):
        assert not run[name][0].any()
    assert torch.equal(run["common_only_A"][0], run["accuracy_A"][0])
    now, start = run.weights_at(60), arm.pretrained.weights
    change = now.W - start.W
    s = torch.einsum("sd,sde->se", arm.world.shared_key, change)
    torch.testing.assert_close(run.at("shared_write", 60), torch.linalg.vector_norm(s, dim=-1))
    torch.testing.assert_close(
        run.at("shared_share", 60), s.square().sum(-1) / change.square().sum((-2, -1)), rtol=1e-12, atol=0
    )
    rest = change - arm.world.shared_key[:, :, None] * s[:, None]
    law = math.sqrt(0.5 / 48) * torch.linalg.matrix_norm(rest)
    torch.testing.assert_close(run.at("individual_law", 60), law)


def test_summary_reads_the_curve():
    run = run_arms(["model"], [0], 60, base=SMALL)["model"].trajectory
    curve = run["accuracy_A"].clone()
    curve[:, 0] = torch.linspace(1, 0.9, len(run.steps))
    curve[4, 0], curve[6, 0], curve[7, 0] = 0.1, 0.5, 0.6
    run.quantities["accuracy_A"] = curve
    row = run.summary().iloc[0]
    assert (row.trough, row.trough_step) == (0.1, run.steps[4])
    assert row.max_after == pytest.approx(curve[5:, 0].max().item())
    assert row.recovery == pytest.approx(row.max_after - 0.1)
    assert row.end == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"n_values": 7}, "even number"),
        ({"n_new": 0}, "n_new is 0"),
        ({"normalisation": "layer"}, "expected one of rms, none, relu"),
        ({"new_answers": "X"}, "expected one of Y, all"),
        ({"readout_rate": -1.0}, "readout_rate is -1.0"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        MemorySettings(**change)


def test_bad_calls_are_refused_in_words():
    world = make_world(SMALL, [0, 1])
    weights = memory.initial_weights(SMALL, [0, 1])
    with pytest.raises(ValueError, match="one for each of the 2 seeds"):
        fine_tune(world, weights, torch.ones(3), 5)
    with pytest.raises(ValueError, match="n_steps is 0"):
        fine_tune(world, weights, 0.1, 0)
    with pytest.raises(ValueError, match=r"1 … 24 facts"):
        fine_tune(world, weights, 0.1, 5, replay=Replay(25, 4))
    with pytest.raises(ValueError, match="at least one whole number"):
        make_world(SMALL, [])
    with pytest.raises(ValueError, match="No arm 'modle'"):
        run_arms(["modle"], [0], 5)
    run = fine_tune(world, weights, 0.1, 5)
    with pytest.raises(KeyError, match="No weights kept at steps"):
        run.weights_at(5)
    with pytest.raises(KeyError, match="No quantity 'acuracy'"):
        run["acuracy"]


def test_every_arm_runs_small():
    results = run_arms(list(ARMS), [0], 20, base=SMALL)
    assert torch.equal(results["projected"].trajectory.rate, results["model"].trajectory.rate)
    assert bool((results["projected"].trajectory["shared_write"] < 1e-12).all())
    assert torch.equal(results["model"].pretrained.weights.W, results["all_values"].pretrained.weights.W)
