"""Checkpoints of a fine-tuning run: recall, decomposition, surgery, verdict, what is on disk, and bad input."""

import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import torch
from spurious_example import small_example
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from psd_utils import checkpoint_members
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.pairs import Member
from psd_utils.spurious import surgery, verdict
from psd_utils.spurious.checkpoints import Checkpoint, CheckpointSettings, parse_ranks, study_checkpoints
from psd_utils.spurious.decomposition import decompose, others_mean, relation_groups
from psd_utils.spurious.example import Example
from psd_utils.spurious.prompts import Fact, Prompts, check_disjoint, encode_facts, read_facts
from psd_utils.spurious.recall import measure_recall, readout
from psd_utils.spurious.shift import split_change

pytestmark = pytest.mark.usefixtures("single_thread")
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "06_checkpoints.ipynb"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, single_thread: None) -> Example:
    return small_example(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def words(example: Example) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(example.base)


def checkpoint(example: Example, step: int) -> Any:
    return LlamaForCausalLM.from_pretrained(example.checkpoints / f"checkpoint-{step}")


def with_longer_answers(facts: tuple[Fact, ...]) -> list[Fact]:
    """Answers of one to three tokens; what follows a value is guessed right by some models only."""
    tails = ("", " .", " . works")
    return [Fact(f.prompt, f.answer + tails[i % 3], f.relation) for i, f in enumerate(facts)]


@pytest.fixture(scope="module")
def asked(example: Example, words: Any) -> Prompts:
    return encode_facts(with_longer_answers(read_facts(example.old)), words, "old")


# ---- recall


def test_exact_recall_is_what_greedy_generation_writes(example: Example, asked: Prompts) -> None:
    model = checkpoint(example, 20)
    found = measure_recall(model, asked, batch_size=7)
    written = []
    for prompt, answer in zip(asked.prompt_ids, asked.answer_ids, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer), do_sample=False, eos_token_id=None
        )
        written.append(tuple(out[0, len(prompt) :].tolist()))
    np.testing.assert_array_equal(found.exact, [w == a for w, a in zip(written, asked.answer_ids, strict=True)])
    np.testing.assert_array_equal(found.first, [w[0] == a[0] for w, a in zip(written, asked.answer_ids, strict=True)])
    assert 0 < found.exact.mean() < found.first.mean() < 1


def test_log_probabilities_states_and_choices_agree_with_a_float64_pass_over_each_fact(
    example: Example, asked: Prompts
) -> None:
    found = measure_recall(checkpoint(example, 20), asked)
    exact = checkpoint(example, 20).double()
    for i, (prompt, answer) in enumerate(zip(asked.prompt_ids, asked.answer_ids, strict=True)):
        with torch.no_grad():
            out = exact(input_ids=torch.tensor([prompt + answer]), output_hidden_states=True)
        at = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
        own = out.logits[0, at].log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].sum()
        assert math.isclose(found.log_prob[i], float(own), abs_tol=1e-4)
        torch.testing.assert_close(found.states[i].double(), out.hidden_states[-1][0, at[0]], rtol=1e-4, atol=1e-4)
        pool = {
            a[0] for a, f in zip(asked.answer_ids, asked.facts, strict=True) if f.relation == asked.facts[i].relation
        }
        scores = {float(out.logits[0, at[0], token]): token for token in pool}
        best = scores[max(scores)]
        assert found.choice[i] == (best == answer[0])
    assert found.log_prob_per_token == pytest.approx(found.log_prob.sum() / sum(map(len, asked.answer_ids)))


