"""The whole path for one pair: score, fit, select, certify, damage, report."""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from safetensors import safe_open
from tqdm.auto import tqdm

from . import controls
from .capture import Capture
from .corpus import SPLITS
from .correction import KINDS, Correction
from .errors import PsdError
from .files import read_json, sha256_of_json, write_json, write_table
from .head import OutputModel, real_ids, top_k_ids
from .kernels import corrected_moments
from .models import Device, choose_device
from .pairs import Pair
from .paths import captures_dir, results_dir
from .recovery import DAMAGE_CONTROL, recovery_table
from .score import ScoringTask, prepare, score_member
from .selection import Chosen, choose_corrections
from .version import __version__

_LOG = logging.getLogger(__name__)

DEFAULT_N_TOKENS = 1_000_000
DEFAULT_TOP_K = 4096
SET_KINDS = tuple(kind for kind in KINDS if kind != "bias_all")
NOT_DAMAGED = "bias_all is fitted for base and derived only: no damage share"

FIT_COLUMNS = (
    "temperature_base",
    "temperature_derived",
    "temperature_damage",
    "penalty_base",
    "penalty_derived",
    "selected_none_base",
    "selected_none_derived",
)


@dataclass(frozen=True)
class Settings:
    """What a run was asked for, with every default filled in."""

    text: str | None
    n_tokens: int
    top_k: int
    device: Device
    seed: int
    n_damage_seeds: int
    n_resamples: int
    out_dir: Path


@dataclass(frozen=True)
class Study:
    """The result of a run. `losses` and `recovery` have the columns of DESIGN §5; `corrections` is keyed by
    (member, kind), `captures` by member; `path` is the folder that holds it all."""

    pair: Pair
    losses: pd.DataFrame
    recovery: pd.DataFrame
    corrections: Mapping[tuple[str, str], Correction]
    captures: Mapping[str, Capture]
    summary: Mapping[str, Any]
    path: Path


def resolve_settings(
    pair: Pair,
    *,
    text: str | None = None,
    n_tokens: int | None = None,
    top_k: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    seed: int = 0,
    n_damage_seeds: int = 5,
    n_resamples: int = 10_000,
    out_dir: str | Path | None = None,
) -> Settings:
    """Fill in what is not given: the registry's values, else the defaults.

    Raises:
        PsdError: a value out of range; it says which.
    """
    n_tokens = n_tokens if n_tokens is not None else pair.n_tokens or DEFAULT_N_TOKENS
    top_k = top_k if top_k is not None else pair.top_k or DEFAULT_TOP_K
    for name, value, least in (
        ("n_tokens", n_tokens, 1),
        ("top_k", top_k, 1),
        ("seed", seed, 0),
        ("n_damage_seeds", n_damage_seeds, 0),
        ("n_resamples", n_resamples, 100),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PsdError(f"{name} must be a whole number of at least {least}, found {value!r}")
    chosen = choose_device(device, dtype or pair.dtype)
    _LOG.info("%s", chosen.reason)
    folder = Path(out_dir).expanduser().resolve() if out_dir else results_dir()
    return Settings(text, n_tokens, top_k, chosen, seed, n_damage_seeds, n_resamples, folder)


def score_pair(
    pair: Pair, settings: Settings, members: tuple[str, ...] = ("base", "derived")
) -> tuple[ScoringTask, dict[str, Capture]]:
    """Score the members of a pair that have no capture yet; return what they read, and their captures.

    Raises:
        PsdError: as `prepare` and `score_member`.
    """
    task = prepare(pair, settings.text, settings.n_tokens)
    captures = {}
    for role in members:
        # facts of the registry are about the base
        facts = pair.facts if role == "base" else None
        captures[role] = score_member(task, role, settings.device, captures_dir(), facts)
    return task, captures


def run_study(
    pair: Pair,
    *,
    text: str | None = None,
    n_tokens: int | None = None,
    top_k: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    seed: int = 0,
    n_damage_seeds: int = 5,
    n_resamples: int = 10_000,
    out_dir: str | Path | None = None,
    overwrite: bool = False,
) -> Study:
    """Return the study of one pair: every correction for base, derived and matched damaged models, with intervals.

    What is on disk already is used: captures, and the models of an earlier run with the same settings that were
    finished before it was killed. None stands for the registry's value or the default (1,000,000 tokens, 4,096 ids).

    Raises:
        PsdError: bad settings or input, or results of another run in the folder while `overwrite` is False.
    """
    settings = resolve_settings(
        pair,
        text=text,
        n_tokens=n_tokens,
        top_k=top_k,
        device=device,
        dtype=dtype,
        seed=seed,
        n_damage_seeds=n_damage_seeds,
        n_resamples=n_resamples,
        out_dir=out_dir,
    )
    task, captures = score_pair(pair, settings)
    folder = settings.out_dir / pair.name
    described = _describe(pair, settings, captures)
    locks = settings.out_dir / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / pair.name):
        _claim(folder, described, overwrite)
        parts = _fit_all(pair, settings, task, captures, folder)
        return _report(pair, settings, task, captures, described, parts, folder)


