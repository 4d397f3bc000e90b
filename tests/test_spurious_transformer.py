"""The transformer: its arithmetic, its training, what is measured of it, and the acceptance rows 34 to 44."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from psd_utils.spurious import acceptance, transformer_training
from psd_utils.spurious.acceptance import FAILS, HOLDS, NOT_RUN
from psd_utils.spurious.biographies import BiographySettings, generator
from psd_utils.spurious.biography_batches import training_batch
from psd_utils.spurious.biography_language import TokenLanguage
from psd_utils.spurious.biography_text import TextLanguage
from psd_utils.spurious.transformer import (
    GROUPS,
    Decoder,
    TransformerSettings,
    freeze,
    group_of,
    make_decoder,
    next_token_loss,
)
from psd_utils.spurious.transformer_findings import cue_summary, load_runs, mean_run, summary, transformer_findings
from psd_utils.spurious.transformer_measure import Observer, own_region_ranks, read
from psd_utils.spurious.transformer_runs import (
    CONDITIONS,
    DOSES,
    QUICK,
    Study,
    cue_condition,
    make_study,
    run_conditions,
)
from psd_utils.spurious.transformer_surgery import EDITS, edited, equal_recall
from psd_utils.spurious.transformer_training import (
    Injection,
    TrainingSettings,
    choose_device,
    cosine,
    evaluation_steps,
    inject,
    pretrain,
)

ROWS = {row.id: row for row in acceptance.load_rows(acceptance.data_folder() / "acceptance_transformer.yaml")}
JUDGED = (34, 35, 36, 37, "37b")
DO_NOT_HOLD = {
    "37b": "three seeds' mean of A at step 600 is just above 0.1; all else of the row holds: docs/spurious.md"
}
TINY = Study(
    people=BiographySettings(n_old=8, n_new=8, n_never=4),
    language=TokenLanguage(name_pool=16, n_values=8),
    width=16,
    training=TrainingSettings(batch_size=8, pretraining_steps=12, save_every=4),
    n_steps=30,
    every=1,
)

pytestmark = pytest.mark.usefixtures("single_thread")


def tiny(seed=0, **changes):
    condition = replace(CONDITIONS["B_prime"], model=changes)
    return TINY.world(condition, seed), make_decoder(TINY.model(condition), generator(seed, "weights"))


@pytest.fixture(scope="module")
def quick_runs():
    return run_conditions(["B_prime", "C"], [0], QUICK)


# The model.


def by_hand(model, tokens):
    """The decoder in float64 numpy, rotary positions as a product of complex numbers."""
    weights = {name: w.detach().double().numpy() for name, w in model.named_parameters()}
    s = model.settings

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def turned(x):
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
        frequency = 10_000.0 ** (-2 * np.arange(pairs.shape[-1]) / x.shape[-1])
        pairs = pairs * np.exp(1j * np.arange(x.shape[0])[:, None] * frequency)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = weights["embedding.weight"][tokens]
    width = s.width // s.n_heads
    for i in range(s.n_layers):
        name = f"blocks.{i}"
        y, parts = norm(x, f"{name}.norm_1"), []
        for h in range(s.n_heads):
            rows = slice(h * width, (h + 1) * width)
            q, k, v = (y @ weights[f"{name}.attention.{p}.weight"][rows].T for p in "qkv")
            scores = turned(q) @ turned(k).T / np.sqrt(width)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            pattern = np.exp(scores - scores.max(1, keepdims=True))
            parts.append(pattern / pattern.sum(1, keepdims=True) @ v)
        x = x + np.concatenate(parts, 1) @ weights[f"{name}.attention.o.weight"].T + weights[f"{name}.attention.o.bias"]
        if s.mlp:
            inner = norm(x, f"{name}.norm_2") @ weights[f"{name}.mlp.0.weight"].T + weights[f"{name}.mlp.0.bias"]
            erf = torch.erf(torch.from_numpy(inner / np.sqrt(2))).numpy()
            x = x + inner * (1 + erf) / 2 @ weights[f"{name}.mlp.2.weight"].T + weights[f"{name}.mlp.2.bias"]
    x = norm(x, "norm") if s.final_norm else x
    return x @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize(("mlp", "final_norm"), [(False, True), (True, True), (True, False), (False, False)])
def test_logits_are_those_of_a_float64_computation(mlp, final_norm):
    model = make_decoder(TransformerSettings(50, 32, 2, 4, mlp, final_norm), generator(0, "weights"))
    with torch.no_grad():
        for weight in model.parameters():  # biases and scales away from 0 and 1, so that each is seen
            weight += 0.3 * torch.randn(weight.shape, generator=generator(1, "weights"))
    tokens = torch.randint(0, 50, (11,), generator=generator(0, "values"))
    found = model(tokens.unsqueeze(0))[0].detach().double().numpy()
    expected = by_hand(model, tokens.numpy())
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("mlp", "final_norm", "published"),
    [(False, True, 10_329_945), (True, True, 27_135_833), (True, False, 27_134_809)],
)
def test_parameters_are_as_many_as_published(mlp, final_norm, published):
    with torch.device("meta"):
        model = Decoder(TransformerSettings(1881, 512, 8, 8, mlp, final_norm))
    assert sum(weight.numel() for weight in model.parameters()) == published


def test_nothing_is_predicted_from_what_comes_later():
    _, model = tiny()
    tokens = torch.randint(0, 50, (2, 9), generator=generator(0, "values"))
    changed = tokens.clone()
    changed[:, 6:] = 3
    assert torch.equal(model(tokens)[:, :6], model(changed)[:, :6])
    assert not torch.equal(model(tokens)[:, 6:], model(changed)[:, 6:])


def test_initial_weights_have_the_stated_spread_and_depend_on_the_seed_alone():
    settings = TransformerSettings(500, 128, 1, 4, mlp=True)
    model = make_decoder(settings, generator(5, "weights"))
    torch.rand(3)
    again = make_decoder(settings, generator(5, "weights"))
    for (name, weight), same in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, same)
        if weight.ndim == 2:
            inputs = 128 if name.startswith("embedding") else weight.shape[1]
            assert weight.std().item() == pytest.approx(inputs**-0.5, rel=0.03), name
        else:
            assert bool((weight == (1 if "norm" in name and name.endswith("weight") else 0)).all()), name


def test_the_loss_is_the_mean_over_counted_tokens():
    world, model = tiny()
    batch = training_batch(world.A, 5, generator(0, "pretraining"))
    counted = batch.counted & (torch.rand(batch.counted.shape, generator=generator(0, "cue")) < 0.5)
    losses = [
        -np.log(np.exp(z[j - 1] - z[j - 1].max()) / np.exp(z[j - 1] - z[j - 1].max()).sum())[token]
        for row, mask in zip(batch.tokens, counted, strict=True)
        for z in [by_hand(model, row.numpy())]
        for j, token in enumerate(row.tolist())
        if j > 0 and mask[j]
    ]
    assert next_token_loss(model, batch.tokens, counted).item() == pytest.approx(np.mean(losses), rel=1e-5)


# Training.


def test_the_rate_falls_along_a_cosine_and_is_constant_in_the_injection():
    assert cosine(0, 100, 1e-3, 1e-7) == pytest.approx(1e-3)
    assert cosine(50, 100, 1e-3, 1e-7) == pytest.approx((1e-3 + 1e-7) / 2)
    assert cosine(100, 100, 1e-3, 1e-7) == pytest.approx(1e-7)
    assert TrainingSettings().injection_rate == pytest.approx(7.5e-5)
    assert TrainingSettings(peak_rate=5e-4).injection_rate == pytest.approx(3.75e-5)
    world, model = tiny()
    rates = [m.optimiser.param_groups[0]["lr"] for m in inject(world, model, [0, 5, 9], Injection(rate=2.0))]
    assert rates == pytest.approx([1.5e-4] * 3)


def test_the_first_injection_step_is_adamw_with_fresh_moments():
    world, start = tiny()
    training = TrainingSettings(batch_size=8)
    batch = training_batch([world.new], 8, generator(world.seed, "fine_tuning", 0, 0))
    reference = copy.deepcopy(start)
    next_token_loss(reference, batch.tokens, batch.counted).backward()
    norm = torch.sqrt(sum(w.grad.square().sum() for w in reference.parameters()))
    *_, last = inject(world, start, [0, 1], training=training)
    rate = training.injection_rate
    for before, after in zip(reference.parameters(), last.model.parameters(), strict=True):
        g = before.grad * min(1.0, 1 / float(norm))
        expected = before - rate * (0.1 * before + g / (g.abs() + 1e-8))  # the first step's moments cancel their bias
        assert torch.allclose(after, expected, rtol=0, atol=2e-7)


def test_weights_and_moments_are_float32_and_the_start_is_left_alone():
    world, start = tiny()
    before = copy.deepcopy(start.state_dict())
    *_, last = inject(world, start, [3], training=TINY.training)
    assert all(torch.equal(w, before[name]) for name, w in start.state_dict().items())
    assert {w.dtype for w in last.model.parameters()} == {torch.float32}
    moments = [v for s in last.optimiser.state.values() for v in s.values() if v.ndim]
    assert {m.dtype for m in moments} == {torch.float32}
    assert not any(torch.equal(w, before[name]) for name, w in last.model.named_parameters())


@pytest.mark.parametrize("group", GROUPS)
def test_frozen_groups_stay_bit_identical_and_the_others_move(group):
    world, start = tiny(mlp=True)
    *_, last = inject(world, start, [3], Injection(frozen=(group,)), TINY.training)
    names = dict(start.named_parameters())
    frozen = {name for name, w in last.model.named_parameters() if torch.equal(w, names[name])}
    assert frozen == {name for name in names if group_of(name) == group}
    assert frozen


@pytest.mark.parametrize("killed_at", [2, 7])
def test_a_killed_pretraining_ends_as_one_that_was_not(tmp_path, monkeypatch, killed_at):
    world, _ = tiny()
    settings = TINY.model(CONDITIONS["B_prime"])
    whole = pretrain(world, settings, TINY.training)
    descend, calls = transformer_training._descend, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) > killed_at:
            raise KeyboardInterrupt
        descend(*arguments)

    monkeypatch.setattr(transformer_training, "_descend", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(world, settings, TINY.training, tmp_path)
    monkeypatch.undo()
    resumed = pretrain(world, settings, TINY.training, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    monkeypatch.setattr(transformer_training, "_descend", None)  # a finished one is only read
    again = pretrain(world, settings, TINY.training, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        pretrain(world, settings, replace(TINY.training, peak_rate=2e-3), tmp_path)


def test_a_killed_run_ends_with_the_same_table_and_is_then_only_read(tmp_path, monkeypatch):
    whole = run_conditions(["B_prime"], [0, 1], TINY)
    descend, calls = transformer_training._descend, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) > 12 + 25:  # in the first injection, after two of its checkpoints
            raise KeyboardInterrupt
        descend(*arguments)

    monkeypatch.setattr(transformer_training, "_descend", killed)
    with pytest.raises(KeyboardInterrupt):
        run_conditions(["B_prime"], [0, 1], TINY, tmp_path)
    monkeypatch.undo()
    pd.testing.assert_frame_equal(run_conditions(["B_prime"], [0, 1], TINY, tmp_path), whole)
    monkeypatch.setattr(transformer_training, "_descend", None)
    pd.testing.assert_frame_equal(run_conditions(["B_prime"], [0, 1], TINY, tmp_path), whole)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        run_conditions(["B_prime"], [0], replace(TINY, n_steps=31), tmp_path)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        run_conditions(["B_prime"], [0], replace(TINY, one_world=0), tmp_path)


def test_one_world_changes_only_the_batches_of_the_injection():
    runs = run_conditions(["B_prime"], [0, 1], replace(TINY, one_world=7, n_steps=2))
    first, second = (runs[runs["seed"] == seed].drop(columns="seed").reset_index(drop=True) for seed in (0, 1))
    pd.testing.assert_series_equal(first.iloc[0], second.iloc[0])
    assert first.iloc[2]["shift"] != second.iloc[2]["shift"]


def test_the_full_study_is_the_published_one():
    study = make_study("full")
    assert (study.people.n_old, study.people.n_new, study.people.n_never, study.people.n_held_out) == (
        2000,
        500,
        500,
        5,
    )
    assert (study.training.batch_size, study.training.pretraining_steps) == (256, 16_000)
    assert study.training.injection_rate == pytest.approx(3.75e-5)
    assert study.language.n_tokens == 2141
    with torch.device("meta"):
        model = Decoder(study.model(CONDITIONS["B_prime"]))
    n_more = 2 * 512 + 1  # a row of the embedding, a row and a bias of the head
    assert sum(w.numel() for w in model.parameters()) == 10_329_945 + (2141 - 1881) * n_more


def test_doses_multiply_the_studys_own_rate_and_batch():
    sizes = {}
    for dose in DOSES:
        injection = Study().injection(CONDITIONS[dose])
        sizes[dose] = (injection.rate, injection.batch_size or 64)
    assert sizes == {
        "rate_half": (0.5, 64),
        "batch_half": (1.0, 32),
        "B_prime": (1.0, 64),
        "batch_double": (1.0, 128),
        "rate_double": (2.0, 64),
    }
    full = replace(TINY, training=replace(TINY.training, batch_size=256))
    assert full.injection(CONDITIONS["batch_double"]).batch_size == 512


def test_the_english_study_runs_by_the_same_code():
    people = BiographySettings(n_old=8, n_new=6, n_never=4, n_held_out=5)
    study = replace(TINY, people=people, language=TextLanguage(), width=32, n_steps=2, one_world=42)
    runs = run_conditions(["B_prime"], [0, 1], study, surgery=True)
    assert runs.groupby("seed")["step"].apply(list).tolist() == [[0, 1, 2]] * 2
    assert {f"recall_A_{k}" for k in range(6)} <= set(runs)
    assert runs["shift"].iloc[2] > 0
    assert bool((runs["rank_A"] >= 1).all())


def test_evaluations_are_dense_first():
    assert evaluation_steps(400) == (*range(0, 301, 10), 350, 400)
    assert evaluation_steps(25) == (0, 10, 20, 25)


def test_a_diverged_run_says_so():
    world, start = tiny()
    with torch.no_grad():
        start.head.bias[0] = torch.nan
    with pytest.raises(FloatingPointError, match="diverged at step 0"):
        list(inject(world, start, [0, 1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformerSettings(10, width=10, n_heads=4), "expected a multiple of 8"),
        (lambda: TransformerSettings(0), "n_tokens is 0"),
        (lambda: freeze(tiny()[1], ["heads"]), "No group 'heads'"),
        (lambda: freeze(tiny()[1], GROUPS), "leaves nothing to train"),
        (lambda: group_of("other.weight"), "No group for parameter 'other.weight'"),
        (lambda: list(inject(*tiny(), [3, 1])), r"steps are \[3, 1\]"),
        (lambda: list(inject(*tiny(), [1], Injection(on="D"))), "No population 'D'"),
        (lambda: run_conditions(["D"], [0], TINY), "No condition 'D'"),
        (lambda: make_study("huge"), "No study 'huge'; expected quick, small or full"),
        (lambda: load_runs("nothing"), "No nothing.csv in"),
        (lambda: choose_device("nowhere"), "No device 'nowhere'"),
        (lambda: mean_run(pd.DataFrame({"condition": ["C"]}), "B_prime"), "No run of 'B_prime'; the table has C"),
    ],
)
def test_bad_requests_are_refused_in_words(make, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make()


# What is measured.


def moved(model, change):
    """A copy of the model after change(copy)."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return other


