"""The callback: training unchanged bit for bit, a log that survives a kill, and a rule with measured errors."""

import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from spurious_example import SMALL_EXAMPLE, small_example
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from psd_utils.spurious.alarm import COLLAPSE, EROSION, RULE, AlarmRule, judge_log, judge_run
from psd_utils.spurious.alarm_errors import CALIBRATION_SEEDS, choose_rule, judged
from psd_utils.spurious.callback import ForgettingCallback, read_log
from psd_utils.spurious.decomposition import decompose
from psd_utils.spurious.example import Example, documents, make_people
from psd_utils.spurious.prompts import encode_facts, read_facts
from psd_utils.spurious.recall import measure_recall

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, single_thread: None) -> Example:
    return small_example(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def words(example: Example) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(example.base)


class NewPeople(Dataset[dict[str, torch.Tensor]]):
    """Texts about the example's new people, as a user would give them to a Trainer."""

    def __init__(self, words: Any) -> None:
        draws = torch.Generator().manual_seed(SMALL_EXAMPLE.seed)
        people = make_people(SMALL_EXAMPLE, draws)
        new = range(2 * SMALL_EXAMPLE.n_old, len(people.names))
        texts = [t for _ in range(20) for t in documents(people, new, draws)]
        self.ids = torch.tensor(words(texts)["input_ids"])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Killed(Exception):
    """Stands for a kill."""


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def trainer(example: Example, words: Any, out: Path, callbacks: list[TrainerCallback], steps: int = 24) -> Trainer:
    model = LlamaForCausalLM.from_pretrained(example.base, attention_dropout=0.2)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        save_steps=8,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        logging_strategy="no",
    )
    return Trainer(model=model, args=arguments, train_dataset=NewPeople(words), callbacks=callbacks)


def watcher(example: Example, words: Any, path: Path, **given: Any) -> ForgettingCallback:
    return ForgettingCallback(read_facts(example.old), words, path, **{"every": 4, **given})


@pytest.fixture(scope="module")
def watched(example: Example, words: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path, Any]:
    """A finished run with a callback, its folder, and the random state it ended with."""
    folder = tmp_path_factory.mktemp("watched")
    run = trainer(example, words, folder, [watcher(example, words, folder / "log.jsonl", new=read_facts(example.new))])
    run.train()
    return run, folder, torch.get_rng_state()


def test_training_is_unchanged_bit_for_bit(
    watched: tuple[Trainer, Path, Any], example: Example, words: Any, tmp_path: Path
) -> None:
    plain = trainer(example, words, tmp_path, [])
    plain.train()
    assert torch.equal(torch.get_rng_state(), watched[2])
    for (name, alone), (_, seen) in zip(
        plain.model.named_parameters(), watched[0].model.named_parameters(), strict=True
    ):
        assert torch.equal(alone, seen), name
    assert plain.model.training == watched[0].model.training


def test_the_log_says_what_its_checkpoints_say(
    watched: tuple[Trainer, Path, Any], example: Example, words: Any
) -> None:
    log = read_log(watched[1] / "log.jsonl").set_index("step")
    assert log.index.tolist() == list(range(0, 25, 4))
    asked = encode_facts(read_facts(example.old), words, "old")
    before = measure_recall(LlamaForCausalLM.from_pretrained(example.base), asked)
    assert log.loc[0, "old_exact"] == before.exact.mean()
    assert log.loc[0, ["common", "individual"]].tolist() == [0, 0]
    for step in (8, 24):
        model = LlamaForCausalLM.from_pretrained(watched[1] / f"checkpoint-{step}")
        now = measure_recall(model, asked, batch_size=3)
        change = (now.states - before.states).double().numpy()
        relations = np.array([f.relation for f in asked.facts])
        means = np.stack([change[relations == r].mean(0) for r in relations])
        assert log.loc[step, "common"] == pytest.approx(np.sqrt((means**2).sum(1).mean()), rel=1e-4)
        assert log.loc[step, "individual"] == pytest.approx(np.sqrt(((change - means) ** 2).sum(1).mean()), rel=1e-4)
        assert log.loc[step, "old"] == now.first.mean()
        whole = decompose(model, before.states, now.states, asked).set_index(["means", "relation"])
        assert log.loc[step, "common_removed"] == whole.loc[("relation", "(all)"), "common_removed"]
    assert log.loc[24, "new"] > log.loc[0, "new"] + 0.2
    assert log.loc[24, "old"] < 0.8


def test_a_killed_run_goes_on_with_its_log(
    watched: tuple[Trainer, Path, Any], example: Example, words: Any, tmp_path: Path
) -> None:
    path, new = tmp_path / "log.jsonl", read_facts(example.new)
    with pytest.raises(Killed):
        trainer(example, words, tmp_path, [watcher(example, words, path, new=new), KillAt(14)]).train()
    assert read_log(path)["step"].max() == 12
    with open(path, "a") as file:
        file.write('{"step": 13, "ol')
    trainer(example, words, tmp_path, [watcher(example, words, path, new=new)]).train(resume_from_checkpoint=True)
    pd.testing.assert_frame_equal(read_log(path), read_log(watched[1] / "log.jsonl"))