def load_study(pair: Pair, out_dir: str | Path | None = None) -> Study:
    """Return a finished study from its folder, without any model.

    Raises:
        PsdError: there is no finished study of the pair.
    """
    folder = (Path(out_dir).expanduser().resolve() if out_dir else results_dir()) / pair.name
    if not (folder / "recovery.parquet").is_file():
        raise PsdError(f"no finished study of {pair.name} in {folder}: run 02_fit for it first")
    corrections = {}
    for path in sorted((folder / "corrections").glob("*.safetensors")):
        member, kind = path.stem.rsplit("-", 1)
        corrections[member, kind] = Correction.load(path)
    losses = pd.read_parquet(folder / "losses.parquet")
    recovery = pd.read_parquet(folder / "recovery.parquet")
    return Study(pair, losses, recovery, corrections, {}, read_json(folder / "summary.json"), folder)


def _describe(pair: Pair, settings: Settings, captures: Mapping[str, Capture]) -> dict[str, Any]:
    """Return everything that decides the numbers of a run; its hash tells one run from another."""
    values = {
        "captures": {role: capture.key for role, capture in captures.items()},
        "base": asdict(pair.base),
        "derived": asdict(pair.derived),
        "top_k": settings.top_k,
        "seed": settings.seed,
        "n_damage_seeds": settings.n_damage_seeds,
        "n_resamples": settings.n_resamples,
        "code_version": __version__,
    }
    return {"settings": values, "settings_sha256": sha256_of_json(values)}


