"""The whole path for one pair: score, fit, select, certify, damage, report."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock
from tqdm.auto import tqdm

from . import controls
from .capture import Capture, capture_key
from .correction import KINDS, Correction
from .errors import PsdError
from .files import read_json, read_table, sha256_of_json, write_json, write_table
from .fit_records import add_fits
from .head import OutputModel, real_ids, top_k_ids
from .kernels import corrected_moments
from .pairs import Pair, resolved
from .parts import Part, fit_part, read_part, write_part
from .paths import captures_dir, results_dir
from .recovery import recovery_table
from .score import ScoringTask, capture_identity, prepare, score_member
from .settings import Settings, resolve_settings
from .token_table import token_table
from .version import __version__

_LOG = logging.getLogger(__name__)

SET_KINDS = tuple(kind for kind in KINDS if kind != "bias_all")

_WRITTEN = ("losses", "loss_profile", "recovery", "tokens", "summary")


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


def score_pair(
    pair: Pair, settings: Settings, members: tuple[str, ...] = ("base", "derived")
) -> tuple[ScoringTask, dict[str, Capture]]:
    """Score the members of a pair that have no capture yet; return what they read, and their captures.

    Raises:
        PsdError: as `prepare` and `score_member`.
    """
    task = prepare(pair, settings.text, settings.n_tokens)
    return task, _score_members(pair, settings, task, members)


def _score_members(pair: Pair, settings: Settings, task: ScoringTask, members: tuple[str, ...]) -> dict[str, Capture]:
    # facts of the registry are about the base
    facts = {"base": pair.facts, "derived": None}
    return {role: score_member(task, role, settings.device, captures_dir(), facts[role]) for role in members}


def run_study(
    pair: Pair,
    *,
    text: str | Path | None = None,
    n_tokens: int | None = None,
    top_k: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    seed: int = 0,
    n_damage_seeds: int = 5,
    n_resamples: int = 10_000,
    out_dir: str | Path | None = None,
    overwrite: bool = False,
    mask_padding: bool = False,
) -> Study:
    """Return the study of one pair: every correction for base, derived and matched damaged models, with intervals.

    What is on disk already is used: captures, and the models of an earlier run with the same settings that were
    finished before it was killed. None stands for the registry's value or the default (1,000,000 tokens, 4,096 ids).
    `mask_padding` takes head rows beyond the tokenizer's length out of the softmax.

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
        mask_padding=mask_padding,
    )
    task = prepare(pair, settings.text, settings.n_tokens)
    folder = settings.out_dir / pair.name
    described = _describe(settings, task)
    locks = settings.out_dir / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PsdError(f"out_dir {settings.out_dir} cannot be written: {error}") from error
    with FileLock(locks / pair.name):
        _claim(folder, described, overwrite)  # before scoring, which may take hours
        captures = _score_members(pair, settings, task, ("base", "derived"))
        fit_end = int(task.corpus.offsets[task.corpus.split_ends[0]])
        tokens = token_table(task.tokenizer, task.corpus.tokens[:fit_end], task.special)
        parts = _fit_all(pair, settings, task, captures, tokens, folder)
        # ids that never occur say little, and a large vocabulary has very many of them
        write_table(folder / "tokens.parquet", tokens[(tokens["count"] > 0) | (tokens["token_class"] == "special")])
        return _report(pair, settings, task, captures, described, parts, folder)


def load_study(pair: Pair, out_dir: str | Path | None = None) -> Study:
    """Return a finished study from its folder, without any model.

    Raises:
        PsdError: there is no finished study of the pair.
    """
    folder = (Path(out_dir).expanduser().resolve() if out_dir else results_dir()) / pair.name
    summary = read_json(folder / "summary.json") if (folder / "summary.json").is_file() else {}
    if "fits" not in summary:
        raise PsdError(f"no finished study of {pair.name} in {folder}: run 02_fit for it first")
    corrections = {}
    for path in sorted((folder / "corrections").glob("*.safetensors")):
        member, kind = path.stem.rsplit("-", 1)
        corrections[member, kind] = Correction.load(path)
    wanted = {(member, kind) for member, kinds in summary["fits"].items() for kind in kinds}
    if missing := sorted("-".join(name) for name in wanted - corrections.keys()):
        raise PsdError(f"{folder / 'corrections'} lacks {', '.join(missing)}: run 02_fit again, it says how")
    losses, recovery = (read_table(folder / name) for name in ("losses.parquet", "recovery.parquet"))
    return Study(pair, losses, recovery, corrections, {}, summary, folder)


def _describe(settings: Settings, task: ScoringTask) -> dict[str, Any]:
    """Return everything that decides the numbers of a run; its hash tells one run from another.

    The models are in the captures' keys, by content or commit, whatever path they were given by.
    """
    values = {
        "captures": {role: capture_key(capture_identity(task, role, settings.device)) for role in ("base", "derived")},
        "top_k": settings.top_k,
        "seed": settings.seed,
        "n_damage_seeds": settings.n_damage_seeds,
        "n_resamples": settings.n_resamples,
        "mask_padding": settings.mask_padding,
        "code_version": __version__,
    }
    return {"settings": values, "settings_sha256": sha256_of_json(values)}