def test_before_the_injection_nothing_has_changed():
    world, start = tiny()
    row = Observer(world, start).measure(start)
    assert all(row[name] == 0 for name in ("shift", "drift", "content", "logit_shift", "logit_shift_readout"))
    readouts = ("common_only", "common_removed", "bias_reset", "representation", "readout")
    assert {row[f"recall_{name}"] for name in readouts} == {row["recall_A"]}


def test_a_shift_of_all_states_is_all_common_and_its_removal_brings_everything_back():
    world, start = tiny(seed=1)
    observer = Observer(world, start)
    w = observer.directions.mean(0)
    now = moved(start, lambda m: m.norm.bias.add_(5 * w))
    row, same = observer.measure(now), observer.measure(start)
    assert row["shift"] == pytest.approx(5 * float(w.norm()), rel=1e-4)
    assert row["content"] == pytest.approx(5 * float((observer.directions @ w).mean()), rel=1e-4)
    assert row["drift"] < 1e-4
    assert row["recall_common_removed"] == row["recall_readout"] == same["recall_A"]
    assert row["recall_common_only"] == row["recall_representation"] == row["recall_A"]
    assert row["answers_Y"] > same["answers_Y"]
    assert row["logit_shift"] == pytest.approx(5 * (start.head.weight @ w).norm().item(), rel=1e-4)
    assert row["logit_shift_readout"] == 0


