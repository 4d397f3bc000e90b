"""Tables and sentences for readers, from a study's tables; numbers are rounded here and nowhere else."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .capture import Capture
from .cells import number, with_interval, with_spread
from .decision import decide
from .drawing import correction_label, rung_label
from .errors import PsdError
from .files import read_json
from .pairs import Member, Pair
from .paths import results_dir
from .settings import Settings
from .sources import load_tokenizer, locate
from .study import Study, load_study
from .study_figures import largest_biases

_LOG = logging.getLogger(__name__)


def settings_table(pair: Pair, settings: Settings) -> pd.DataFrame:
    """Return what a run was asked for, a row per setting."""
    rows = {
        "pair": pair.name,
        "base": pair.base.label,
        "derived": pair.derived.label,
        "text": settings.text or pair.text,
        "tokens asked for": settings.n_tokens,
        "device": settings.device.reason,
        "note": pair.note or "–",
    }
    return pd.DataFrame({"value": rows})


def document_losses(captures: Mapping[str, Capture]) -> pd.DataFrame:
    """Return uncorrected losses by document: `member, split, document, tokens, loss_sum` (nats)."""
    frames = []
    for role, capture in captures.items():
        corpus = capture.corpus
        sums = [float(piece.double().sum()) for piece in capture.nll().split(corpus.lengths.tolist())]
        splits = [corpus.split_of(d) for d in range(len(corpus.keys))]
        values = {"member": role, "split": splits, "document": corpus.keys, "tokens": corpus.lengths, "loss_sum": sums}
        frames.append(pd.DataFrame(values))
    return pd.concat(frames, ignore_index=True)


def split_table(losses: pd.DataFrame) -> pd.DataFrame:
    """Return documents, tokens and mean loss (nats per token) by member and split."""
    groups = losses.groupby(["member", "split"], sort=False)
    table = groups.agg(documents=("document", "size"), tokens=("tokens", "sum"), loss=("loss_sum", "sum"))
    table["loss"] = (table["loss"] / table["tokens"]).round(4)
    return table.rename(columns={"loss": "loss (nats/token)"})


def capture_table(captures: Mapping[str, Capture]) -> pd.DataFrame:
    """Return where each capture lies and what is in it."""
    rows = []
    for role, capture in captures.items():
        weight, _ = capture.head()
        rows.append(
            {
                "member": role,
                "capture": capture.key,
                "head rows": weight.shape[0],
                "width": weight.shape[1],
                "stored dtype": capture.manifest["stored_dtype"],
                "scored in": capture.manifest["identity"]["dtype"],
            }
        )
    return pd.DataFrame(rows).set_index("member")


def counts_of_captures(captures: Mapping[str, Capture]) -> str:
    """Return how much was scored, and the gap where both members were, in one line."""
    losses = document_losses(captures)
    documents, tokens = losses["document"].nunique(), losses.drop_duplicates("document")["tokens"].sum()
    line = f"{len(captures)} models scored on {documents:,} documents, {tokens:,} tokens"
    sums = losses[losses["split"] == "eval"].groupby("member")[["loss_sum", "tokens"]].sum()
    if len(captures) < 2:
        return line
    means = sums["loss_sum"] / sums["tokens"]
    return f"{line}; gap on eval {means['derived'] - means['base']:+.4f} nats per token"


def share_table(recovery: pd.DataFrame) -> pd.DataFrame:
    """Return shares with their intervals as text, a row per pair and correction, the uncorrected left out."""
    rows = recovery[recovery["correction"] != "none"]
    table = pd.DataFrame(
        {
            "pair": rows["pair"],
            "correction": rows["correction"].map(correction_label),
            "gap": with_interval(rows, "gap", "gap_low", "gap_high", 4),
            "raw share": with_interval(rows, "raw_share", "raw_low", "raw_high", 3),
            "symmetric share": with_interval(rows, "symmetric_share", "symmetric_low", "symmetric_high", 3),
            "damage share": with_spread(rows["damage_share"], rows["damage_sd"], 3),
            "excess share": with_interval(rows, "excess_share", "excess_low", "excess_high", 3),
            "reason": rows["reason"].astype("string").fillna(""),
        }
    )
    return table.set_index(["pair", "correction"])


def loss_table(recovery: pd.DataFrame) -> pd.DataFrame:
    """Return losses and gains in nats per token, a row per pair and correction."""
    columns = ["pair", "correction", "loss_base", "loss_derived", "gain_base", "gain_derived"]
    table = recovery[columns].copy()
    table["correction"] = table["correction"].map(correction_label)
    return table.set_index(["pair", "correction"]).round(4)


def temperature_table(recovery: pd.DataFrame) -> pd.DataFrame:
    """Return fitted temperatures, a row per pair and kind that has one."""
    rows = recovery[recovery["correction"].isin(["temperature", "bias_temperature"])]
    columns = ["pair", "correction", "temperature_base", "temperature_derived", "temperature_damage"]
    table = rows[columns].copy()
    table["correction"] = table["correction"].map(correction_label)
    return table.set_index(["pair", "correction"]).round(4)


def fit_table(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Return how every fit ended: status, evaluations, gradient norm, certified error, penalty."""
    rows = [
        {"model": label, "correction": correction_label(kind), **record}
        for label, kinds in summary["fits"].items()
        for kind, record in kinds.items()
        if kind != "none"
    ]
    columns = ["status", "iterations", "gradient_norm", "certified_error", "penalty", "selected_none"]
    return pd.DataFrame(rows).set_index(["model", "correction"])[columns]


