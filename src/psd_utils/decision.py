"""Is a model's forgetting fixable at the output layer? A rule in words, and what it says of one pair.

The bounds of the rule are conventions that make its words repeatable; the numbers beside them are what was measured.
"""

from dataclasses import dataclass

import pandas as pd

from .drawing import rung_label

RULE = (
    "**Is anything lost?** If the interval of the gap reaches 0, nothing was lost on this text: no share is defined, "
    "and there is nothing to fix.",
    "**Does a fixed correction give something back?** Read the symmetric share of *bias and temperature*. Less than a "
    "tenth of the gap, or an interval that reaches 0: the loss is **hardly fixable** so. From a tenth to a half: "
    "**partly fixable**. More: **mostly fixable**.",
    "**More than random damage?** Read the *excess share*. Its interval lies above 0: a *prior shift* (or a changed "
    "temperature) is part of what training did. It holds 0: the share may be no more than what any model that became "
    "wrong gets back by being less sure. It lies below 0: what was lost is *less* fixable so than random damage.",
    "**Would a richer output layer reach it?** Read the best rung of the *ladder*, with the same bounds: it says how "
    "far the loss is fixable **at the output layer** at all; the rest lies before it, or needs more text. If this rung "
    "gives back at least twice what bias and temperature do, the loss is there, but in another form: look at the "
    "special tokens first.",
)
"""Steps in Markdown, to be gone through in order."""

HARDLY, MOSTLY = 0.1, 0.5
"""Shares of the gap below which a loss counts as hardly fixable, and from which as mostly fixable."""
OTHER_FORM = 2.0
"""How many times the share of bias and temperature makes another rung "another form"."""


@dataclass(frozen=True)
class Decision:
    """What the rule says of a pair: `verdict` in a few words, and a sentence for each step that was reached."""

    pair: str
    verdict: str
    steps: tuple[str, ...]


def decide(recovery: pd.DataFrame, controls: pd.DataFrame | None = None) -> Decision:
    """Return what the rule says of one pair, from its recovery table and, where it was made, its controls.parquet."""
    row = recovery[recovery["correction"] == "bias_temperature"].iloc[0]
    pair = str(row["pair"])
    gap = f"The gap is {row['gap']:+.3f} nats per token, 95 % interval {row['gap_low']:+.3f} to {row['gap_high']:+.3f}"
    if pd.isna(row["symmetric_share"]):
        return Decision(pair, "nothing to fix", (f"{gap}: no share is defined ({row['reason']}).",))
    steps = [f"{gap}: the derived model predicts this text worse than its base."]
    grade = _grade(row)
    interval = _interval(row, "symmetric")
    steps.append(f"Bias and temperature give back {row['symmetric_share']:.1%} ({interval}): {grade} fixable so.")
    shift, step = _against_damage(row)
    steps.append(step)
    best = best_rung(controls)
    if best is None:
        verdict = f"{grade} fixable by a fixed bias and temperature"
        unknown = "whether a richer output layer would reach more is not known"
        steps.append(f"The ladder was not run (03_controls makes it): {unknown}.")
    else:
        verdict, step = _up_the_ladder(best, float(row["symmetric_share"]))
        steps.append(step)
    special = _special_tokens(controls, float(row["symmetric_share"]))
    if special is not None:
        shift, step = f"{shift}; {special[0]}", special[1]
        steps.append(step)
    return Decision(pair, f"{verdict}; {shift}", tuple(steps))


def _special_tokens(controls: pd.DataFrame | None, share: float) -> tuple[str, str] | None:
    """Return in words what letting special tokens into the set brings, where that was tried and is much more."""
    if controls is None:
        return None
    rows = controls[(controls["setting"] == "specials allowed") & (controls["correction"] == "bias_temperature")]
    rows = rows[rows["symmetric_share"].notna() & (rows["excess_low"] > 0)]
    if rows.empty or rows.iloc[0]["symmetric_share"] < OTHER_FORM * share:
        return None
    return "a prior shift of special tokens, which the set leaves out", (
        f"With special tokens let into the set, bias and temperature give back {share_beside_damage(rows.iloc[0])}: "
        "the derived model expects them where the text has none, which is a prior shift that the set cannot reach."
    )


def _grade(row: pd.Series) -> str:
    share = row["symmetric_share"]
    if share < HARDLY or not row["symmetric_low"] > 0:
        return "hardly"
    return "partly" if share < MOSTLY else "mostly"


def _interval(row: pd.Series, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "no interval" if pd.isna(low) else f"95 % interval {low:+.1%} to {high:+.1%}"


def _against_damage(row: pd.Series) -> tuple[str, str]:
    """Return what the excess share says, in a few words and as a sentence."""
    if pd.isna(row["damage_share"]) or pd.isna(row["excess_low"]):
        why = "without its damage control the share must not be read as a prior shift"
        return "not compared with damage", f"No excess share: {why}."
    if row["n_damage_seeds"] < 2:
        why = f"one damage seed, which gives back {row['damage_share']:.1%}, says nothing of how seeds differ: run more"
        return "not compared with damage", f"No excess share: {why}."
    start = (
        f"Random damage of the same size gives back {row['damage_share']:.1%}; the excess is "
        f"{row['excess_share']:+.1%} ({_interval(row, 'excess')})"
    )
    if row["excess_low"] > 0:
        compared, meaning = (
            "more than after random damage: a prior shift",
            "more than damage: a prior shift is part of it",
        )
    elif row["excess_high"] < 0:
        compared = "less than after random damage"
        meaning = "less than damage, so no sign of a prior shift among the tokens of the set"
    else:
        compared = "about as much as after random damage"
        meaning = "not told from damage, so no sign of a prior shift among the tokens of the set"
    return f"bias and temperature give back {compared}", f"{start}: {meaning}."


def best_rung(controls: pd.DataFrame | None) -> pd.Series | None:
    """Return the row of controls.parquet of the rung that gives back most, or None where no rung has a share."""
    if controls is None:
        return None
    rows = controls[(controls["analysis"] == "ladder") & (controls["correction"] != "none")]
    rows = rows[rows["symmetric_share"].notna()]
    return None if rows.empty else rows.sort_values("symmetric_share").iloc[-1]


def share_beside_damage(row: pd.Series) -> str:
    """Return a symmetric share in words, with that of the matched damage."""
    damage = "no matched damage" if pd.isna(row["damage_share"]) else f"matched damage: {row['damage_share']:.1%}"
    return f"{row['symmetric_share']:.1%} ({damage})"


def _up_the_ladder(best: pd.Series, share: float) -> tuple[str, str]:
    """Return how far the best rung reaches, in few words and in a sentence; `share`: that of bias and temperature."""
    top, grade = float(best["symmetric_share"]), _grade(best)
    verdict = f"{grade} fixable at the output layer"
    if grade != "hardly" and top >= OTHER_FORM * share:
        verdict += ", but not by a bias on the set and a temperature"
    return verdict, (
        f"The best rung of the ladder, {rung_label(str(best['correction']))}, gives back {share_beside_damage(best)}; "
        f"no output-layer correction tried here reaches the other {1 - top:.1%}."
    )
