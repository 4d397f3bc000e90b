"""A callback for transformers' Trainer that watches old facts while a model is fine-tuned, and warns.

In: old facts (and new ones, if wanted) as Fact. Out: a log of JSON lines, a row every n steps, and warnings through
Python's logging. Training is not changed: no gradient, no random draw, every module back in its mode; what
goes wrong after its begin is a warning.

    trainer = Trainer(..., callbacks=[ForgettingCallback(read_facts("old.jsonl"), tokenizer, "run/forgetting.jsonl")])

A run that was killed and resumes from a Trainer checkpoint goes on with its log. Not for models sharded over
processes (FSDP, DeepSpeed ZeRO-3), whose weights are not whole in any of them.
"""

import itertools
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from psd_utils.spurious.alarm import RULE, Alarm, AlarmRule, judge_log
from psd_utils.spurious.checkpoint_files import digest
from psd_utils.spurious.decomposition import ALL, decompose
from psd_utils.spurious.prompts import Fact, encode_facts
from psd_utils.spurious.recall import Recall, measure_recall

log = logging.getLogger(__name__)


class ForgettingCallback(TrainerCallback):
    """Measures recall of old facts and the two parts of the change of their states, every n steps.

    Args:
        old: facts that the model knows before training.
        tokenizer: the model's.
        path: the log; the states before training are kept beside it, as <path>.before.safetensors.
        every: steps between two measurements.
        new: facts that are being learned, for their recall alone.
        rule: when to warn, see `alarm`.
        batch_size: prompts read at once.
        joiner: what stands between prompt and answer.

    Attributes:
        alarm: the warning of the last measurement, or None.

    Raises:
        ValueError: facts that cannot be asked for, or `every` or `batch_size` below 1.
    """

    def __init__(
        self,
        old: Sequence[Fact],
        tokenizer: Any,
        path: str | Path,
        every: int = 50,
        new: Sequence[Fact] = (),
        rule: AlarmRule = RULE,
        batch_size: int = 32,
        joiner: str = " ",
    ) -> None:
        for name, value in (("every", every), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, found {value!r}.")
        self.old = encode_facts(old, tokenizer, "old", joiner)
        self.new = encode_facts(new, tokenizer, "new", joiner) if new else None
        self.path = Path(path).expanduser().resolve()
        self.every, self.rule, self.batch_size = every, rule, batch_size
        self.alarm: Alarm | None = None
        self._rows: list[dict[str, Any]] = []
        self._before: Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure the state before training, or find it and the log's rows where a run resumes.

        Raises:
            ValueError: a run that resumes without its log, or with that of other facts.
        """
        if not state.is_world_process_zero:
            return
        if state.global_step > 0:
            self._resume(state.global_step)
            return
        if self.path.is_file():
            places = (self.path.with_name(f"{self.path.name}.earlier{n or ''}") for n in itertools.count())
            aside = next(place for place in places if not place.exists())
            log.warning("Training begins at step 0: the log of an earlier run is now %s", aside)
            os.replace(self.path, aside)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"The log {self.path} cannot be written: {error}. Give another path.") from error
        recall = self._ask(model)
        self._before, self._rows = recall.states, []
        temporary = self._states_path.with_suffix(".part")
        save_file({"before": recall.states}, str(temporary), metadata={"facts": self._digest})
        os.replace(temporary, self._states_path)
        self._record(model, 0, recall)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure every n steps."""
        if state.global_step % self.every == 0:
            self._look(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure the end, if it was not measured."""
        self._look(model, state)

    def _look(self, model: Any, state: Any) -> None:
        measured = bool(self._rows) and self._rows[-1]["step"] == state.global_step
        if state.is_world_process_zero and self._before is not None and not measured:
            try:
                self._record(model, state.global_step, self._ask(model))
            except (OSError, ValueError) as error:  # a full disk, logits that are not finite
                log.warning("Step %d is not in the log, and training goes on: %s", state.global_step, error)

    def _ask(self, model: Any) -> Recall:
        return measure_recall(model, self.old, self.batch_size)

    def _record(self, model: Any, step: int, recall: Recall) -> None:
        assert self._before is not None
        parts = decompose(model, self._before, recall.states, self.old)
        whole = parts[(parts["means"] == "relation") & (parts["relation"] == ALL)].iloc[0]
        row: dict[str, Any] = {"step": step, "old": float(recall.first.mean()), "old_exact": float(recall.exact.mean())}
        row |= {"old_log_prob_per_token": recall.log_prob_per_token}
        row |= {name: float(whole[name]) for name in ("common", "individual", "common_removed")}
        if self.new is not None:
            row["new"] = float(measure_recall(model, self.new, self.batch_size).first.mean())
        before = self.alarm.name if self.alarm else None
        self._rows.append(row)
        self.alarm = judge_log(pd.DataFrame(self._rows), self.rule)
        row["alarm"] = self.alarm.name if self.alarm else None
        self._write()
        if self.alarm and self.alarm.name != before:
            log.warning("%s", self.alarm.sentence)

    def _resume(self, step: int) -> None:
        """Go on with a log: rows after the checkpoint are measured again, and a half-written line goes."""
        if not self.path.is_file() or not self._states_path.is_file():
            raise ValueError(
                f"Training resumes at step {step}, but {self.path} or {self._states_path.name} is not there. Without "
                "the states before training no shift can be measured: put both files back, or leave the callback out."
            )
        try:
            with safe_open(str(self._states_path), framework="pt") as file:
                facts, before = (file.metadata() or {}).get("facts"), file.get_tensor("before")
        except SafetensorError as error:
            raise ValueError(
                f"{self._states_path} is damaged ({error}). Put a copy back, or leave the callback out."
            ) from error
        if facts != self._digest:
            raise ValueError(f"{self.path} is about other facts. Give the facts it was begun with, or another path.")
        self._before = before
        self._rows = [row for row in _rows_of(self.path) if row["step"] <= step]
        self._write()
        self.alarm = judge_log(pd.DataFrame(self._rows), self.rule)

    def _write(self) -> None:
        """Write all rows: what an earlier, failed attempt left out is in the next."""
        temporary = self.path.with_name(self.path.name + ".part")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self._rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    @property
    def _states_path(self) -> Path:
        return self.path.with_name(self.path.name + ".before.safetensors")

    @property
    def _digest(self) -> str:
        return digest([self.old.prompt_ids, self.old.answer_ids])


def read_log(path: str | Path) -> pd.DataFrame:
    """The rows of a callback's log: step, old (first-token recall), old_exact, old_log_prob_per_token (nats), common,
    individual (sizes of the parts, root mean squares), common_removed (recall), new (if asked for), alarm.

    A last line that a kill cut short is left out.

    Raises:
        ValueError: no such file, or another line that is no row; the message names file and line.
    """
    return pd.DataFrame(_rows_of(Path(path)))


def _rows_of(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a callback's log: {error}.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg}). Was it edited?") from error
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError(f"{path}, line {number}: no row of this log, which has a step. Was it edited?")
        rows.append(row)
    return rows