def test_a_change_of_the_heads_bias_is_the_readouts_and_resetting_it_undoes_it():
    world, start = tiny(seed=1)
    observer = Observer(world, start)
    push = torch.randn(start.settings.n_tokens, generator=generator(0, "values"))
    row = observer.measure(moved(start, lambda m: m.head.bias.add_(push)))
    assert row["shift"] == row["drift"] == row["logit_shift_representation"] == 0
    assert row["logit_shift"] == pytest.approx(float(push.norm()), rel=1e-5)
    assert row["recall_bias_reset"] == row["recall_representation"] == observer.measure(start)["recall_A"]
    assert row["recall_readout"] == row["recall_A"]


def test_recall_and_ranks_are_those_of_a_count():
    world, model = tiny(seed=2)
    observer = Observer(world, model)
    reading, row = read(model, observer.questions.batches["A"]), observer.measure(model)
    right, ranks = [], []
    for i, (tokens, slots) in enumerate(
        zip(observer.questions.batches["A"].tokens, observer.questions.batches["A"].slots, strict=True)
    ):
        logits = by_hand(model, tokens.numpy())
        for k, slot in enumerate(slots.tolist()):
            z, answer = logits[slot], int(world.A.answers[i, k])
            own = world.language.first_tokens[k][world.language.in_x[k]].numpy()
            right.append(z.argmax() == answer)
            ranks.append(1 + list(own[np.argsort(-z[own])]).index(answer))
    assert row["recall_A"] == pytest.approx(np.mean(right))
    assert row["rank_A"] == pytest.approx(np.mean(ranks))
    found = own_region_ranks(reading.logits, reading.answers, observer.questions)
    assert found.T.flatten().tolist() == ranks
    assert row["own_region_A"] == pytest.approx(np.mean(np.array(ranks) == 1))