def _claim(folder: Path, described: dict[str, Any], overwrite: bool) -> None:
    """Make the folder this run's: refuse another run's results unless `overwrite` says so."""
    # of a run that was killed while writing; controls and the explorer, which may be at work, have other files
    for pattern in (*(f".{name}.*.tmp" for name in _WRITTEN), "parts/.*.tmp", "corrections/.*.tmp"):
        for leftover in folder.glob(pattern):
            leftover.unlink()
    summary = folder / "summary.json"
    earlier: dict[str, Any] = {}
    if summary.is_file() and not overwrite:
        earlier = read_json(summary)
        if earlier.get("settings_sha256") != described["settings_sha256"]:
            raise PsdError(
                f"{folder} holds the results of other settings ({_differences(earlier, described)}); "
                "give another out_dir, or overwrite=True to replace them"
            )
    elif summary.is_file():
        earlier = _read_if_whole(summary)
    if earlier.get("settings_sha256") != described["settings_sha256"]:
        # without a summary nobody knows whose parts these are
        for name in ("parts", "corrections", "control_parts"):
            if (folder / name).exists():
                shutil.rmtree(folder / name)
        (folder / "controls.json").unlink(missing_ok=True)  # before the tables that it vouches for
        for path in folder.glob("*.parquet"):
            path.unlink()
        write_json(summary, described)


def _read_if_whole(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except PsdError:
        return {}


def _differences(earlier: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    old, new = earlier.get("settings"), described["settings"]
    if not isinstance(old, dict):
        return "its summary.json does not say which"
    names = [name for name in new if old.get(name) != new[name]]
    return ", ".join(f"{name}: {old.get(name)!r} there, {new[name]!r} now" for name in names)


def _fit_all(
    pair: Pair,
    settings: Settings,
    task: ScoringTask,
    captures: Mapping[str, Capture],
    tokens: pd.DataFrame,
    folder: Path,
) -> dict[str, Part]:
    """Fit base, derived and damaged models; each is written when it is finished and read back by a later run."""
    device = settings.device.device
    fit_end = int(task.corpus.offsets[task.corpus.split_ends[0]])
    ids = top_k_ids(task.corpus.tokens[:fit_end], settings.top_k, task.special, task.tokenizer_length)
    sets = {SET_KINDS: ids}
    every_kind = sets | {("bias_all",): real_ids(task.special, task.tokenizer_length)}
    parts: dict[str, Part] = {}
    base: OutputModel | None = None
    labels = ["base", "derived", *(f"damaged-{i}" for i in range(settings.n_damage_seeds))]
    with tqdm(labels, desc=f"fit {pair.name}", unit="model") as progress:
        for label in progress:
            progress.set_postfix_str(label)
            part = read_part(folder, label)
            if part is None:
                facts: dict[str, Any] = {}
                if label == "derived":
                    model = OutputModel.of(captures[label], device, settings.mask_padding)
                else:
                    base = model = base or OutputModel.of(captures["base"], device, settings.mask_padding)
                if label.startswith("damaged"):
                    damage = _damaged(label, parts, model, settings, task)
                    if damage is None:
                        break
                    model, facts = damage.model, {"noise_sd": damage.noise_sd, "fit_gap": damage.fit_gap}
                part = fit_part(
                    model,
                    sets if label.startswith("damaged") else every_kind,
                    pair=pair.name,
                    label=label,
                    vocabulary=task.tokenizer_length,
                    tokenizer=task.tokenizer_hash,
                    tokens=tokens,
                    facts=facts,
                )
                write_part(folder, label, part)
            parts[label] = part
    return parts


def _damaged(
    label: str, parts: Mapping[str, Part], base: OutputModel, settings: Settings, task: ScoringTask
) -> controls.Damage | None:
    """Return the matched damaged model of a label such as damaged-3, or None where the pair has no gap on `fit`."""
    base_loss = parts["base"].mean_loss("fit")
    gap = parts["derived"].mean_loss("fit") - base_loss
    if not gap > 0:
        _LOG.info("no damaged models: the gap on fit is %.4g nats per token", gap)
        return None
    seed = controls.damage_seed(settings.seed, int(label.rsplit("-", 1)[1]))
    return controls.matched_head_noise(base, base_loss, gap, seed, task.tokenizer_length)


def _report(
    pair: Pair,
    settings: Settings,
    task: ScoringTask,
    captures: Mapping[str, Capture],
    described: dict[str, Any],
    parts: Mapping[str, Part],
    folder: Path,
) -> Study:
    losses = pd.concat([part.losses for part in parts.values()], ignore_index=True)
    shares = recovery_table(losses, n_resamples=settings.n_resamples, seed=settings.seed)
    recovery = add_fits(shares, {label: part.records for label, part in parts.items()})
    summary = described | {
        "pair": pair.name,
        "base": asdict(resolved(pair.base)),
        "derived": asdict(resolved(pair.derived)),
        "device": settings.device.reason,
        "notes": list(task.notes),
        "corpus": task.corpus.manifest,
        "tokenizer": {"length": task.tokenizer_length, "special": task.special.tolist()},
        "padded_mass": {role: padded_mass(captures[role], settings.device.device) for role in ("base", "derived")},
        "fits": {label: part.records for label, part in parts.items()},
    }
    profile = pd.concat([part.profile for part in parts.values()], ignore_index=True)
    write_table(folder / "losses.parquet", losses)
    write_table(folder / "loss_profile.parquet", profile)
    write_table(folder / "recovery.parquet", recovery)
    write_json(folder / "summary.json", summary)
    corrections = {(label, kind): c for label, part in parts.items() for kind, c in part.corrections.items()}
    return Study(pair, losses, recovery, corrections, captures, summary, folder)


def padded_mass(capture: Capture, device: torch.device) -> float:
    """Return the mean probability on head rows beyond the tokenizer's length, on `eval`, uncorrected."""
    head, readout = capture.head()
    rows, length = head.shape[0], capture.manifest["tokenizer_length"]
    if rows <= length:
        return 0.0
    padded = torch.arange(length, rows)
    correction = Correction(padded, torch.zeros(padded.numel()))
    states = capture.states("eval")
    moments = corrected_moments(states.hidden, head.to(device), states.targets, correction, readout=readout)
    return float(moments.probability_sums.sum()) / len(states.targets)