def bias_table(study: Study, member: str, kind: str, n: int = 30) -> pd.DataFrame:
    """Return the largest biases with their decoded tokens and how often each is a target in `fit`; empty if none."""
    correction = study.corrections[member, kind]
    tokenizer = load_tokenizer(locate(study.pair.base, weights=False))
    texts = [repr(tokenizer.decode([i])) for i in correction.ids.tolist()] if tokenizer else []
    capture = study.captures["base"]
    counts = capture.states("fit").targets.bincount(minlength=int(correction.vocabulary or 0))
    return largest_biases(correction.bias.tolist(), texts, counts[correction.ids].tolist(), n)


def sentences(recovery: pd.DataFrame) -> list[str]:
    """Return what each pair's table says, in words: one sentence per pair on its bias-and-temperature share."""
    return [_sentence(str(pair), rows) for pair, rows in recovery.groupby("pair", sort=False)]


def _sentence(pair: str, rows: pd.DataFrame) -> str:
    row = rows[rows["correction"] == "bias_temperature"].iloc[0]
    if pd.isna(row["symmetric_share"]):
        return f"{pair}: no share is defined ({row['reason']})."
    if row["gain_derived"] < 0:
        worse = f"make the derived model worse on eval, by {-row['gain_derived']:.4f} nats/token"
        return f"{pair}: bias and temperature {worse}: they overfit, so give more text; nothing is given back."
    share = f"{row['symmetric_share']:.1%} of its {row['gap']:.3f} nats/token gap"
    start = f"{pair}: bias and temperature give back {share} beyond what they give the base"
    if pd.isna(row["damage_share"]):
        return f"{start}; no damage control was run, so this must not be read as a prior shift."
    damage = f"random damage of the same size gives back {row['damage_share']:.1%}"
    if pd.isna(row["excess_low"]):
        return f"{start}; {damage}; the excess has no interval."
    if row["n_damage_seeds"] < 2:
        return f"{start}; {damage}, by a single damage seed: run more seeds before comparing them."
    interval = f"excess {row['excess_share']:+.1%}, 95 % interval {row['excess_low']:+.1%} to {row['excess_high']:+.1%}"
    if row["excess_low"] > 0:
        verdict = "more of this loss than of random damage sits in a fixed prior or temperature"
    elif row["excess_high"] < 0:
        verdict = "they undo less of what was lost than of random damage"
    else:
        verdict = "the share does not exceed its damage control"
    return f"{start}; {damage} ({interval}): {verdict}."


def verdict_table(recovery: pd.DataFrame, controls: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return what the decision rule says of every pair, a row per pair; `controls` is controls.parquet of any pairs."""
    rows = []
    for pair, own in recovery.groupby("pair", sort=False):
        ladder = None if controls is None else controls[controls["pair"] == pair]
        rows.append({"pair": pair, "is its loss fixable at the output layer?": decide(own, ladder).verdict})
    return pd.DataFrame(rows).set_index("pair")


def ladders_table(ladder: pd.DataFrame) -> pd.DataFrame:
    """Return the symmetric share that each rung of the ladder gives back, beside that of the matched damage.

    A row per rung and a column per pair. `ladder` holds the ladder's rows of controls.parquet of any pairs.
    """
    rows = ladder[ladder["correction"] != "none"]
    own = with_interval(rows, "symmetric_share", "symmetric_low", "symmetric_high", 3)
    shown = pd.DataFrame(
        {
            "rung": rows["correction"].map(rung_label),
            "pair": rows["pair"],
            "share": [
                f"{share}; damage {number(damage, 3)}" for share, damage in zip(own, rows["damage_share"], strict=True)
            ],
        }
    )
    return shown.pivot(index="rung", columns="pair", values="share").loc[list(dict.fromkeys(shown["rung"]))]


def finished_studies(out_dir: str | None, pair: str | None = None) -> list[Study]:
    """Return the finished studies in a results folder, or the one of `pair`; unfinished ones are left out, and named.

    Raises:
        PsdError: there are none; the message says what to run.
    """
    folder = Path(out_dir).expanduser().resolve() if out_dir else results_dir()
    names = sorted(path.parent.name for path in folder.glob("*/recovery.parquet"))
    if pair:
        names = [name for name in names if name == pair]
    if not names:
        what = f"of pair {pair} " if pair else ""
        raise PsdError(f"no finished study {what}in {folder}: run 02_fit first, with the same out_dir")
    studies = []
    for name in names:
        described = read_json(folder / name / "summary.json") if (folder / name / "summary.json").is_file() else {}
        if "fits" not in described:
            _LOG.warning("left out: the study in %s is not finished; run 02_fit for it again", folder / name)
            continue
        if described["pair"] != name:
            _LOG.warning("left out: %s holds a study of %s, under another name", folder / name, described["pair"])
            continue
        own = Pair(base=Member(**described["base"]), derived=Member(**described["derived"]), name=name)
        studies.append(load_study(own, folder))
    if not studies:
        raise PsdError(f"no study in {folder} is finished: run 02_fit again for {', '.join(names)}")
    return studies


def figures_folder(out_dir: str | None) -> Path:
    """Return the folder of figures in a results folder."""
    folder = (Path(out_dir).expanduser().resolve() if out_dir else results_dir()) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