def test_a_resumed_run_without_its_log_or_with_other_facts_is_refused(
    watched: tuple[Trainer, Path, Any], example: Example, words: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Training resumes at step 24, but"):
        trainer(example, words, watched[1], [watcher(example, words, tmp_path / "none.jsonl")], steps=26).train(
            resume_from_checkpoint=True
        )
    other = ForgettingCallback(read_facts(example.old)[:20], words, watched[1] / "log.jsonl")
    with pytest.raises(ValueError, match="is about other facts"):
        trainer(example, words, watched[1], [other], steps=26).train(resume_from_checkpoint=True)


def test_an_earlier_log_is_set_aside_and_a_warning_is_given(
    example: Example, words: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n')
    first = tmp_path / "log.jsonl.earlier"
    first.write_text("of the run before")
    rule = AlarmRule(least_loss=0.05)
    with caplog.at_level(logging.WARNING, logger="psd_utils"):
        callback = watcher(example, words, path, every=7, rule=rule)
        trainer(example, words, tmp_path, [callback]).train()
    assert first.read_text() == "of the run before"
    assert (tmp_path / "log.jsonl.earlier1").read_text() == '{"step": 0}\n'
    log = read_log(path)
    assert log["step"].tolist() == [0, 7, 14, 21, 24]
    assert callback.alarm is not None
    assert callback.alarm.name == log["alarm"].iloc[-1]
    assert callback.alarm.sentence.startswith(f"step 24: {callback.alarm.name}. ")
    said = [r.getMessage() for r in caplog.records if "old facts' recall is lost" in r.getMessage()]
    given = log["alarm"].fillna("none").tolist()
    changes = [b for a, b in itertools.pairwise(given) if b not in ("none", a)]
    assert [m.split(": ")[1].split(". ")[0] for m in said] == changes
    assert changes


def state(step: int) -> Any:
    return SimpleNamespace(global_step=step, is_world_process_zero=True)


def test_what_goes_wrong_in_the_middle_does_not_end_the_training(
    example: Example, words: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "log.jsonl"
    callback, model = watcher(example, words, path), LlamaForCausalLM.from_pretrained(example.base)
    callback.on_train_begin(None, state(0), None, model=model)
    broken = LlamaForCausalLM.from_pretrained(example.base)
    broken.model.norm.weight.data[:] = torch.nan
    path.parent.rename(tmp_path / "gone")
    callback.on_step_end(None, state(4), None, model=model)
    (tmp_path / "gone").rename(path.parent)
    callback.on_step_end(None, state(8), None, model=broken)
    callback.on_step_end(None, state(12), None, model=model)
    assert read_log(path)["step"].tolist() == [0, 4, 12]
    said = [r.getMessage() for r in caplog.records if "training goes on" in r.getMessage()]
    assert [message.split(":")[0] for message in said] == [
        f"Step {n} is not in the log, and training goes on" for n in (4, 8)
    ]
    states = path.with_name("log.jsonl.before.safetensors")
    states.write_bytes(states.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"before.safetensors is damaged"):
        watcher(example, words, path).on_train_begin(None, state(12), None, model=model)
    with pytest.raises(ValueError, match="cannot be written"):
        watcher(example, words, states / "log.jsonl").on_train_begin(None, state(0), None, model=model)


def test_settings_and_logs_that_mean_nothing_are_refused(example: Example, words: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
        watcher(example, words, tmp_path / "log.jsonl", every=0)
    path = tmp_path / "broken.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"broken.jsonl, line 2: not valid JSON"):
        read_log(path)
    path.write_text('{"step": 0}\n["step"]\n')
    with pytest.raises(ValueError, match=r"broken.jsonl, line 2: no row of this log"):
        read_log(path)
    with pytest.raises(ValueError, match="cannot be read as a callback's log"):
        read_log(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="no columns common_removed"):
        judge_log(LOG.drop(columns="common_removed"))
    with pytest.raises(ValueError, match="The log has no rows"):
        judge_log(LOG.iloc[:0])
    with pytest.raises(ValueError, match="do not rise"):
        judge_log(LOG.iloc[::-1])


LOG = pd.DataFrame(
    {
        "step": [0, 10, 20, 30],
        "old": [0.8, 0.76, 0.4, 0.4],
        "common": [0.0, 1.0, 4.0, 1.0],
        "individual": [0.0, 1.0, 2.0, 4.0],
        "common_removed": [0.8, 0.8, 0.7, 0.44],
    }
)


def test_the_rule_reads_loss_hidden_part_and_ratio() -> None:
    rule = AlarmRule(least_loss=0.1, hidden_share=0.5, least_ratio=0.0)
    assert judge_run(LOG, rule).tolist() == [None, None, COLLAPSE, EROSION]
    alarm = judge_log(LOG.iloc[:3], rule)
    assert (alarm.step, alarm.loss, alarm.hidden, alarm.ratio) == (20, *(pytest.approx(x) for x in (0.5, 0.75, 2.0)))
    assert judge_log(LOG.iloc[:3], AlarmRule(0.1, 0.8)).name == EROSION
    assert judge_log(LOG.iloc[:3], AlarmRule(0.1, 0.5, 3.0)).name == EROSION
    assert judge_log(LOG.iloc[:3], AlarmRule(least_loss=0.6)) is None
    assert judge_log(LOG.assign(old=0.0), rule) is None


def test_the_rule_sees_only_the_rows_so_far() -> None:
    changed = LOG.assign(old=LOG["old"].where(LOG["step"] < 30, 0.0), common_removed=LOG["common_removed"] * 0.99)
    changed.loc[:2, "common_removed"] = LOG.loc[:2, "common_removed"]
    assert judge_run(changed).tolist()[:3] == judge_run(LOG).tolist()[:3]
    before = json.loads(LOG.to_json())
    judge_run(LOG)
    assert json.loads(LOG.to_json()) == before


# ---- how often the rule is wrong

DATA = Path(__file__).parents[1] / "data" / "spurious"


def direct_errors(runs: pd.DataFrame, seeds: set[int]) -> dict[str, int]:
    """Counted again, by a plain loop over the recorded runs and the statement of the rule."""
    found = {"points": 0, "reversible": 0, "false_alarms": 0, "misses": 0}
    for (_, seed), run in runs.groupby(["condition", "seed"]):
        rows = run.sort_values("step").to_dict("records")
        for row in rows if seed in seeds else []:
            lost, others_lost = rows[0]["old"] - row["old"], rows[0]["others"] - row["others"]
            if np.isnan(row["others_after_replay"]) or lost < 0.15 * rows[0]["old"] or others_lost <= 0:
                continue
            said = row["common_removed"] - row["old"] >= 0.5 * lost
            true = row["others_after_replay"] - row["others"] >= 0.5 * others_lost
            found["points"] += 1
            found["reversible"] += true
            found["false_alarms"] += said and not true
            found["misses"] += true and not said
    return found


def test_published_error_rates_follow_from_the_recorded_runs() -> None:
    runs = pd.read_csv(DATA / "callback_runs.csv")
    table = pd.read_csv(DATA / "callback_error_rates.csv")
    ours = table[table["rule"] == "rule"]
    assert ours[["least_loss", "hidden_share", "least_ratio"]].drop_duplicates().values.tolist() == [
        [RULE.least_loss, RULE.hidden_share, RULE.least_ratio]
    ]
    seeds = set(runs["seed"])
    for which, used in (("choosing", set(CALIBRATION_SEEDS)), ("held out", seeds - set(CALIBRATION_SEEDS))):
        row = ours[(ours["seeds_used"] == which) & (ours["condition"] == "all")].iloc[0]
        expected = direct_errors(runs, used)
        assert {name: row[name] for name in expected} == expected
        assert row["false_alarm_rate"] == pytest.approx(
            expected["false_alarms"] / (expected["points"] - expected["reversible"]), abs=1e-4
        )
        assert row["miss_rate"] == pytest.approx(expected["misses"] / expected["reversible"], abs=1e-4)
    assert len(seeds - set(CALIBRATION_SEEDS)) >= 4


def test_the_rule_knows_a_collapse_from_erosion_before_the_trough() -> None:
    runs = pd.read_csv(DATA / "callback_runs.csv")
    held_out = judged(runs[~runs["seed"].isin(CALIBRATION_SEEDS)], RULE)
    for (condition, seed), run in held_out.groupby(["condition", "seed"]):
        first = run.loc[run["alarm"] == COLLAPSE, "step"].min()
        trough = run.loc[run.loc[run["step"] <= 400, "old"].idxmin(), "step"]
        if condition == "B_prime":
            assert first < trough, seed
        if condition == "C":
            assert run["alarm"].iloc[-1] == EROSION, seed


@pytest.mark.slow
def test_the_rule_is_the_one_chosen_on_the_seeds_set_aside_for_it() -> None:
    runs = pd.read_csv(DATA / "callback_runs.csv")
    rule, table = choose_rule(runs[runs["condition"].isin(["B_prime", "C"])])
    assert rule == RULE
    assert (
        table["errors"].min()
        == table.loc[(table["least_loss"] == 0.15) & (table["hidden_share"] == 0.5), "errors"].min()
    )