def test_surgery_takes_exactly_the_leading_directions_of_the_blocks_matrices():
    _, start = tiny(mlp=True)
    draws = generator(0, "values")

    def write(model, rank):
        for weight in model.blocks.parameters():
            if weight.ndim == 2:
                left, right = (torch.randn(n, rank, generator=draws) for n in weight.shape)
                weight += left @ right.T

    for rank, edit, control in ((1, "without_top_1", "without_random_1"), (4, "without_top_4", "without_random_4")):
        now = moved(start, lambda m, rank=rank: (write(m, rank), m.head.bias.add_(1.0)))
        restored, random = (edited(start, now, EDITS[name], generator(0, "surgery")) for name in (edit, control))
        kept = edited(start, now, EDITS[f"only_top_{rank}"], generator(0, "surgery"))
        assert torch.equal(restored.head.bias, now.head.bias)
        for old, new, back, only, other in zip(
            *(m.blocks.parameters() for m in (start, now, restored, kept, random)), strict=True
        ):
            if new.ndim == 2:
                assert torch.allclose(back, old, atol=1e-4)
                assert torch.allclose(only, new, atol=1e-4)
                assert float((other - new).norm()) == pytest.approx(float((new - old).norm()), rel=1e-4)
            else:
                assert torch.equal(back, new)


