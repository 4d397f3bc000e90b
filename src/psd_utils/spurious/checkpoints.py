"""A base model and its fine-tuning checkpoints -> tidy tables and a verdict: hidden knowledge, erosion, or neither.

In: how to load each model (one is in memory at a time), old and new facts. Out: a folder with `facts.parquet` (per
fact, checkpoint and edit), `recall.parquet` (its means), `shift.parquet` (the two parts of the change),
`updates.parquet` (each block matrix), `equal_recall.parquet` and `summary.json`. A checkpoint that was measured with
the same facts and settings is not measured again.
"""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from psd_utils.spurious.checkpoint_files import digest, file_name, is_done, read_part, read_states, write_part
from psd_utils.spurious.checkpoint_report import CheckpointReport, make_report
from psd_utils.spurious.decomposition import LEAST_PER_RELATION, decompose
from psd_utils.spurious.prompts import Fact, Prompts, check_disjoint, encode_facts
from psd_utils.spurious.recall import Recall, measure_recall
from psd_utils.spurious.surgery import TRAINED, Edit, block_matrices, edited, edits_of, leading_parts
from psd_utils.spurious.verdict import RULE, Rule

log = logging.getLogger(__name__)

TABLES = ("facts", "shift", "updates")
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded, and what tells it from others.

    Attributes:
        label: its name in tables and pictures.
        step: fine-tuning step, 0 for the base.
        identity: what its weights are (hashes of files, or repository and commit); decides what is measured again.
        load: returns (model, tokenizer or None); the model is dropped before the next one is loaded.
    """

    label: str
    step: int
    identity: str
    load: Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class CheckpointSettings:
    """Ranks of the surgery, seed of its control, prompts read at once, and what stands between prompt and answer."""

    ranks: tuple[int, ...] = (1, 4)
    seed: int = 0
    batch_size: int = 32
    joiner: str = " "

    def __post_init__(self) -> None:
        if any(isinstance(r, bool) or not isinstance(r, int) or r < 1 for r in self.ranks):
            raise ValueError(f"ranks must be whole numbers of at least 1, found {self.ranks}.")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks holds one twice: {self.ranks}.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, found {self.batch_size}.")


SETTINGS = CheckpointSettings()


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks from text such as "1 4"; "0" alone stands for no surgery.

    Raises:
        ValueError: something else than whole numbers.
    """
    try:
        ranks = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError as error:
        raise ValueError(f'ranks must be whole numbers such as "1 4", found {text!r}.') from error
    return () if ranks == (0,) else ranks


def study_checkpoints(
    base: Checkpoint,
    checkpoints: Sequence[Checkpoint],
    old: Sequence[Fact],
    new: Sequence[Fact],
    out_dir: str | Path,
    settings: CheckpointSettings = SETTINGS,
    rule: Rule = RULE,
) -> CheckpointReport:
    """Measure all checkpoints that have not been measured, and judge them.

    Raises:
        ValueError: no checkpoints, two of the same label or step, facts that cannot be asked for, or a checkpoint that
            does not fit the base; the message names it.
    """
    _check_list(base, checkpoints)
    check_disjoint(old, new)
    folder = Path(out_dir).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out_dir {folder} cannot be written: {error}. Give a folder.") from error
    key = digest([_FORMAT, base.identity, asdict(settings), [asdict(f) for f in [*old, *new]], len(old)])
    start = _Base(base, old, new, settings, folder / "measured" / f"base-{key}")
    parts = [start.measured()]
    with tqdm(checkpoints, desc="checkpoints", unit="model") as progress:
        for checkpoint in progress:
            progress.set_postfix_str(checkpoint.label)
            place = folder / "measured" / f"{file_name(checkpoint.label)}-{digest([key, checkpoint.identity])}"
            if not is_done(place):
                try:
                    _measure(checkpoint, start, place)
                except ValueError as error:
                    error.add_note(f"This happened while {checkpoint.label} was measured.")
                    raise
            parts.append(read_part(place, TABLES, checkpoint.label, checkpoint.step))
    tables = {n: pd.concat([part[n] for part in parts if n in part], ignore_index=True) for n in TABLES}
    about = {
        "checkpoints": [{"label": c.label, "step": c.step, "identity": c.identity} for c in (base, *checkpoints)],
        "settings": asdict(settings) | {"least_per_relation": LEAST_PER_RELATION},
        "key": key,
    }
    return make_report(tables, [base.label, *(c.label for c in checkpoints)], about, folder, rule)


def _check_list(base: Checkpoint, checkpoints: Sequence[Checkpoint]) -> None:
    if not checkpoints:
        raise ValueError("There are no checkpoints. Give at least one fine-tuned model.")
    labels, steps = [c.label for c in (base, *checkpoints)], [c.step for c in (base, *checkpoints)]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"The label {label!r} is taken twice. Give every model its own.")
    if steps != sorted(set(steps)) or steps[0] != 0:
        raise ValueError(f"Steps must rise from 0, that of the base; found {steps}. List the checkpoints in order.")


