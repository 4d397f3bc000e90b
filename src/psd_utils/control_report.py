"""Tables and sentences of 03_controls, from the tables of `known_answers` and `pair_controls`; rounded here."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .cells import number, with_interval, with_spread
from .control_figures import control_label
from .decision import best_rung, share_beside_damage
from .drawing import correction_label, rung_label
from .pair_controls import PairControls
from .worlds import WORLDS

_QUANTITIES = {
    "symmetric_share": "symmetric share",
    "raw_share": "raw share",
    "temperature_derived": "T",
}


def world_table(judged: pd.DataFrame) -> pd.DataFrame:
    """Return published, expected and found values with their verdicts, a row per claim (`known_answers.judge`)."""
    rows = []
    for row in judged.to_dict("records"):
        quantity, kind = row["quantity"].split(".")
        expected = row["expected"]
        found = "undefined" if pd.isna(row["found"]) else f"{row['found']:.3f}"
        if pd.notna(row["found"]) and pd.notna(row["sd"]):
            found += f" ± {row['sd']:.3f}"
        rows.append(
            {
                "world": WORLDS[row["world"]][0],
                "quantity": f"{_QUANTITIES[quantity]}, {correction_label(kind)}",
                "published": row["published"] or "–",
                "expected": expected if isinstance(expected, str) else f"{expected:.3g}",
                "found": found,
                "verdict": row["verdict"],
            }
        )
    return pd.DataFrame(rows).set_index(["world", "quantity"])


def damage_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each kind of matched damage beside the pair's own, a row per correction and control."""
    rows = table[(table["analysis"] == "damage") & ~table["correction"].isin(["none", "bias_all"])]
    shown = pd.DataFrame(
        {
            "correction": rows["correction"].map(correction_label),
            "damage": rows["control"].map(control_label),
            "symmetric share": with_interval(rows, "symmetric_share", "symmetric_low", "symmetric_high", 3),
            "damage share": with_spread(rows["damage_share"], rows["damage_sd"], 3),
            "seeds": rows["n_damage_seeds"],
            "excess share": with_interval(rows, "excess_share", "excess_low", "excess_high", 3),
        }
    )
    return shown.set_index(["correction", "damage"]).sort_index(level=0, sort_remaining=False)


def ladder_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rungs of the ladder: gains in nats per token, shares, and how each fit ended."""
    rows = table[(table["analysis"] == "ladder") & (table["correction"] != "none")]
    shown = {
        "rung": rows["correction"].map(rung_label),
        "parameters": rows["parameters"].astype("Int64"),
        "gain base": rows["gain_base"].round(4),
        "gain derived": rows["gain_derived"].round(4),
        "symmetric share": with_interval(rows, "symmetric_share", "symmetric_low", "symmetric_high", 3),
        "damage share": [number(v, 3) for v in rows["damage_share"]],
        "convex": rows["convex"],
        "end (derived)": rows["status_derived"],
        "gradient norm (derived)": [f"{v:.1e}" for v in rows["gradient_norm_derived"]],
        "penalty (derived)": rows["penalty_derived"],
        "not used (derived)": rows["selected_none_derived"],
    }
    return pd.DataFrame(shown).set_index("rung")


def sensitivity_table(table: pd.DataFrame, analysis: str = "sensitivity") -> pd.DataFrame:
    """Return shares by setting and correction; `analysis` is "sensitivity" or "in-sample"."""
    rows = table[(table["analysis"] == analysis) & (table["correction"] != "none")]
    shown = pd.DataFrame(
        {
            "setting": rows["setting"],
            "correction": rows["correction"].map(correction_label),
            "gap": rows["gap"].round(4),
            "raw share": with_interval(rows, "raw_share", "raw_low", "raw_high", 3),
            "symmetric share": with_interval(rows, "symmetric_share", "symmetric_low", "symmetric_high", 3),
            "damage share": [number(v, 3) for v in rows["damage_share"]],
            "excess share": with_interval(rows, "excess_share", "excess_low", "excess_high", 3),
            "reason": rows["reason"].astype("string").fillna(""),
        }
    )
    return shown.set_index(["setting", "correction"])


def left_out_table(left_out: pd.DataFrame) -> pd.DataFrame:
    """Return mass and loss by group of tokens, before and after correction."""
    rows = left_out.copy()
    rows["correction"] = rows["correction"].map(correction_label)
    rows["loss (nats/token)"] = (rows["loss_sum"] / rows["tokens"].where(rows["tokens"] > 0)).round(3)
    rows["mass"] = [f"{v:.2e}" for v in rows["mass"]]
    columns = ["member", "group", "correction", "ids", "tokens", "mass", "loss (nats/token)"]
    return rows[columns].set_index(["member", "group", "correction"]).sort_index(level=0, sort_remaining=False)


def control_sentences(done: PairControls) -> list[str]:
    """Return what the controls of a pair say, in words, and what was not possible."""
    table, pair = done.table, str(done.table["pair"].iloc[0])
    said = []
    rows = table[(table["analysis"] == "damage") & (table["correction"] == "bias_temperature")]
    for row in rows.to_dict("records"):
        if pd.isna(row["damage_share"]) or pd.isna(row["symmetric_share"]):
            said.append(f"{pair}: {control_label(row['control'])}: no share ({row['reason'] or 'no damage'}).")
            continue
        verdict = "does not exceed" if not row["excess_low"] > 0 else "exceeds"
        seeds = ", by a single damage seed: run more before comparing them" if row["n_damage_seeds"] < 2 else ""
        said.append(
            f"{pair}: the share of bias and temperature, {row['symmetric_share']:.1%}, {verdict} that of damage by "
            f"{control_label(row['control'])}, {row['damage_share']:.1%}{seeds}."
        )
    said += _ladder_sentence(pair, table)
    refit: Mapping[str, Any] | None = done.facts["refit"]
    if refit:
        said.append(
            f"{pair}: refitting inside the bootstrap ({refit['n_refits']} refits) takes the sd of this share from "
            f"{refit['documents']:.4f} to {refit['both']:.4f}; the fit alone has {refit['refit']:.4f}."
        )
    said += [f"{pair}: left out, {what}: {why}." for what, why in done.facts["refused"].items()]
    return said


def _ladder_sentence(pair: str, table: pd.DataFrame) -> list[str]:
    best = best_rung(table)
    if best is None:
        return []
    return [
        f"{pair}: the rung that gives back most is {rung_label(best['correction'])}, {share_beside_damage(best)} of "
        f"the gap; {1 - best['symmetric_share']:.1%} is out of reach of every output-layer correction tried here."
    ]
