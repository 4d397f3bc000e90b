"""Every control of one finished study: other damage, the ladder, what the set leaves out, and sensitivity.

Writes, beside the study's own results:
    controls_losses.parquet   columns of losses.parquet; `control` and `setting` say what a row belongs to
    controls.parquet          a row per analysis, control, setting and correction: `CONTROL_COLUMNS`
    left_out.parquet          mass and loss by group of tokens (`sensitivity.left_out`)
    controls.json             settings, what was refused and why, how much refitting adds
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from . import controls, sensitivity
from .correction import Correction
from .errors import PsdError
from .files import read_json, sha256_of_json, write_json, write_table
from .head import OutputModel
from .ladder import RANKS, Rung, ladder
from .losses import loss_rows, rows_of, typed
from .recovery import DAMAGE_CONTROL, SHARE_COLUMNS, recovery_table
from .selection import choose_corrections
from .sensitivity import PairModels
from .study import SET_KINDS, Settings, Study, score_pair
from .version import __version__

_LOG = logging.getLogger(__name__)

FIT_COLUMNS = (
    "parameters",
    "convex",
    *(f"{what}_{member}" for what in ("status", "gradient_norm", "penalty", "selected_none")
      for member in ("base", "derived", "damaged")),
)  # fmt: skip
CONTROL_COLUMNS = ("pair", "analysis", "control", "setting", "split", *SHARE_COLUMNS[1:], *FIT_COLUMNS, "code_version")
SECOND_TEXT = "demo_reference"


@dataclass(frozen=True)
class ControlSettings:
    """What 03_controls is asked for, beyond the settings of the study it belongs to.

    `ladder_tokens`: tokens of `fit` for the ladder (0: all). `second_text`: a registered text or a path (None: none).
    """

    n_damage_seeds: int = 3
    ladder_tokens: int = 8192
    second_text: str | None = SECOND_TEXT
    n_refits: int = 20
    n_resamples: int = 10_000
    ranks: tuple[int, ...] = RANKS


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
    for a pair is left out, with its reason in `facts["refused"]`.

    Raises:
        PsdError: the folder holds controls of other settings while `overwrite` is False; or a fit cannot be certified.
    """
    chosen = control_settings or ControlSettings()
    values = {"study": study.summary["settings_sha256"], "code_version": __version__, **asdict(chosen)}
    digest = sha256_of_json(values)
    done = _read(study.path)
    if done is not None:
        if done.facts["settings_sha256"] == digest:
            return done
        if not overwrite:
            raise PsdError(f"{study.path} holds controls of other settings; give overwrite=True to replace them")
    pair = _models(study, settings)
    refused: dict[str, str] = {}
    rows = [_damage(study, pair, settings, chosen, refused)]
    rungs, ladder_facts = _ladder(study, pair, settings, chosen, refused)
    rows += [rungs, *_sensitivity(study, pair, settings, chosen, refused)]
    losses = typed(pd.concat([r for r in rows if not r.empty], ignore_index=True))
    table = _table(study, losses, ladder_facts, chosen.n_resamples, settings.seed)
    corrections = {
        role: {kind: study.corrections[role, kind] for kind in ("none", "bias", "bias_temperature")}
        for role in ("base", "derived")
    }
    left_out = sensitivity.left_out(pair, pair.set_of(settings.top_k), corrections)
    facts = {
        "settings": values,
        "settings_sha256": digest,
        "refused": refused,
        "refit": _refit(study, pair, settings, chosen, refused),
    }
    write_table(study.path / "controls_losses.parquet", losses)
    write_table(study.path / "left_out.parquet", left_out)
    write_table(study.path / "controls.parquet", table)
    write_json(study.path / "controls.json", facts)  # last: its presence says that the controls are whole
    written = _read(study.path)
    assert written is not None
    return written


def _read(folder: Path) -> PairControls | None:
    if not (folder / "controls.json").is_file():
        return None
    losses, table, left_out = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("controls_losses", "controls", "left_out")
    )
    return PairControls(losses, table, left_out, read_json(folder / "controls.json"), folder)


def _models(study: Study, settings: Settings) -> PairModels:
    base, derived = (
        OutputModel.of(study.captures[role], settings.device.device, settings.mask_padding)
        for role in ("base", "derived")
    )
    tokenizer = study.summary["tokenizer"]
    special = torch.tensor(tokenizer["special"], dtype=torch.int64)
    return PairModels(study.pair.name, base, derived, special, tokenizer["length"])


def _fit_gap(study: Study) -> tuple[float, float]:
    """Return the base's mean loss on `fit` and the pair's gap there, nats per token."""
    rows = study.losses[(study.losses["split"] == "fit") & (study.losses["correction"] == "none")]
    sums = rows[rows["member"] != "damaged"].groupby("member")[["loss_sum", "tokens"]].sum()
    loss = sums["loss_sum"] / sums["tokens"]
    return float(loss["base"]), float(loss["derived"] - loss["base"])


def _seed(settings: Settings, index: int) -> int:
    return settings.seed * 1_000_003 + index


