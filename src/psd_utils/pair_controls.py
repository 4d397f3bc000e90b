"""Every control of one finished study: other damage, the ladder, what the set leaves out, and sensitivity.

Writes, beside the study's own results:
    controls_losses.parquet   columns of losses.parquet; `control` and `setting` say what a row belongs to
    controls.parquet          a row per analysis, control, setting and correction: `CONTROL_COLUMNS`
    left_out.parquet          mass and loss by group of tokens (`sensitivity.left_out`)
    controls.json             settings, what was refused and why, how much refitting adds
    control_parts/            loss rows of the steps that are finished, while a run is under way: a killed run resumes
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock
from tqdm.auto import tqdm

from . import sensitivity
from .control_steps import RUNG_FACTS, ControlSettings, corrections_of, fit_gap, pair_models, steps, with_damage
from .errors import PsdError
from .files import read_json, read_table, sha256_of_file, sha256_of_json, write_json, write_table
from .losses import typed
from .recovery import DAMAGE_CONTROL, LOSS_COLUMNS, SHARE_COLUMNS, recovery_table
from .sensitivity import PairModels
from .settings import Settings
from .study import Study
from .version import __version__

_LOG = logging.getLogger(__name__)

FIT_COLUMNS = (
    "parameters",
    "convex",
    *(f"{what}_{member}" for what in ("status", "gradient_norm", "penalty", "selected_none")
      for member in ("base", "derived", "damaged")),
)  # fmt: skip
CONTROL_COLUMNS = ("pair", "analysis", "control", "setting", "split", *SHARE_COLUMNS[1:], *FIT_COLUMNS, "code_version")


@dataclass(frozen=True)
class PairControls:
    """The tables that `run_controls` wrote, and its facts (`refused`, `refit`, `settings`)."""

    losses: pd.DataFrame
    table: pd.DataFrame
    left_out: pd.DataFrame
    facts: Mapping[str, Any]
    path: Path


def run_controls(
    study: Study, settings: Settings, control_settings: ControlSettings | None = None, overwrite: bool = False
) -> PairControls:
    """Return the controls of a finished study; a finished run with the same settings is read back from disk.

    `settings` are those of the study. Shares are fractions of the gap, losses nats per token. What is not possible
    for a pair is left out, with its reason in `facts["refused"]`. A killed run goes on after its last finished step.

    Raises:
        PsdError: `settings` are not the study's, or those of the controls are out of range; the study was loaded
            without its captures; the folder holds controls of other settings while `overwrite` is False, or by now
            another study; a table cannot be written; or a fit cannot be certified.
    """
    chosen = control_settings or ControlSettings()
    _check_settings(study, settings, chosen)
    values = {"study": study.summary["settings_sha256"], "code_version": __version__, **asdict(chosen)}
    if chosen.second_text and Path(chosen.second_text).expanduser().is_file():
        values["second_text_sha256"] = sha256_of_file(Path(chosen.second_text).expanduser())
    digest = sha256_of_json(values)
    locks = study.path.parent / ".locks"
    locks.mkdir(exist_ok=True)
    with FileLock(locks / f"{study.path.name}.controls"):
        done = read_controls(study.path)
        if done is not None:
            if done.facts["settings_sha256"] == digest:
                return done
            if not overwrite:
                raise PsdError(f"{study.path} holds controls of other settings; give overwrite=True to replace them")
        _check_current(study)
        if not study.captures:
            raise PsdError(f"{study.pair.name} was loaded without its captures: give the study that run_study returns")
        _compute(study, settings, chosen, {"settings": values, "settings_sha256": digest})
        written = read_controls(study.path)
    assert written is not None
    return written


def _check_settings(study: Study, settings: Settings, chosen: ControlSettings) -> None:
    """Check what would mix numbers of two runs, or be refused only at the end of hours."""
    own = study.summary["settings"]
    other = [name for name in ("top_k", "seed", "mask_padding") if own[name] != getattr(settings, name)]
    if other:
        found = ", ".join(f"{name}: {own[name]!r} there, {getattr(settings, name)!r} here" for name in other)
        raise PsdError(f"{study.path} is a study of other settings ({found}): give run_controls those of the study")
    for name, least in (("n_damage_seeds", 0), ("ladder_tokens", 0), ("n_refits", 2), ("n_resamples", 100)):
        if getattr(chosen, name) < least:
            raise PsdError(f"the controls' {name} must be at least {least}, found {getattr(chosen, name)!r}")


def _check_current(study: Study) -> None:
    """Check that the folder still holds this study: another run may have replaced it in the meantime."""
    if read_json(study.path / "summary.json").get("settings_sha256") != study.summary["settings_sha256"]:
        raise PsdError(f"{study.path} now holds a study with other settings; load it and run its controls anew")


def _compute(study: Study, settings: Settings, chosen: ControlSettings, described: dict[str, Any]) -> None:
    """Run every step and write the tables."""
    refused: dict[str, str] = {}
    pair = pair_models(study, settings)
    try:
        pair = with_damage(pair, *fit_gap(study), settings)
    except PsdError as error:
        refused["damage by noise on the head"] = str(error)
    frames, parts = [], study.path / "control_parts"
    # parts of other settings are of no use to this run
    own = parts / str(described["settings_sha256"])[:16]
    for other in parts.glob("*") if parts.is_dir() else ():
        if other != own:
            shutil.rmtree(other)
    with tqdm(list(steps(study, pair, settings, chosen)), desc=f"controls {pair.name}", unit="step") as progress:
        for name, make in progress:
            progress.set_postfix_str(name)
            path = own / f"{sha256_of_json(name)[:16]}.parquet"
            if not path.is_file():
                try:
                    made = make()
                except PsdError as error:
                    refused[name.partition(", seed ")[0]] = str(error)
                    _LOG.info("left out, %s: %s", name, error)
                    continue
                write_table(path, made)  # a full disk stops the run, and is no property of the pair
            frames.append(read_table(path))
    rows = pd.concat(frames, ignore_index=True)
    losses = typed(rows[list(LOSS_COLUMNS)])
    table = _table(study, losses, _rung_facts(rows), chosen.n_resamples, settings.seed)
    left_out = sensitivity.left_out(pair, pair.set_of(settings.top_k), corrections_of(study, pair))
    facts = described | {"refused": refused, "refit": _refit(study, pair, settings, chosen, refused)}
    _check_current(study)
    (study.path / "controls.json").unlink(missing_ok=True)  # of the controls that are replaced: it vouches for them
    write_table(study.path / "controls_losses.parquet", losses)
    write_table(study.path / "left_out.parquet", left_out)
    write_table(study.path / "controls.parquet", table)
    write_json(study.path / "controls.json", facts)  # last: its presence says that the controls are whole
    shutil.rmtree(parts)


def read_controls(folder: Path) -> PairControls | None:
    """Return the finished controls in a study's folder, or None if there are none, or only those of another study.

    Raises:
        PsdError: a file is missing or damaged.
    """
    if not (folder / "controls.json").is_file():
        return None
    facts = read_json(folder / "controls.json")
    summary = read_json(folder / "summary.json") if (folder / "summary.json").is_file() else {}
    if facts.get("settings", {}).get("study") != summary.get("settings_sha256"):
        _LOG.warning("left out: the controls in %s are those of another study; run 03_controls for it again", folder)
        return None
    losses, table, left_out = (
        read_table(folder / f"{name}.parquet") for name in ("controls_losses", "controls", "left_out")
    )
    return PairControls(losses, table, left_out, facts, folder)


def _rung_facts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how the ladder's fits ended: a row per rung, a column per fact and member."""
    once = rows[rows["setting"].eq("ladder") & rows["correction"].ne("none")].drop_duplicates(["member", "correction"])
    whole = ["correction", "parameters", "convex"]
    wide = once.pivot(index=whole, columns="member", values=[name for name in RUNG_FACTS if name not in whole])
    wide.columns = pd.Index(["_".join(map(str, name)) for name in wide.columns])
    return wide.reset_index()