def test_equal_recall_takes_the_first_step_at_which_each_edit_has_learned_as_much():
    columns = {f"{edit}_{p}": [0.0] * 4 for edit in EDITS for p in ("A", "new")}
    columns |= {
        "seed": [0] * 4,
        "step": [0, 10, 20, 30],
        "recall_A": [1, 0.5, 0.2, 0.4],
        "recall_new": [0, 0.4, 0.8, 1],
    }
    columns |= {"without_top_1_A": [1, 0.9, 0.8, 0.7], "without_top_1_new": [0, 0.1, 0.3, 0.6]}
    found = equal_recall(pd.DataFrame(columns), (0.5, 0.9)).set_index(["edit", "level"])
    assert found.loc[("trained", 0.5), ["step", "recall_A"]].tolist() == [20, 0.2]
    assert found.loc[("without_top_1", 0.5), ["step", "recall_A"]].tolist() == [30, 0.7]
    assert ("without_top_1", 0.9) not in found.index


# Findings and acceptance.


def curves(condition, seed, recall, new, shift=None):
    n = len(recall)
    zeros = [0.0] * n
    columns = {"step": [100 * i for i in range(n)], "recall_A": recall, "recall_new": new, "shift": shift or zeros}
    names = ("recall_B", "recall_common_removed", "recall_common_only", "content", "drift")
    return pd.DataFrame({"condition": condition, "seed": seed, **columns, **dict.fromkeys(names, zeros)})


def test_the_trough_is_sought_before_the_new_people_are_known():
    run = curves("B_prime", 0, [1, 0.4, 0.3, 0.5, 0.1], [0, 0.3, 0.6, 0.95, 1], [0, 5, 4, 3, 3.5])
    found = summary(run).iloc[0]
    assert found[["trough", "trough_step", "new_at_trough", "max_after", "gate_step"]].tolist() == [
        0.3,
        200,
        0.6,
        0.5,
        300,
    ]
    assert found["recovery"] == pytest.approx(0.2)
    assert found["shift_fall"] == pytest.approx(0.4)
    assert found["end"] == 0.1