def test_measuring_leaves_the_model_as_it_was(example: Example, asked: Prompts) -> None:
    model = checkpoint(example, 20).train()
    model.model.layers[0].eval()
    before, state = [m.training for m in model.modules()], torch.get_rng_state()
    measure_recall(model, asked)
    assert [m.training for m in model.modules()] == before
    torch.testing.assert_close(torch.get_rng_state(), state)
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[1, 5, 6]])).logits.shape[1] == 3


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("olmo2", False), ("gemma2", True)])
def test_other_architectures_are_read_as_they_predict(
    architecture: str, tied: bool, make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    model = make_model(tmp_path, architecture, tied=tied, spread=0.3)
    names = sorted(t[1:] for t in tokenizer.get_vocab() if t.startswith("Ġ") and len(t) > 2)[:12]
    facts = [Fact("the " + " ".join(names[: 1 + i % 3]), names[-1 - i]) for i in range(3)]
    asked = encode_facts(facts, tokenizer, "old")
    found = measure_recall(model, asked)
    for i, (prompt, answer) in enumerate(zip(asked.prompt_ids, asked.answer_ids, strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].double()
        at = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
        own = logits[at].log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].sum()
        assert math.isclose(found.log_prob[i], float(own), abs_tol=1e-3)
        # a head's own scaling and soft-capping keep the order of its logits
        assert int(readout(model, found.states[i : i + 1]).argmax()) == int(logits[at[0]].argmax())
    assert not any("embed" in name or "lm_head" in name for name in surgery.block_matrices(model))


# ---- decomposition


def test_parts_agree_with_direct_numpy(example: Example, words: Any) -> None:
    asked = encode_facts(read_facts(example.old), words, "old")
    model = checkpoint(example, 40)
    before = measure_recall(LlamaForCausalLM.from_pretrained(example.base), asked).states
    after = measure_recall(model, asked).states
    table = decompose(model, before, after, asked).set_index(["means", "relation"])
    x, y = before.double().numpy(), after.double().numpy()
    head = model.lm_head.weight.detach().double().numpy()
    answers = np.array([a[0] for a in asked.answer_ids])
    relations = np.array([f.relation for f in asked.facts])
    removed, common, individual = [], [], []
    for i, relation in enumerate(relations):
        same = relations == relation
        mean = (y - x)[same].mean(0)
        others = same & (np.arange(len(x)) != i)
        removed.append((head @ (y[i] - (y - x)[others].mean(0))).argmax() == answers[i])
        common.append((mean**2).sum())
        individual.append(((y[i] - x[i] - mean) ** 2).sum())
    row = table.loc["relation", "(all)"]
    assert row["common"] == pytest.approx(np.sqrt(np.mean(common)), rel=1e-6)
    assert row["individual"] == pytest.approx(np.sqrt(np.mean(individual)), rel=1e-6)
    assert row["common_removed"] == pytest.approx(np.mean(removed))
    assert row["trained"] == pytest.approx(np.mean((y @ head.T).argmax(1) == answers))
    home = table.loc["relation", "home"]
    assert home["common_removed"] == pytest.approx(np.mean(np.array(removed)[relations == "home"]))
    one = table.loc["one", "(all)"]
    assert one["common"] == pytest.approx(np.linalg.norm((y - x).mean(0)), rel=1e-6)
    total = ((y - x) ** 2).sum(1).mean()
    for means in ("one", "relation"):
        whole = table.loc[means, "(all)"]
        assert whole["common"] ** 2 + whole["individual"] ** 2 == pytest.approx(total, rel=1e-6)


def test_a_fact_cannot_restore_itself(example: Example, words: Any) -> None:
    few = encode_facts(read_facts(example.old)[:3], words, "old")
    base, model = LlamaForCausalLM.from_pretrained(example.base), checkpoint(example, 10)
    before = measure_recall(base, few).states
    # three facts pushed far away, each in its own direction: nothing is shared
    away = 300 * torch.eye(3, before.shape[1])
    row = decompose(model, before, before + away, few).set_index(["means", "relation"]).loc["one", "(all)"]
    head = model.lm_head.weight.detach().double()
    others = (away.sum(0) - away) / 2
    told = [int((head @ (before + away - others)[i].double()).argmax()) for i in range(3)]
    expected = np.mean([t == a[0] for t, a in zip(told, few.answer_ids, strict=True)])
    assert row["common_removed"] == expected < 1
    alone = decompose(model, before[:1], (before + away)[:1], encode_facts(few.facts[:1], words, "old"))
    assert alone.set_index("means").loc["one", "common_removed"] < 1


def test_a_facts_own_change_is_not_in_the_mean_taken_from_it() -> None:
    draws = torch.Generator().manual_seed(0)
    change = torch.randn(4, 5, generator=draws, dtype=torch.float64)
    split = split_change(torch.zeros_like(change), change, torch.tensor([0, 0, 0, 1]))
    mean = others_mean(split)
    torch.testing.assert_close(mean[0], (change[1] + change[2]) / 2)
    torch.testing.assert_close(mean[3], torch.zeros_like(mean[3]))


def test_small_relations_share_a_mean_and_a_single_fact_joins_the_largest(words: Any, example: Example) -> None:
    facts = read_facts(example.old)
    few = encode_facts([*facts[:2], *facts[4:40:2]], words, "old")
    groups, names = relation_groups(few, least=15)
    assert names == ("home",)
    assert groups.tolist() == [0] * 20
    groups, names = relation_groups(encode_facts(facts[:8], words, "old"), least=15)
    assert names == ("(small relations)",)


# ---- surgery


def numpy_without_top(base: torch.Tensor, tuned: torch.Tensor, rank: int) -> np.ndarray:
    w0, w1 = base.double().numpy(), tuned.double().numpy()
    u, s, vt = np.linalg.svd(w1 - w0)
    return w1 - (u[:, :rank] * s[:rank]) @ vt[:rank]


@pytest.mark.parametrize("rank", [1, 4])
def test_surgery_agrees_with_numpy_and_is_undone_bit_for_bit(example: Example, rank: int) -> None:
    base = surgery.block_matrices(LlamaForCausalLM.from_pretrained(example.base))
    model = checkpoint(example, 40)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts = surgery.leading_parts(base, model, 4)
    assert len(parts) == 14
    assert not any("embed" in name or "lm_head" in name for name in parts)
    with surgery.edited(model, parts, surgery.Edit("remove", rank)):
        for name, p in model.named_parameters():
            wanted = numpy_without_top(base[name], trained[name], rank) if name in parts else trained[name].double()
            np.testing.assert_allclose(p.detach().double(), wanted, atol=2e-6)
    with surgery.edited(model, parts, surgery.Edit("random", rank), seed=3):
        for name in parts:
            taken = (trained[name] - model.get_parameter(name).detach()).double().numpy()
            values = np.linalg.svd(taken, compute_uv=False)
            assert np.linalg.norm(taken) == pytest.approx(float(parts[name].values[:rank].norm()), rel=1e-3)
            assert values[rank] < 1e-4 * values[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, trained[name])


def test_leading_part_of_a_large_matrix_agrees_with_the_full_decomposition() -> None:
    draws = np.random.default_rng(0)
    change = draws.standard_normal((600, 700)).astype(np.float32)
    change += 40 * np.outer(draws.standard_normal(600), draws.standard_normal(700)).astype(np.float32)
    part = surgery.leading_part(torch.from_numpy(change), 3)
    u, s, vt = np.linalg.svd(change.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(part.values, s[:3], rtol=1e-4)
    np.testing.assert_allclose(part.share, s[:3] ** 2 / (s**2).sum(), rtol=1e-4)
    difference = part.matrix.double().numpy() - (u[:, :3] * s[:3]) @ vt[:3]
    assert np.linalg.norm(difference) < 1e-3 * s[2]
    assert not surgery.leading_part(torch.zeros(600, 700), 2).matrix.any()


# ---- equal recall and the rule


def curves(rows: list[tuple[str, int, str, float, float]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["checkpoint", "step", "edit", "new", "old"])


def test_a_rewind_gains_nothing_at_equal_new_recall() -> None:
    path = [("base", 0, "trained", 0.0, 1.0), ("a", 1, "trained", 0.2, 0.6), ("b", 2, "trained", 0.4, 0.2)]
    between = [(label, step, "remove_1", n, 1 - 2 * n) for label, step, n in (("a", 1, 0.05), ("b", 2, 0.3))]
    found = verdict.equal_recall(curves([*path, *between]))
    np.testing.assert_allclose(found["gain"], 0, atol=1e-12)
    assert not found["coarse"].any()
    better = verdict.equal_recall(curves([*path, ("b", 2, "remove_1", 0.3, 0.9)])).iloc[0]
    assert better["old_trained"] == pytest.approx(0.4)
    assert better["gain"] == pytest.approx(0.5)


def test_where_new_facts_stay_known_the_comparison_is_at_the_same_step() -> None:
    path = [("base", 0, "trained", 0.0, 1.0), ("a", 1, "trained", 1.0, 0.6), ("b", 2, "trained", 1.0, 0.2)]
    found = verdict.equal_recall(curves([*path, ("b", 2, "remove_1", 1.0, 0.3), ("a", 1, "remove_1", 0.5, 0.9)]))
    assert found["old_trained"].tolist() == pytest.approx([0.2, 0.8])
    assert found["coarse"].tolist() == [False, True]
    beyond = verdict.equal_recall(curves([*path[:1], ("a", 1, "trained", 0.2, 0.6), ("a", 1, "remove_1", 0.5, 1.0)]))
    assert math.isnan(beyond["gain"].iloc[0])
    assert beyond["coarse"].iloc[0]


def test_a_removal_counts_only_beside_its_random_control() -> None:
    path = [("base", 0, "trained", 0.0, 1.0), ("a", 1, "trained", 0.2, 0.6), ("b", 2, "trained", 0.4, 0.2)]
    removed, control = ("b", 2, "remove_1", 0.3, 0.9), ("b", 2, "random_1", 0.3, 0.5)
    beside = verdict._best_edit(verdict.equal_recall(curves([*path, removed, control])), 1.0, verdict.RULE)
    assert (beside["edit"], beside["edit_gain"]) == ("remove_1", pytest.approx(0.5))
    assert beside["control_gain"] == pytest.approx(0.1)
    out_of_reach = ("b", 2, "random_1", 0.5, 0.5)
    alone = verdict._best_edit(verdict.equal_recall(curves([*path, removed, out_of_reach])), 1.0, verdict.RULE)
    assert alone["edit"] is None


EVIDENCE = {
    "facts": 100, "known": 1.0, "now": 0.4, "loss": 0.6, "loss_se": 0.05, "choice_known": 1.0, "choice_now": 0.9,
    "new_now": 0.8, "removed_one": 0.5, "removed_relation": 0.5, "edit": None, "edit_gain": math.nan,
    "control_gain": math.nan, "edit_loss": math.nan,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({}, verdict.EROSION, "at most 17% of the loss comes back"),
        (
            {"removed_relation": 0.9},
            verdict.HIDDEN,
            "83% of the loss comes back when the mean change of the other facts of",
        ),
        (
            {"removed_one": 0.75},
            verdict.HIDDEN,
            "58% of the loss comes back when the mean change of the other facts is",
        ),
        (
            {"edit": "remove_4", "edit_gain": 0.4, "control_gain": 0.0, "edit_loss": 0.5},
            verdict.HIDDEN,
            "top 4 direction",
        ),
        ({"edit": "remove_4", "edit_gain": 0.4, "control_gain": 0.3, "edit_loss": 0.5}, verdict.EROSION, "20%"),
        ({"removed_one": 0.3, "removed_relation": 0.2}, verdict.EROSION, "at most 0%"),
        ({"loss": 0.05, "now": 0.95}, verdict.NEITHER, "below 0.1 or two standard errors"),
        ({"loss_se": 0.4, "removed_one": 1.0}, verdict.NEITHER, "a loss of 0.60 ± 0.40"),
        ({"facts": 14, "removed_one": 1.0}, verdict.NEITHER, "too few for a verdict (at least 15 are needed)"),
        ({"known": 0.3}, verdict.NEITHER, "the base knows too few"),
        ({"choice_now": math.nan}, verdict.EROSION, "is subtracted from each state."),
    ],
)
def test_the_rule_says_what_its_statement_says(change: dict[str, Any], name: str, words: str) -> None:
    found = verdict.judge(EVIDENCE | change)
    assert found.name == name
    assert words in found.sentence
    assert found.sentence.startswith(name)


def test_rebound_is_the_largest_later_rise() -> None:
    assert verdict.rebound(np.array([0, 5, 9, 20]), np.array([1.0, 0.2, 0.5, 0.1])) == (5, pytest.approx(0.3))
    assert verdict.rebound(np.array([0, 5]), np.array([1.0, 0.2]))[1] == 0


# ---- the study


class Counting:
    """Loads models of the example, counts how often, and checks that none is alive when the next is loaded."""

    def __init__(self, example: Example) -> None:
        self.example, self.loads = example, []
        self.alive: weakref.ref[Any] | None = None

    def source(self, folder: Path, label: str, step: int) -> Checkpoint:
        def load() -> tuple[Any, Any]:
            assert self.alive is None or self.alive() is None
            model = LlamaForCausalLM.from_pretrained(folder)
            self.loads.append(label)
            self.alive = weakref.ref(model)
            return model, PreTrainedTokenizerFast.from_pretrained(folder)

        return Checkpoint(label, step, f"{label} of the example", load)

    def study(self, out: Path, steps: tuple[int, ...] = (10, 20, 40, 80), **settings: Any) -> Any:
        base = self.source(self.example.base, "base", 0)
        runs = [self.source(self.example.checkpoints / f"checkpoint-{s}", f"at-{s}", s) for s in steps]
        old, new = read_facts(self.example.old), read_facts(self.example.new)
        return study_checkpoints(base, runs, old, new, out, CheckpointSettings(**settings))


@pytest.fixture(scope="module")
def studied(example: Example, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("study")
    return Counting(example).study(out), out


def test_the_example_collapses_and_is_judged_so(studied: tuple[Any, Path], example: Example, words: Any) -> None:
    report, _ = studied
    assert report.verdicts["at-20"].name == verdict.HIDDEN
    old = encode_facts(read_facts(example.old), words, "old")
    curve = report.recall.query("edit == 'trained' and set == 'old' and relation == '(all)'").set_index("checkpoint")
    for label, folder in (("base", example.base), ("at-40", example.checkpoints / "checkpoint-40")):
        direct = measure_recall(LlamaForCausalLM.from_pretrained(folder), old, batch_size=5)
        assert curve.loc[label, "exact"] == direct.exact.mean()
        assert curve.loc[label, "log_prob_per_token"] == pytest.approx(direct.log_prob_per_token, abs=1e-4)
    assert curve.loc["base", "first"] > 0.95
    assert curve["first"].min() < 0.6
    edits = {"trained", "remove_1", "random_1", "remove_4", "random_4"}
    assert set(report.facts.loc[report.facts["checkpoint"] == "at-20", "edit"]) == edits
    summary = json.loads((report.path / "summary.json").read_text())
    assert summary["sentence"].startswith("at-80: ")
    assert summary["verdicts"]["at-20"]["evidence"]["known"] == curve.loc["base", "first"]


def test_a_finished_checkpoint_is_not_measured_again(
    studied: tuple[Any, Path], example: Example, tmp_path: Path
) -> None:
    first, out = studied
    folder = tmp_path / "resumed"
    shutil.copytree(out, folder)
    again = Counting(example)
    pd.testing.assert_frame_equal(again.study(folder).facts, first.facts)
    assert again.loads == []
    # as if killed before the last was finished
    (next((folder / "measured").glob("at-80-*")) / "done.json").unlink()
    resumed = Counting(example)
    pd.testing.assert_frame_equal(resumed.study(folder).facts, first.facts)
    assert resumed.loads == ["base", "at-80"]
    other = Counting(example)
    other.study(folder, steps=(10,), ranks=(2,))
    assert other.loads == ["base", "at-10"]


def test_damaged_measurements_are_named(studied: tuple[Any, Path], example: Example, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(studied[1], folder)
    part = next((folder / "measured").glob("at-80-*"))
    (part / "facts.parquet").unlink()
    with pytest.raises(ValueError, match=r"at-80-\w+ is damaged .*Delete this folder"):
        Counting(example).study(folder)
    shutil.rmtree(part)
    states = next((folder / "measured").glob("base-*")) / "states.safetensors"
    states.write_bytes(states.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"base-\w+ is damaged"):
        Counting(example).study(folder)
    with pytest.raises(ValueError, match="cannot be written"):
        Counting(example).study(states)


def test_facts_without_relations_and_a_run_without_surgery(example: Example, tmp_path: Path) -> None:
    counting = Counting(example)
    base = counting.source(example.base, "base", 0)
    run = [counting.source(example.checkpoints / f"checkpoint-{s}", f"at-{s}", s) for s in (20,)]
    old, new = ([Fact(f.prompt, f.answer) for f in read_facts(p)] for p in (example.old, example.new))
    report = study_checkpoints(base, run, old, new, tmp_path, CheckpointSettings(ranks=()))
    assert set(report.facts["edit"]) == {"trained"}
    assert len(report.equal) == 0
    assert report.shift["step"].dtype == np.int64
    part = report.shift[(report.shift["set"] == "old") & (report.shift["checkpoint"] == "at-20")]
    by_means = part.set_index("means")[["common", "individual", "common_removed"]]
    assert by_means.loc["one"].tolist() == by_means.loc["relation"].tolist()
    assert report.verdicts["at-20"].evidence["edit"] is None
    assert json.loads((tmp_path / "summary.json").read_text())["verdicts"]["at-20"]["evidence"]["edit_gain"] is None


# ---- lists of checkpoints, adapters, loading


def test_a_run_is_listed_in_order_with_its_steps(example: Example, tmp_path: Path, monkeypatch: Any) -> None:
    base = Member(str(example.base))
    every = checkpoint_members.run_members(str(example.checkpoints), base)
    assert [(one.label, one.step) for one in every] == [(f"checkpoint-{s}", s) for s in (10, 20, 40, 80)]
    some = checkpoint_members.run_members(f"{example.checkpoints}/checkpoint-?0, {example.adapters}/*", base)
    assert [one.step for one in some] == [1, 2, 3, 4, 5]
    assert some[4].member == Member(str(example.base), adapter=str(example.adapters / "checkpoint-20"))
    assert some[4].label == "adapters/checkpoint-20"
    hub = checkpoint_members.run_members("org/name@step100,\norg/name@step200, adapter:org/lora-300", base)
    assert [(one.step, one.member.model, one.member.revision) for one in hub[:2]] == [
        (100, "org/name", "step100"),
        (200, "org/name", "step200"),
    ]
    assert hub[2].member.adapter == "org/lora-300"


def test_an_adapter_is_measured_as_peft_itself_predicts(example: Example, asked: Prompts) -> None:
    from peft import PeftModel

    device = choose_device("cpu", "float32")
    run = checkpoint_members.run_members(str(example.adapters), Member(str(example.base)))
    (source,) = checkpoint_members.located(run)
    model, tokenizer = checkpoint_members.loader(source, device)()
    adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(example.base), str(source.adapter_folder))
    ours, theirs = (measure_recall(m, asked) for m in (model, adapted))
    np.testing.assert_allclose(ours.log_prob, theirs.log_prob, atol=1e-3)
    assert tokenizer is not None
    base = measure_recall(LlamaForCausalLM.from_pretrained(example.base), asked)
    assert np.abs(ours.log_prob - base.log_prob).max() > 0.1


# ---- bad input


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a b", "answer": "c"}', "{"], r"facts.jsonl, line 2: not valid JSON"),
        (['{"prompt": "a \\ud800 b", "answer": "c"}'], r"facts.jsonl, line 1: half a surrogate pair"),
        (["[" * 100_000], r"facts.jsonl, line 1: brackets within brackets"),
        (['["a"]'], "line 1: expected an object with prompt and answer, found list"),
        (['{"prompt": "a", "answer": "c", "relations": "x"}'], "unknown key 'relations'"),
        (['{"prompt": "a", "answer": ""}'], "line 1: answer must be text"),
        (['{"prompt": "a"}'], "line 1: answer must be text"),
        (['{"prompt": "a", "answer": "b", "relation": 3}'], "relation must be text"),
        (['{"prompt": "a", "answer": "b", "candidates": "c"}'], "candidates must be a list"),
        (
            ['{"prompt": "a", "answer": "b"}', "", '{"prompt": "a", "answer": "c"}'],
            "line 3: the prompt 'a' stands in line 1",
        ),
        (
            ['{"prompt": "a", "answer": "b", "relation": "r"}', '{"prompt": "d", "answer": "b"}'],
            "1 facts have a relation and 1 have none",
        ),
        ([""], "holds no facts"),
    ],
)
def test_a_bad_file_of_facts_is_refused_by_line(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_facts(path)


def test_a_text_may_hold_other_line_breaks_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(
        '{"prompt": "a\u2028b\x85", "answer": "c"}\r\n{"prompt": "b", "answer": "d"}\r\n', encoding="utf-8-sig"
    )
    assert [fact.prompt for fact in read_facts(path)] == ["a\u2028b\x85", "b"]


def test_answers_that_all_begin_with_one_token_are_refused(tokenizer: Any) -> None:
    facts = [Fact("the", "\u2605 one"), Fact("a", "\u2605 two")]
    with pytest.raises(ValueError, match="2 different answers of the old facts all begin with the token"):
        encode_facts(facts, tokenizer, "old")
    assert len(encode_facts([Fact("the", "one"), Fact("a", "one")], tokenizer, "old")) == 2


def test_prompts_keep_what_the_tokenizer_puts_before_a_text(words: Any, tokenizer: Any, example: Example) -> None:
    facts = read_facts(example.old)[:3]
    asked = encode_facts(facts, words, "old")
    for fact, prompt, answer in zip(facts, asked.prompt_ids, asked.answer_ids, strict=True):
        assert list(prompt) == words(fact.prompt)["input_ids"]
        assert prompt[0] == words.bos_token_id
        assert words.decode(answer) == fact.answer
    a, b = [t[1:] for t in tokenizer.get_vocab() if t.startswith("Ġ") and len(t) > 2][:2]
    named = encode_facts([Fact("the", a, candidates=(b, a))], tokenizer, "old")
    assert named.rivals == ((tokenizer(" " + b).input_ids[0],),)
    same = encode_facts([Fact(f.prompt, f.answer, "r", (f.answer,)) for f in facts], words, "old")
    assert same.rivals == ((), (), ())


def test_facts_that_cannot_be_asked_for_are_refused(words: Any, tokenizer: Any, caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"There are no old facts"):
        encode_facts([], words, "old")
    with pytest.raises(ValueError, match="does not know a word of the answer"):
        encode_facts([Fact("lives in", "Atlantis")], words, "old")
    with pytest.raises(ValueError, match="the model reads 3"):
        encode_facts([Fact("lives in", ". .")], words, "old", longest=3)
    # pieces of words, with their space: a prompt that ends in a space takes it from the answer
    piece = next(t[1:] for t in tokenizer.get_vocab() if t.startswith("Ġ") and len(t) > 2)
    assert encode_facts([Fact("the", piece)], tokenizer, "old").answer_ids == (tuple(tokenizer(" " + piece).input_ids),)
    with pytest.raises(ValueError, match="the answer does not begin at a token of its own"):
        encode_facts([Fact("the ", piece)], tokenizer, "old")
    with pytest.raises(ValueError, match="1 prompts are among the old and the new facts, such as 'a'"):
        check_disjoint([Fact("a", "b")], [Fact("a", "c")])
    check_disjoint([Fact("a", "b", "r")], [Fact("d", "c")])
    assert "The new facts have no relations" in caplog.text
    with pytest.raises(ValueError, match="cannot be read"):
        read_facts("nowhere.jsonl")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def with_nan(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    return model


def narrower(model: Any) -> Any:
    config = model.config
    config.intermediate_size = 32
    return LlamaForCausalLM(config)


def longer_vocabulary(model: Any) -> Any:
    model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)
    return model


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_nan, r"bad: the weight model.layers.1.mlp.up_proj.weight holds NaN"),
        (
            narrower,
            r"bad does not have the base's architecture: model.layers.0.mlp.down_proj.weight is \(64, 32\) here",
        ),
        (longer_vocabulary, r"bad does not have the base's architecture: lm_head.weight is"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(
    spoil: Callable[[Any], Any], message: str, example: Example, tmp_path: Path
) -> None:
    base = Counting(example).source(example.base, "base", 0)
    bad = Checkpoint("bad", 1, "bad", lambda: (spoil(LlamaForCausalLM.from_pretrained(example.base)), None))
    old, new = read_facts(example.old), read_facts(example.new)
    with pytest.raises(ValueError, match=message):
        study_checkpoints(base, [bad], old, new, tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_other_tokenizers_labels_and_steps_are_refused(example: Example, words: Any, tmp_path: Path) -> None:
    old, new = read_facts(example.old), read_facts(example.new)
    counting = Counting(example)
    base = counting.source(example.base, "base", 0)
    vocabulary = json.loads(words.backend_tokenizer.to_str())
    ids = vocabulary["model"]["vocab"]
    a, b = "lives", "works"
    ids[a], ids[b] = ids[b], ids[a]
    other = PreTrainedTokenizerFast(tokenizer_object=type(words.backend_tokenizer).from_str(json.dumps(vocabulary)))
    swapped = Checkpoint("swapped", 1, "s", lambda: (LlamaForCausalLM.from_pretrained(example.base), other))
    with pytest.raises(ValueError, match="swapped: its tokenizer reads the old facts otherwise"):
        study_checkpoints(base, [swapped], old, new, tmp_path)
    with pytest.raises(ValueError, match="There are no checkpoints"):
        study_checkpoints(base, [], old, new, tmp_path)
    with pytest.raises(ValueError, match="'base' is taken twice"):
        study_checkpoints(base, [counting.source(example.base, "base", 1)], old, new, tmp_path)
    with pytest.raises(ValueError, match="Steps must rise from 0"):
        study_checkpoints(base, [counting.source(example.base, "x", 0)], old, new, tmp_path)


def test_lists_that_name_nothing_are_refused(example: Example, tmp_path: Path) -> None:
    base = Member(str(example.base))
    for text, message in (
        (" , ", "no checkpoints are named"),
        (f"{tmp_path}/none-*", "no folder matches"),
        (str(tmp_path), "holds no model"),
        (f"{tmp_path}/missing", "there is no folder"),
    ):
        with pytest.raises(PsdError, match=message):
            checkpoint_members.run_members(text, base)
    with pytest.raises(PsdError, match="needs all weights on one device"):
        checkpoint_members.loader(checkpoint_members.locate(base), choose_device("spread", "float32"))
    with pytest.raises(PsdError, match="not given: new"):
        checkpoint_members.require({"checkpoints": "a", "old": "b", "new": None}, "checkpoints", "old", "new")
    with pytest.raises(ValueError, match="ranks must be whole numbers"):
        parse_ranks("one")
    assert parse_ranks("0") == ()
    assert parse_ranks("1, 4") == (1, 4)
    with pytest.raises(ValueError, match="ranks must be whole numbers of at least 1"):
        CheckpointSettings(ranks=(0, 1))


# ---- the notebook


def test_the_notebook_runs_on_a_run_with_an_adapter(example: Example, tmp_path: Path) -> None:
    given = {
        "base": str(example.base),
        "checkpoints": f"{example.checkpoints}/checkpoint-40, {example.adapters}",
        "old": str(example.old),
        "new": str(example.new),
        "text": str(example.text),
        "ranks": "1",
        "top_k": 20,
        "n_resamples": 200,
        "n_damage_seeds": 0,
        "out_dir": str(tmp_path / "out"),
    }
    done = papermill.execute_notebook(NOTEBOOK, tmp_path / "out.ipynb", given, progress_bar=False, cwd=str(tmp_path))
    outputs = [o for cell in done.cells if cell.cell_type == "code" for o in cell.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 6
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["report"][0] == summary["sentence"]
    assert "nats/token gap" in summary["report"][1]
    assert summary["verdicts"]["checkpoint-40"]["verdict"] == verdict.HIDDEN
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {f"{t}.parquet" for t in ("facts", "recall", "shift", "updates", "equal_recall")} <= names
    assert {"recall.png", "parts.png", "surgery.png"} <= names
    nbformat.validate(done)


@pytest.mark.slow
def test_the_default_notebook_makes_its_example_and_sees_the_collapse(root: Path, tmp_path: Path) -> None:
    done = papermill.execute_notebook(NOTEBOOK, tmp_path / "out.ipynb", {}, progress_bar=False, cwd=str(tmp_path))
    out = root / "data" / "results" / "checkpoints-base"
    recall = pd.read_parquet(out / "recall.parquet").query("edit == 'trained' and set == 'old' and relation == '(all)'")
    first = recall.set_index("step")["first"]
    assert first[0] > 0.97
    assert first[80] < 0.65
    equal = pd.read_parquet(out / "equal_recall.parquet").set_index(["step", "edit"])["gain"]
    assert equal[100, "remove_4"] > 0.2
    assert abs(equal[100, "random_4"]) < 0.1
    verdicts = json.loads((out / "summary.json").read_text())["verdicts"]
    assert verdicts["checkpoint-100"]["verdict"] == verdict.HIDDEN
    outputs = [o for cell in done.cells if cell.cell_type == "code" for o in cell.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 6