def _table(study: Study, losses: pd.DataFrame, ladder_facts: pd.DataFrame, n_resamples: int, seed: int) -> pd.DataFrame:
    def shares(rows: pd.DataFrame, split: str = "eval") -> pd.DataFrame:
        return recovery_table(rows.assign(setting=None), n_resamples=n_resamples, seed=seed, split=split)

    undamaged = study.losses[study.losses["member"] != "damaged"]
    tables = []
    damaged = {DAMAGE_CONTROL: study.losses[study.losses["control"] == DAMAGE_CONTROL]}
    own = losses[losses["setting"].isna()]
    damaged |= {str(name): rows for name, rows in own.groupby("control", sort=False)}
    for control, rows in damaged.items():
        # the table knows one damage control; each is given to it in turn
        together = pd.concat([undamaged, rows.assign(control=DAMAGE_CONTROL)], ignore_index=True)
        tables.append(shares(together).assign(analysis="damage", control=control, split="eval"))
    for split in ("fit", "eval"):
        tables.append(shares(study.losses, split).assign(analysis="in-sample", split=split, setting=f"split={split}"))
    for setting, rows in losses[losses["setting"].notna()].groupby("setting", sort=False):
        analysis = "ladder" if setting == "ladder" else "sensitivity"
        table = shares(rows).assign(analysis=analysis, setting=setting, split="eval")
        tables.append(table.merge(ladder_facts, on="correction", how="left") if analysis == "ladder" else table)
    table = pd.concat([t.dropna(axis=1, how="all") for t in tables], ignore_index=True)
    return table.assign(code_version=__version__).reindex(columns=list(CONTROL_COLUMNS))


def _refit(
    study: Study, pair: PairModels, settings: Settings, chosen: ControlSettings, refused: dict[str, str]
) -> dict[str, Any] | None:
    row = study.recovery[study.recovery["correction"] == "bias_temperature"].iloc[0]
    if pd.isna(row["symmetric_share"]):
        refused["refitting inside the bootstrap"] = str(row["reason"])
        return None
    penalty = {role: float(row[f"penalty_{role}"]) for role in ("base", "derived")}
    ids = pair.set_of(settings.top_k)
    return asdict(sensitivity.refit_spread(pair, ids, penalty, chosen.n_refits, settings.seed))