def _claim(folder: Path, described: dict[str, Any], overwrite: bool) -> None:
    """Make the folder this run's: refuse another run's results unless `overwrite` says so."""
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink()  # of a run that was killed while writing; the lock says that no other is at work here
    summary = folder / "summary.json"
    if summary.is_file():
        earlier = read_json(summary)
        if earlier.get("settings_sha256") != described["settings_sha256"]:
            if not overwrite:
                raise PsdError(
                    f"{folder} holds the results of other settings ({_differences(earlier, described)}); "
                    "give another out_dir, or overwrite=True to replace them"
                )
            for name in ("parts", "corrections"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for path in folder.glob("*.parquet"):
                path.unlink()
            summary.unlink()
    if not summary.is_file():
        write_json(summary, described)


def _differences(earlier: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    old, new = earlier.get("settings", {}), described["settings"]
    names = [name for name in new if old.get(name) != new[name]]
    return ", ".join(f"{name}: {old.get(name)!r} there, {new[name]!r} now" for name in names)


@dataclass(frozen=True)
class _Part:
    """One fitted model: loss rows, and per kind the correction with its record."""

    losses: pd.DataFrame
    corrections: dict[str, Correction]
    records: dict[str, dict[str, Any]]


def _fit_all(
    pair: Pair, settings: Settings, task: ScoringTask, captures: Mapping[str, Capture], folder: Path
) -> dict[str, _Part]:
    """Fit base, derived and damaged models; each is written when it is finished and read back by a later run."""
    device = settings.device.device
    models = {role: OutputModel.of(capture, device) for role, capture in captures.items()}
    targets = models["base"].splits["fit"].targets
    ids = top_k_ids(targets, settings.top_k, task.special, task.tokenizer_length)
    every_id = real_ids(task.special, task.tokenizer_length)
    parts: dict[str, _Part] = {}
    labels = ["base", "derived", *(f"damaged-{i}" for i in range(settings.n_damage_seeds))]
    with tqdm(labels, desc=f"fit {pair.name}", unit="model") as progress:
        for label in progress:
            progress.set_postfix_str(label)
            part = _read_part(folder, label)
            if part is None:
                model, facts = models.get(label), {}
                if model is None:
                    damage = _damaged(label, parts, models["base"], settings, task)
                    if damage is None:
                        continue
                    model, facts = damage.model, {"noise_sd": damage.noise_sd, "fit_gap": damage.fit_gap}
                part = _fit_model(pair, task, label, model, ids, every_id, facts)
                _write_part(folder, label, part, task)
            parts[label] = part
    return parts


def _damaged(
    label: str, parts: Mapping[str, _Part], base: OutputModel, settings: Settings, task: ScoringTask
) -> controls.Damage | None:
    """Return the matched damaged model of a label such as damaged-3, or None where the pair has no gap on `fit`."""
    loss = {role: mean_loss(parts[role].losses, "fit") for role in ("base", "derived")}
    gap = loss["derived"] - loss["base"]
    if not gap > 0:
        _LOG.info("no damaged models: the gap on fit is %.4g", gap)
        return None
    seed = settings.seed * 1_000_003 + int(label.rsplit("-", 1)[1])
    return controls.matched_head_noise(base, loss["base"], gap, seed, task.tokenizer_length)


def mean_loss(losses: pd.DataFrame, split: str, correction: str = "none") -> float:
    """Return the mean loss of rows of one model, nats per token: a ratio of sums."""
    rows = losses[(losses["split"] == split) & (losses["correction"] == correction)]
    return float(rows["loss_sum"].sum() / rows["tokens"].sum())


def _fit_model(
    pair: Pair,
    task: ScoringTask,
    label: str,
    model: OutputModel,
    ids: torch.Tensor,
    every_id: torch.Tensor,
    facts: dict[str, Any],
) -> _Part:
    chosen = choose_corrections(model, ids, SET_KINDS)
    if not label.startswith("damaged"):
        chosen |= choose_corrections(model, every_id, ("bias_all",))
    corrections = {
        kind: replace(c.correction, vocabulary=task.tokenizer_length, tokenizer=task.tokenizer_hash)
        for kind, c in chosen.items()
    }
    member, control, damage_seed = label, None, None
    if label.startswith("damaged"):
        member, control, damage_seed = "damaged", DAMAGE_CONTROL, int(label.rsplit("-", 1)[1])
    frames = []
    for split in SPLITS:
        states = model.splits[split]
        sums = states.document_sums(model.losses(split, list(corrections.values()))).numpy()
        for row, kind in enumerate(corrections):
            values = {
                "pair": pair.name,
                "member": member,
                "control": control,
                "damage_seed": damage_seed,
                "correction": kind,
                "setting": None,
                "document": list(states.keys),
                "split": split,
                "tokens": states.lengths.numpy(),
                "loss_sum": sums[row],
            }
            frames.append(pd.DataFrame(values))
    table = pd.concat(frames, ignore_index=True)
    table["damage_seed"] = table["damage_seed"].astype("Int64")
    for name in ("pair", "member", "control", "correction", "setting", "document", "split"):
        table[name] = table[name].astype("string")
    return _Part(table, corrections, {kind: _record(c) | facts for kind, c in chosen.items()})


def _record(chosen: Chosen) -> dict[str, Any]:
    """Return what is kept of a fit beside its correction: penalty, selection, convergence."""
    return {
        "kind": chosen.fit.kind,
        "penalty": chosen.fit.penalty,
        "fitted_temperature": chosen.fit.correction.temperature,
        "set_size": int(chosen.fit.correction.ids.numel()),
        "selected_none": chosen.selected_none,
        "select_loss": chosen.select_loss,
        "certified_error": chosen.certified_error,
        **asdict(chosen.fit.convergence),
    }


def _write_part(folder: Path, label: str, part: _Part, task: ScoringTask) -> None:
    for kind, correction in part.corrections.items():
        correction.save(folder / "corrections" / f"{label}-{kind}.safetensors", record=part.records[kind])
    write_table(folder / "parts" / f"{label}.parquet", part.losses)  # last: its presence says the part is whole


def _read_part(folder: Path, label: str) -> _Part | None:
    path = folder / "parts" / f"{label}.parquet"
    if not path.is_file():
        return None
    losses = pd.read_parquet(path)
    corrections, records = {}, {}
    for kind in losses["correction"].unique():
        file = folder / "corrections" / f"{label}-{kind}.safetensors"
        corrections[kind] = Correction.load(file)
        with safe_open(str(file), framework="pt") as opened:
            records[kind] = json.loads(opened.metadata()["note"])["record"]
    return _Part(losses, corrections, records)


def _report(
    pair: Pair,
    settings: Settings,
    task: ScoringTask,
    captures: Mapping[str, Capture],
    described: dict[str, Any],
    parts: Mapping[str, _Part],
    folder: Path,
) -> Study:
    losses = pd.concat([part.losses for part in parts.values()], ignore_index=True)
    shares = recovery_table(losses, n_resamples=settings.n_resamples, seed=settings.seed)
    recovery = add_fits(shares, {label: part.records for label, part in parts.items()}, settings.top_k)
    summary = described | {
        "pair": pair.name,
        "device": settings.device.reason,
        "notes": list(task.notes),
        "corpus": task.corpus.manifest,
        "tokenizer": {"length": task.tokenizer_length, "special": task.special.tolist()},
        "padded_mass": {role: padded_mass(captures[role], settings.device.device) for role in ("base", "derived")},
        "fits": {label: part.records for label, part in parts.items()},
    }
    write_table(folder / "losses.parquet", losses)
    write_table(folder / "recovery.parquet", recovery)
    write_json(folder / "summary.json", summary)
    corrections = {(label, kind): c for label, part in parts.items() for kind, c in part.corrections.items()}
    return Study(pair, losses, recovery, corrections, captures, summary, folder)


def add_fits(shares: pd.DataFrame, records: Mapping[str, Mapping[str, dict[str, Any]]], top_k: int) -> pd.DataFrame:
    """Return the recovery table: shares joined with what the fits' records say, columns in the order of DESIGN §5."""
    rows = []
    for row in shares.to_dict("records"):
        kind = row["correction"]
        damaged = [r[kind] for label, r in records.items() if label.startswith("damaged") and kind in r]
        own = {role: records[role][kind] for role in ("base", "derived")}
        row["top_k"] = own["base"]["set_size"] if kind == "bias_all" else top_k
        for role, record in own.items():
            row[f"temperature_{role}"] = 1.0 if record["selected_none"] else record["fitted_temperature"]
            row[f"penalty_{role}"] = record["penalty"]
            row[f"selected_none_{role}"] = record["selected_none"]
        temperatures = [1.0 if r["selected_none"] else r["fitted_temperature"] for r in damaged]
        row["temperature_damage"] = float(np.mean(temperatures)) if temperatures else None
        statuses = {**{role: r["status"] for role, r in own.items()}}
        statuses |= {f"damaged-{i}": r["status"] for i, r in enumerate(damaged)}
        row["converged"] = not any(s in ("not_converged", "node_edge") for s in statuses.values())
        remarks = [row["reason"]] if row["reason"] else []
        remarks += [f"{label}: {status}" for label, status in statuses.items() if status == "at_bound"]
        if kind == "bias_all" and row["n_damage_seeds"]:
            remarks.append(NOT_DAMAGED)
            row["n_damage_seeds"] = 0
        row["reason"] = "; ".join(remarks) or None
        row["code_version"] = __version__
        rows.append(row)
    after_reason = ["reason", "code_version"]
    columns = [c for c in shares.columns if c not in ("resamples_without_gap", "reason")]
    columns.insert(columns.index("correction") + 1, "top_k")
    columns += [*FIT_COLUMNS, "resamples_without_gap", "converged", *after_reason]
    return pd.DataFrame(rows)[columns]


def padded_mass(capture: Capture, device: torch.device) -> float:
    """Return the mean probability on head rows beyond the tokenizer's length, on `eval`, uncorrected."""
    model = OutputModel.of(capture, device)
    rows, length = model.head.shape[0], capture.manifest["tokenizer_length"]
    if rows <= length:
        return 0.0
    padded = torch.arange(length, rows)
    correction = Correction(padded, torch.zeros(padded.numel()))
    states = model.splits["eval"]
    moments = corrected_moments(states.hidden, model.head, states.targets, correction, readout=model.readout)
    return float(moments.probability_sums.sum()) / len(states.targets)
