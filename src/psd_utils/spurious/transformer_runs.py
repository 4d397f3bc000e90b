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

from psd_utils.spurious.biographies import SMALL, Biographies, BiographySettings, make_biographies
from psd_utils.spurious.biography_language import Language, TokenLanguage
from psd_utils.spurious.transformer import Decoder, TransformerSettings
from psd_utils.spurious.transformer_measure import Observer
from psd_utils.spurious.transformer_surgery import surgeries
from psd_utils.spurious.transformer_training import (
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
        injection: fields of Injection.
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
    "rehearsal": Condition("A itself again", injection={"on": "A"}),
    "tiny_rate": Condition("B′, rate × 0.02", injection={"rate": 0.02}),
    "rate_half": Condition("rate × ½", injection={"rate": 0.5}),
    "rate_double": Condition("rate × 2", injection={"rate": 2.0}),
    "batch_half": Condition("batch × ½", injection={"batch_size": 32}),
    "batch_double": Condition("batch × 2", injection={"batch_size": 128}),
    "frozen_representation": Condition("all but the head frozen", injection={"frozen": REPRESENTATION}),
    "frozen_embeddings": Condition("embeddings frozen", injection={"frozen": ("embeddings",)}),
    "frozen_attention_qk": Condition("attention q, k frozen", injection={"frozen": ("attention_qk",)}),
    "frozen_attention": Condition("attention frozen", injection={"frozen": ("attention_qk", "attention_vo")}),
    "frozen_norms": Condition("norms frozen", injection={"frozen": ("norms",)}),
    "frozen_head": Condition("head frozen", injection={"frozen": ("head",)}),
}
"""The conditions by name; `cue_condition` makes more."""

DOSES = ("rate_half", "batch_half", "B_prime", "batch_double", "rate_double")


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
        width, n_layers, n_heads, mlp: see TransformerSettings.
        training: how it is trained.
        n_steps: length of an injection.
        every: steps between evaluations up to step 300; from there on five times as many.
    """

    people: BiographySettings = SMALL
    language: Language = field(default_factory=TokenLanguage)
    width: int = 128
    n_layers: int = 2
    n_heads: int = 4
    mlp: bool = False
    training: TrainingSettings = SMALL_TRAINING
    n_steps: int = 600
    every: int = 10

    def model(self, condition: Condition) -> TransformerSettings:
        """The model of a condition."""
        base = TransformerSettings(self.language.n_tokens, self.width, self.n_layers, self.n_heads, self.mlp)
        return replace(base, **condition.model)

    def world(self, condition: Condition, seed: int) -> Biographies:
        """The people of a condition and seed."""
        return make_biographies(replace(self.people, **condition.world), seed, self.language)

    def injection(self, condition: Condition) -> Injection:
        """The injection of a condition."""
        return Injection(**{"n_steps": self.n_steps, **condition.injection})


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
    known: dict[TransformerSettings, Decoder] = {}
    last_seed = None
    for seed, name in tqdm(jobs, "runs", disable=not progress, leave=False):
        if seed != last_seed:
            known, last_seed = {}, seed
        condition, home = conditions[name], None if folder is None else folder / f"seed_{seed}"
        table = _finished(home, name, study, condition, surgery)
        if table is None:
            settings = study.model(condition)
            world = study.world(condition, seed)
            if settings not in known:
                sub = None if home is None else home / ("final_norm" if settings.final_norm else "no_final_norm")
                known[settings] = pretrain(world, settings, study.training, sub, device, progress)
            table = run_injection(world, known[settings], study, condition, name, home, surgery, progress)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def run_injection(
    world: Biographies,
    start: Decoder,
    study: Study,
    condition: Condition,
    name: str,
    home: Path | None = None,
    surgery: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """One injection, measured at every evaluation step; see run_conditions."""
    injection, observer = study.injection(condition), Observer(world, start)
    steps = evaluation_steps(injection.n_steps, study.every, then_every=5 * study.every)
    key = _key(study, condition, surgery)
    half = None if home is None else home / f"{name}.pt"
    saved = load_state(half, key) if half is not None and half.is_file() else None
    rows: list[dict[str, Any]] = list(saved["rows"]) if saved else []
    for moment in inject(world, start, steps, injection, study.training, resume_from=saved, progress=progress):
        row = {"condition": name, "seed": world.seed, "step": moment.step, **observer.measure(moment.model)}
        if surgery:
            row |= surgeries(observer, moment.model, world.seed, moment.step)
        rows.append(row)
        if half is not None and len(rows) % 10 == 0:
            save_state(half, key, {**moment.state(), "rows": rows})
    table = pd.DataFrame(rows)
    if home is not None and half is not None:
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{name}.json").write_text(json.dumps({"key": key, "rows": rows}))
        half.unlink(missing_ok=True)
    return table


def _key(study: Study, condition: Condition, surgery: bool) -> str:
    """What can change a number of a run, as text."""
    parts = {
        "people": asdict(replace(study.people, **condition.world)),
        "model": asdict(study.model(condition)),
        "training": asdict(study.training),
        "injection": asdict(study.injection(condition)),
        "every": study.every,
        "surgery": surgery,
    }
    return json.dumps(parts, sort_keys=True)


def _finished(home: Path | None, name: str, study: Study, condition: Condition, surgery: bool) -> pd.DataFrame | None:
    path = None if home is None else home / f"{name}.json"
    if path is None or not path.is_file():
        return None
    saved = json.loads(path.read_text())
    if saved["key"] != _key(study, condition, surgery):
        raise ValueError(f"{path} holds a run with other settings. Use another folder, or delete it.")
    return pd.DataFrame(saved["rows"])
