"""How often the warning rule is wrong, on runs where the truth was measured; and how its thresholds were chosen.

In: a table of runs (scripts/record_callback_runs.py): condition, seed, step, the columns of a log, and at some steps
`others` and `others_after_replay`: recall of the old people that a brief replay of a few others did not show, before
and after it. Out: tables of errors.

The truth at such a step: the loss was *reversible* if the replay gave at least half of it back to people it did not
show. A *false alarm* is a collapse warning where it did not; a *miss* is a warning of erosion where it did.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import pandas as pd

from psd_utils.spurious.alarm import COLLAPSE, AlarmRule, judge_run

CALIBRATION_SEEDS = (0, 1, 2, 3)
BACK = 0.5
GRID = {
    "least_loss": (0.05, 0.1, 0.15, 0.2),
    "hidden_share": (0.3, 0.4, 0.5, 0.6, 0.7),
    "least_ratio": (0.0, 0.25, 0.5, 0.75, 1.0),
}
SIZES_ALONE = GRID | {"hidden_share": (-np.inf,), "least_ratio": (0.25, 0.5, 0.75, 1.0, 1.25)}
"""Rules that do not look at recall without the common part, for comparison."""


def judged(runs: pd.DataFrame, rule: AlarmRule) -> pd.DataFrame:
    """The runs with `alarm` (what the rule says at each step, seeing only the run so far) and `back` (the share of the
    loss that the replay gave back; NaN where none was made or nothing was lost).
    """
    parts = []
    for _, run in runs.groupby(["condition", "seed"], sort=False):
        run = run.sort_values("step").reset_index(drop=True)
        start = run["others"].iloc[0]
        lost = (start - run["others"]).where(lambda x: x > 0)
        back = (run["others_after_replay"] - run["others"]) / lost
        parts.append(run.assign(alarm=judge_run(run, rule), back=back))
    return pd.concat(parts, ignore_index=True)


def error_rates(runs: pd.DataFrame, rule: AlarmRule) -> pd.DataFrame:
    """Errors of the rule, for each condition and over all.

    Returns:
        condition ("all" last), seeds, points (steps with a warning and a replay), reversible (of these, by replay),
        false_alarms, misses, false_alarm_rate (of the points that were not reversible), miss_rate (of those that
        were); runs_warned (runs with a collapse warning at some step), and warned_before_trough (of these, those where
        it came before the lowest recall of the first 400 steps). Rates are NaN where there are no such points.
    """
    table = judged(runs, rule)
    names = [*dict.fromkeys(table["condition"]), "all"]
    return pd.DataFrame([_row(table if n == "all" else table[table["condition"] == n], n) for n in names])


def _row(table: pd.DataFrame, condition: str) -> dict[str, object]:
    points = table[table["alarm"].notna() & table["back"].notna()]
    truth, said = points["back"] >= BACK, points["alarm"] == COLLAPSE
    false_alarms, misses = int((said & ~truth).sum()), int((~said & truth).sum())
    warned, early = 0, 0
    for _, run in table.groupby(["condition", "seed"]):
        steps = run.loc[run["alarm"] == COLLAPSE, "step"]
        event = run[run["step"] <= 400]
        trough = int(event["step"].to_numpy()[event["old"].to_numpy().argmin()])
        warned += len(steps) > 0
        early += len(steps) > 0 and steps.min() < trough
    return {
        "condition": condition,
        "seeds": len(table[["condition", "seed"]].drop_duplicates()),
        "points": len(points),
        "reversible": int(truth.sum()),
        "false_alarms": false_alarms,
        "misses": misses,
        "false_alarm_rate": false_alarms / (~truth).sum() if (~truth).any() else np.nan,
        "miss_rate": misses / truth.sum() if truth.any() else np.nan,
        "runs_warned": warned,
        "warned_before_trough": early,
    }


def choose_rule(
    runs: pd.DataFrame,
    seeds: Sequence[int] = CALIBRATION_SEEDS,
    grid: Mapping[str, Sequence[float]] = GRID,
) -> tuple[AlarmRule, pd.DataFrame]:
    """The rule of a grid with the fewest errors on some seeds, and the table of all rules that it was chosen from.

    Errors are the mean of the two rates, so that neither kind is bought with the other, plus the share of collapse runs
    (B_prime) that were not warned of before the trough. Of equals, the one nearest (0.1, 0.5, 0): early, at half, and
    without a third condition.

    Returns:
        the rule; and least_loss, hidden_share, least_ratio, false_alarm_rate, miss_rate, late (share), errors.
    """
    chosen = runs[runs["seed"].isin(list(seeds))]
    rows = []
    for values in itertools.product(*grid.values()):
        rule = AlarmRule(*values)
        table = error_rates(chosen, rule).set_index("condition")
        rates = {name: float(table[name]["all"]) for name in ("false_alarm_rate", "miss_rate")}
        late = 1 - float(table["warned_before_trough"]["B_prime"]) / float(table["seeds"]["B_prime"])
        rows.append({**asdict(rule), **rates, "late": late})
    table = pd.DataFrame(rows)
    table["errors"] = table[["false_alarm_rate", "miss_rate"]].mean(axis=1) + table["late"]
    away = (table["least_loss"] - 0.1).abs() + (table["hidden_share"] - 0.5).abs() + table["least_ratio"]
    best = table.assign(away=away.round(9)).sort_values(["errors", "away"], kind="stable").iloc[0]
    return AlarmRule(*(float(best[name]) for name in GRID)), table