class _Base:
    """The base: measured once and kept on disk; its model is loaded only while some checkpoint needs it."""

    def __init__(
        self, source: Checkpoint, old: Sequence[Fact], new: Sequence[Fact], settings: CheckpointSettings, place: Path
    ) -> None:
        self.source, self.facts, self.settings, self.place = source, {"old": old, "new": new}, settings, place
        self._matrices: dict[str, Tensor] | None = None
        self._prompts: dict[str, Prompts] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _load(self) -> Any:
        model, tokenizer = self.source.load()
        if tokenizer is None:
            raise ValueError(f"The base {self.source.label} has no tokenizer. Save it into the model's folder.")
        _check_weights(model, self.source.label)
        self._prompts = self.encode(tokenizer, model)
        self.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self._matrices = {name: weight.clone().cpu() for name, weight in block_matrices(model).items()}
        return model

    def encode(self, tokenizer: Any, model: Any) -> dict[str, Prompts]:
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        sets = self.facts.items()
        return {name: encode_facts(facts, tokenizer, name, self.settings.joiner, longest) for name, facts in sets}

    def measured(self) -> dict[str, pd.DataFrame]:
        """The base's tables; measured now if they are not there yet."""
        if not is_done(self.place):
            model = self._load()
            found = {name: measure_recall(model, p, self.settings.batch_size) for name, p in self._prompts.items()}
            rows = [_fact_rows(found[name], p, TRAINED) for name, p in self._prompts.items()]
            states = {name: recall.states for name, recall in found.items()}
            write_part(self.place, {"facts": pd.concat(rows)}, states)
            del model
            _release()
        return read_part(self.place, TABLES, self.source.label, self.source.step)

    def loaded(self) -> tuple[dict[str, Tensor], dict[str, Prompts], dict[str, Tensor]]:
        """Block matrices, prompts and states; a run that resumes reads the base's weights again."""
        if self._matrices is None:
            self._load()
            _release()
        assert self._matrices is not None
        return self._matrices, self._prompts, read_states(self.place)


def _measure(checkpoint: Checkpoint, base: _Base, place: Path) -> None:
    matrices, prompts, before = base.loaded()
    model, tokenizer = checkpoint.load()
    _check_weights(model, checkpoint.label)
    _check_fits(model, base, checkpoint.label)
    if tokenizer is not None:
        own = base.encode(tokenizer, model)
        for name, encoded in own.items():
            if (encoded.prompt_ids, encoded.answer_ids) != (prompts[name].prompt_ids, prompts[name].answer_ids):
                raise ValueError(
                    f"{checkpoint.label}: its tokenizer reads the {name} facts otherwise than that of the base. "
                    "Compare checkpoints with the base that they were trained from."
                )
    settings = base.settings
    shifts, rows, parts = [], [], leading_parts(matrices, model, max(settings.ranks, default=1))
    edits = edits_of(settings.ranks)
    with tqdm(edits, desc=f"surgery on {checkpoint.label}", unit="edit", leave=False) as progress:
        for edit in progress:
            progress.set_postfix_str(edit.name)
            with edited(model, parts, edit, settings.seed):
                for name, asked in prompts.items():
                    recall = measure_recall(model, asked, settings.batch_size)
                    rows.append(_fact_rows(recall, asked, edit))
                    if edit == TRAINED:
                        shifts.append(decompose(model, before[name], recall.states, asked).assign(set=name))
    tables = {"facts": pd.concat(rows), "shift": pd.concat(shifts), "updates": _updates(matrices, model, parts)}
    write_part(place, tables, {})
    del model
    _release()


def _updates(base: Mapping[str, Tensor], model: Any, parts: Mapping[str, Any]) -> pd.DataFrame:
    rows = []
    for name, weight in block_matrices(model).items():
        norm = float(torch.linalg.matrix_norm(weight.float().cpu() - base[name].float()))
        shares = parts[name].share.double().cumsum(0).tolist()
        rows.append({"matrix": name, "norm": norm} | {f"share_{i}": s for i, s in enumerate(shares, 1)})
    return pd.DataFrame(rows)


def _fact_rows(recall: Recall, prompts: Prompts, edit: Edit) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "edit": edit.name,
            "set": prompts.name,
            "fact": range(len(prompts)),
            "relation": [fact.relation for fact in prompts.facts],
            "exact": recall.exact,
            "first": recall.first,
            "choice": recall.choice,
            "log_prob": recall.log_prob,
            "tokens": recall.tokens,
        }
    )


def _check_weights(model: Any, label: str) -> None:
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{label}: the weight {name} holds NaN or infinity, so nothing can be measured. "
                "The training has diverged or the file is broken; leave this checkpoint out."
            )


def _check_fits(model: Any, base: _Base, label: str) -> None:
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if shapes == base.shapes:
        return
    name = min(n for n in shapes.keys() | base.shapes.keys() if shapes.get(n) != base.shapes.get(n))
    raise ValueError(
        f"{label} does not have the base's architecture: {name} is {shapes.get(name, 'not there')} here and "
        f"{base.shapes.get(name, 'not there')} in the base. Give the base that it was trained from."
    )


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