def _damage(
    study: Study, pair: PairModels, settings: Settings, chosen: ControlSettings, refused: dict[str, str]
) -> pd.DataFrame:
    """Return loss rows of models damaged otherwise than by noise on the head."""
    base_loss, gap = _fit_gap(study)
    length = pair.tokenizer_length
    makers: dict[str, Callable[[int], controls.Damage]] = {
        "hidden_noise": lambda seed: controls.matched_hidden_noise(pair.base, base_loss, gap, seed),
        "permuted_difference": lambda seed: controls.matched_permuted_difference(
            pair.base, pair.derived, base_loss, gap, seed, length
        ),
    }
    frames = []
    for control, make in makers.items():
        for index in range(chosen.n_damage_seeds):
            try:
                damage = make(_seed(settings, index))
            except PsdError as error:
                refused[control] = str(error)
                _LOG.info("%s: %s", control, error)
                break
            _LOG.info("%s %d: sd %.4g, gap on fit %.4f", control, index, damage.noise_sd, damage.fit_gap)
            kinds = choose_corrections(damage.model, pair.set_of(settings.top_k), SET_KINDS)
            corrections = {kind: c.correction for kind, c in kinds.items()}
            labels: dict[str, Any] = {"pair": pair.name, "member": "damaged", "control": control}
            frames.append(loss_rows(damage.model, corrections, **labels, damage_seed=index))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _ladder(
    study: Study, pair: PairModels, settings: Settings, chosen: ControlSettings, refused: dict[str, str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return loss rows of the ladder's rungs on `eval`, and how each fit ended: a row per rung."""
    part = pair if not chosen.ladder_tokens else pair.with_fit(chosen.ladder_tokens)
    models: dict[str, OutputModel] = dict(part.members)
    base_loss, gap = _fit_gap(study)
    try:
        damaged = controls.matched_head_noise(pair.base, base_loss, gap, _seed(settings, 0), pair.tokenizer_length)
        models["damaged"] = replace(part.base, head=damaged.model.head)
    except PsdError as error:
        refused["ladder of the damaged model"] = str(error)
    ids = pair.set_of(settings.top_k)
    frames, facts = [], []
    for member, model in models.items():
        damage = {"control": DAMAGE_CONTROL, "damage_seed": 0} if member == "damaged" else {}
        labels = {"pair": pair.name, "member": member, "control": None, "damage_seed": None} | damage
        plain = model.losses("eval", [None])[0]
        frames.append(rows_of(model.splits["eval"], plain, "eval", "none", "ladder", labels))
        for rung in ladder(model, ids, pair.special, pair.tokenizer_length, chosen.ranks):
            frames.append(rows_of(model.splits["eval"], rung.losses("eval"), "eval", rung.name, "ladder", labels))
            facts.append(_rung_facts(member, rung))
            _LOG.info("ladder, %s, %s: %s, %d evaluations", member, rung.name, rung.status, rung.evaluations)
    wide = pd.DataFrame(facts).pivot(index=["correction", "parameters", "convex"], columns="member")
    wide.columns = pd.Index(["_".join(map(str, name)) for name in wide.columns])
    return typed(pd.concat(frames, ignore_index=True)), wide.reset_index()


def _rung_facts(member: str, rung: Rung) -> dict[str, Any]:
    return {
        "member": member,
        "correction": rung.name,
        "parameters": rung.parameters,
        "convex": rung.convex,
        "status": rung.status,
        "gradient_norm": rung.gradient_norm,
        "penalty": rung.penalty,
        "selected_none": rung.selected_none,
    }


def _sensitivity(
    study: Study, pair: PairModels, settings: Settings, chosen: ControlSettings, refused: dict[str, str]
) -> Iterable[pd.DataFrame]:
    """Yield loss rows for other sets, penalties, amounts of text, and another text."""
    ids = pair.set_of(settings.top_k)
    frames, impossible = sensitivity.set_sizes(pair)
    refused |= impossible
    yield from frames
    special = pair.special[pair.special < pair.tokenizer_length]
    if special.numel():
        # special ids hardly ever occur as targets, so they would not enter the set by their counts
        yield sensitivity.with_set(pair, torch.cat([ids, special]).unique(), "specials allowed")
    yield from sensitivity.penalties(pair, ids)
    yield from sensitivity.amounts(pair, settings.top_k)
    if chosen.second_text:
        try:
            _, captures = score_pair(study.pair, replace(settings, text=chosen.second_text))
        except PsdError as error:
            refused[f"text={chosen.second_text}"] = str(error)
            return
        second = _models(replace(study, captures=captures), settings)
        own = second.set_of(settings.top_k)
        yield sensitivity.with_set(second, own, f"text={chosen.second_text}")
        fitted: dict[str, dict[str, Correction]] = {
            role: {kind: study.corrections[role, kind] for kind in sensitivity.KINDS} for role in second.members
        }
        yield sensitivity.transferred(second, fitted, f"text={chosen.second_text}, fitted on the first")


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
        tables.append(shares(undamaged, split).assign(analysis="in-sample", split=split, setting=f"split={split}"))
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
