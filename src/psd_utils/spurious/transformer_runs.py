"""The transformer's conditions, and their runs as one tidy table.

In: the names of conditions, seeds and the sizes of the study. Out: a row for every condition, seed and step.

With a folder, every finished run is kept there and every unfinished one is resumed: a killed study goes on where it
was. Source: Palit et al. (2026), conditions and ablations of the transformer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from psd_utils.spurious.biographies import FULL, SMALL, Biographies, BiographySettings, make_biographies
from psd_utils.spurious.biography_language import Language, TokenLanguage, describe_language
from psd_utils.spurious.transformer import Decoder, TransformerSettings
from psd_utils.spurious.transformer_measure import Observer
from psd_utils.spurious.transformer_surgery import surgeries
from psd_utils.spurious.transformer_training import (
    FULL_TRAINING,
    SMALL_TRAINING,
    Injection,
    TrainingSettings,
    evaluation_steps,
    inject,
    load_state,
    pretrain,
    save_state,
)


@dataclass(frozen=True)
class Condition:
    """What one condition changes.

    Attributes:
        label: for figures.
        world: fields of BiographySettings.
        model: fields of TransformerSettings.
        injection: fields of Injection; "batch" multiplies the training's batch size.
    """

    label: str
    world: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    injection: Mapping[str, Any] = field(default_factory=dict)


REPRESENTATION = ("embeddings", "attention_qk", "attention_vo", "mlp", "norms")
CONDITIONS = {
    "B_prime": Condition("B′: new answers in Y"),
    "C": Condition("C: new answers in X and Y", {"new_answers": "all"}),
    "X": Condition("new answers in X", {"new_answers": "X"}),
    "no_final_norm": Condition("B′, no final norm", model={"final_norm": False}),
    "mlp": Condition("B′, with MLPs", model={"mlp": True}),
    "mlp_no_final_norm": Condition("B′, with MLPs, no final norm", model={"mlp": True, "final_norm": False}),
    "rehearsal": Condition("A itself again", injection={"on": "A"}),
    "tiny_rate": Condition("B′, rate × 0.02", injection={"rate": 0.02}),
    "rate_half": Condition("rate × ½", injection={"rate": 0.5}),
    "rate_double": Condition("rate × 2", injection={"rate": 2.0}),
    "batch_half": Condition("batch × ½", injection={"batch": 0.5}),
    "batch_double": Condition("batch × 2", injection={"batch": 2.0}),
    "frozen_representation": Condition("all but the head frozen", injection={"frozen": REPRESENTATION}),
    "frozen_embeddings": Condition("embeddings frozen", injection={"frozen": ("embeddings",)}),
    "frozen_attention_qk": Condition("attention q, k frozen", injection={"frozen": ("attention_qk",)}),
    "frozen_attention": Condition("attention frozen", injection={"frozen": ("attention_qk", "attention_vo")}),
    "frozen_norms": Condition("norms frozen", injection={"frozen": ("norms",)}),
    "frozen_head": Condition("head frozen", injection={"frozen": ("head",)}),
}
"""The conditions by name; `cue_condition` makes more."""

DOSES = ("rate_half", "batch_half", "B_prime", "batch_double", "rate_double")
FROZEN = tuple(name for name in CONDITIONS if name.startswith("frozen_"))


def cue_condition(kind: str, cue: float, new_answers: str = "Y") -> tuple[str, Condition]:
    """Name and condition of new people whose names give a share `cue` of their answers away ("value" or "region")."""
    name = f"cue_{kind}_{cue:g}" + ("" if new_answers == "Y" else f"_{new_answers}")
    world = {"cue": cue, "cue_kind": kind, "new_answers": new_answers}
    return name, Condition(f"names tell the {kind}: {cue:.0%}", world)


@dataclass(frozen=True)
class Study:
    """Sizes of the study; the defaults are configuration h.

    Attributes:
        people: the world before a condition changes it.
        language: how people become tokens.
        width, n_layers, n_heads: see TransformerSettings.
        training: how it is trained.
        n_steps: length of an injection.
        every: steps between evaluations up to step 300; from there on five times as many.
        one_world: the seed of people, weights and pretraining, if the seeds of runs are to change the injection's
            batches alone, as the published study's do; None: every seed has its own.
    """

    people: BiographySettings = SMALL
    language: Language = field(default_factory=TokenLanguage)
    width: int = 128
    n_layers: int = 2
    n_heads: int = 4
    training: TrainingSettings = SMALL_TRAINING
    n_steps: int = 600
    every: int = 10
    one_world: int | None = None

    def model(self, condition: Condition) -> TransformerSettings:
        """The model of a condition."""
        base = TransformerSettings(self.language.n_tokens, self.width, self.n_layers, self.n_heads)
        return replace(base, **condition.model)

    def world(self, condition: Condition, seed: int) -> Biographies:
        """The people of a condition and seed."""
        world_seed = seed if self.one_world is None else self.one_world
        return make_biographies(replace(self.people, **condition.world), world_seed, self.language)

    def injection(self, condition: Condition) -> Injection:
        """The injection of a condition."""
        changes = {"n_steps": self.n_steps, **condition.injection}
        if "batch" in changes:
            changes["batch_size"] = round(changes.pop("batch") * self.training.batch_size)
        return Injection(**changes)


QUICK = Study(
    people=BiographySettings(n_old=32, n_new=64, n_never=16),
    language=TokenLanguage(name_pool=64, n_values=16),
    width=64,
    training=replace(SMALL_TRAINING, batch_size=48, pretraining_steps=300, rate_ratio=6.0),
    n_steps=200,
)
"""Seconds on one core: shows that everything runs, and a collapse; not a size about which anything is claimed."""


def make_study(name: str) -> Study:
    """A study by name: "quick" (QUICK), "small" (configuration h, 1,200 steps) or "full" (the published one).

    The full study is for one GPU: English text, 8 layers, 512 wide, and one pretrained model whose injections differ in
    their batches alone.

    Raises:
        ValueError: another name.
    """
    if name == "full":
        from psd_utils.spurious.biography_text import TextLanguage  # trains a tokenizer

        return Study(FULL, TextLanguage(), 512, 8, 8, FULL_TRAINING, n_steps=1200, one_world=42)
    if name not in ("quick", "small"):
        raise ValueError(f"No study {name!r}; expected quick, small or full.")
    return QUICK if name == "quick" else Study(n_steps=1200)


def run_conditions(
    conditions: Mapping[str, Condition] | Sequence[str],
    seeds: Sequence[int],
    study: Study | None = None,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
    surgery: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """Pretrain and inject every condition and seed; what shares pretraining is pretrained once.

    Args:
        conditions: names in CONDITIONS, or conditions by name.
        seeds: of people, weights and batches.
        study: sizes; None for configuration h.
        folder: keeps finished runs, and checkpoints to resume from; None keeps nothing.
        device: where to compute.
        surgery: also measure edited weight updates at every evaluation (transformer_surgery).
        progress: show bars.

    Returns:
        condition, seed, step and the columns of Observer.measure (with surgery, those of `surgeries` as well).

    Raises:
        ValueError: an unknown condition, or a folder that holds runs of another study.
        FloatingPointError: a run diverged.
    """
    study = study or Study()
    if not isinstance(conditions, Mapping):
        unknown = [name for name in conditions if name not in CONDITIONS]
        if unknown:
            raise ValueError(f"No condition {unknown[0]!r}; expected some of {', '.join(CONDITIONS)}.")
        conditions = {name: CONDITIONS[name] for name in conditions}
    tables = []
    jobs = [(seed, name) for seed in seeds for name in conditions]
    known: dict[tuple[int, TransformerSettings], Decoder] = {}
    for seed, name in tqdm(jobs, "runs", disable=not progress, leave=False):
        condition, home = conditions[name], None if folder is None else folder / f"seed_{seed}"
        path = None if home is None else home / f"{name}.json"
        key = _key(study, condition, surgery)
        table = _finished(path, key) if path is not None and path.is_file() else None
        if table is None:
            world, settings = study.world(condition, seed), study.model(condition)
            known = {model: weights for model, weights in known.items() if model[0] == world.seed}
            if (world.seed, settings) not in known:
                kept = None if folder is None else folder / f"seed_{world.seed}" / _model_name(settings)
                known[world.seed, settings] = pretrain(world, settings, study.training, kept, device, progress)
            start = known[world.seed, settings]
            table = run_injection(world, start, study, condition, name, seed, path, surgery, progress)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def run_injection(
    world: Biographies,
    start: Decoder,
    study: Study,
    condition: Condition,
    name: str,
    seed: int,
    path: Path | None = None,
    surgery: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """One injection, measured at every evaluation step; see run_conditions. `path` keeps its rows when it is done."""
    injection, observer = study.injection(condition), Observer(world, start)
    steps = evaluation_steps(injection.n_steps, study.every, then_every=5 * study.every)
    key, stream = _key(study, condition, surgery), 0 if study.one_world is None else seed
    half = None if path is None else path.with_suffix(".pt")
    saved = load_state(half, key) if half is not None and half.is_file() else None
    rows: list[dict[str, Any]] = list(saved["rows"]) if saved else []
    for moment in inject(world, start, steps, injection, study.training, stream, saved, progress):
        row = {"condition": name, "seed": seed, "step": moment.step, **observer.measure(moment.model)}
        if surgery:
            row |= surgeries(observer, moment.model, seed, moment.step)
        rows.append(row)
        if half is not None and len(rows) % 10 == 0:
            save_state(half, key, {**moment.state(), "rows": rows})
    if path is not None and half is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"key": key, "rows": rows}))
        part.replace(path)
        half.unlink(missing_ok=True)
    return pd.DataFrame(rows)


def _model_name(settings: TransformerSettings) -> str:
    return ("mlp_" if settings.mlp else "") + ("final_norm" if settings.final_norm else "no_final_norm")


def _key(study: Study, condition: Condition, surgery: bool) -> str:
    """What can change a number of a run, as text."""
    parts = {
        "people": asdict(replace(study.people, **condition.world)),
        "language": describe_language(study.language),
        "one_world": study.one_world,
        "model": asdict(study.model(condition)),
        "training": asdict(study.training),
        "injection": asdict(study.injection(condition)),
        "every": study.every,
        "surgery": surgery,
    }
    return json.dumps(parts, sort_keys=True)


def _finished(path: Path, key: str) -> pd.DataFrame:
    saved = json.loads(path.read_text())
    if saved["key"] != key:
        raise ValueError(f"{path} holds a run with other settings. Use another folder, or delete it.")
    return pd.DataFrame(saved["rows"])