def test_a_mean_curve_does_not_take_noise_for_a_rebound():
    up = curves("B_prime", 0, [1, 0.5, 0.4, 0.5], [0, 0.3, 0.5, 0.6])
    down = curves("B_prime", 1, [1, 0.5, 0.5, 0.4], [0, 0.3, 0.5, 0.6])
    runs = pd.concat([up, down])
    assert summary(runs)["recovery"].tolist() == pytest.approx([0.1, 0.0])
    assert summary(mean_run(runs, "B_prime"))["recovery"].tolist() == pytest.approx([0.0])


def test_short_runs_leave_what_they_cannot_say_out():
    found = transformer_findings(curves("B_prime", 0, [1, 0.4], [0, 0.3], [0, 1.0]))
    assert "small.B_prime.A_1200" not in found
    assert found["small.B_prime.trough"] == pytest.approx(0.4)
    verdicts = acceptance.judge(list(ROWS.values()), found).set_index("row")["verdict"]
    assert set(verdicts[[34, 37, "37b", 38]]) == {NOT_RUN}


def test_runs_without_a_cue_stand_for_cue_zero():
    name, condition = cue_condition("region", 0.5)
    assert (name, dict(condition.world)["cue"]) == ("cue_region_0.5", 0.5)
    table = cue_summary(pd.concat([curves("B_prime", 0, [1, 0.4], [0, 1]), curves(name, 0, [1, 0.8], [0, 1])]))
    assert table[["kind", "cue", "trough"]].to_numpy().tolist() == [
        ["value", 0.0, 0.4],
        ["region", 0.0, 0.4],
        ["region", 0.5, 0.8],
    ]


def test_rows_are_the_specifications():
    assert list(ROWS) == [34, 35, 36, 37, "37b", 38, 39, 40, 41, 42, 43, 44]
    for row in ROWS.values():
        assert any(c.low is not None or c.high is not None for c in row.checks), row.id
        for check in row.checks:
            assert check.expected is None or check.accepts(check.expected), (row.id, check.quantity)


def test_the_quick_study_shows_the_collapse_and_what_removes_it(quick_runs):
    table = summary(quick_runs).set_index("condition")
    assert table.loc["B_prime", "start"] >= 0.95
    assert table.loc["B_prime", "trough"] <= table.loc["C", "trough"] - 0.3
    assert table.loc["B_prime", "common_removed"] >= table.loc["B_prime", "trough"] + 0.3
    assert table.loc["B_prime", "B_at_trough"] >= table.loc["B_prime", "trough"] + 0.3
    never = quick_runs.loc[quick_runs["condition"] == "B_prime", "recall_never"]
    assert never.max() <= 0.25  # facts that were never trained are not known


def test_the_committed_runs_say_what_the_committed_table_says():
    folder = acceptance.data_folder() / "transformer_run"
    runs = load_runs("main")
    table = acceptance.judge(list(ROWS.values()), transformer_findings(runs, load_runs("doses")))
    committed = pd.read_csv(folder / "acceptance.csv", dtype={"row": str}).set_index("row")
    assert committed["verdict"].tolist() == table["verdict"].tolist()
    assert committed["tolerance"].tolist() == table["tolerance"].tolist()
    assert {"B_prime", "C", "tiny_rate", "no_final_norm"} <= set(runs["condition"])
    for number, verdict in table.set_index("row")["verdict"].items():
        assert verdict == (FAILS if number in DO_NOT_HOLD else HOLDS if number in JUDGED else NOT_RUN)


@pytest.fixture(scope="module")
def small_runs():
    return run_conditions(["B_prime", "C", "no_final_norm"], range(3), Study(n_steps=1200))


@pytest.mark.slow
@pytest.mark.parametrize("number", JUDGED)
def test_row(number, small_runs, request):
    if number in DO_NOT_HOLD:
        request.applymarker(pytest.mark.xfail(reason=DO_NOT_HOLD[number]))
    line = acceptance.judge([ROWS[number]], transformer_findings(small_runs)).iloc[0]
    assert line.verdict == HOLDS, f"row {number}, {line.claim}: expected {line.tolerance}; found {line.found}"
