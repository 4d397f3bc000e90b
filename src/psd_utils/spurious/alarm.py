"""A warning rule for a running fine-tuning: collapse in progress, erosion, or nothing.

In: the log of a run so far, one row per measured step. Out: an Alarm, or None. Pure functions of the log.

The rule. Recall is first-token recall of the old facts, relative to that of the first row. There is nothing to warn of
while less than `least_loss` is lost. Otherwise the loss has two parts: what is back when the common part of the change
is taken away from the states, and the rest. If the first is at least `hidden_share` of the loss, and the common part is
at least `least_ratio` times as large as the individual one, it is a *collapse in progress, likely reversible*; else
*erosion*. *Reversible* means that little is needed to bring the facts back, such as a brief replay of a few of them; it
does not mean that they come back by themselves. Thresholds were chosen on some seeds of the small transformer, against
such replays; `data/spurious/callback_error_rates.csv` has the errors on the others.
"""

from dataclasses import dataclass

import pandas as pd

COLLAPSE = "collapse in progress, likely reversible"
EROSION = "erosion"
COLUMNS = ("step", "old", "common", "individual", "common_removed")


@dataclass(frozen=True)
class AlarmRule:
    """Thresholds: loss of recall (share of the first row's), share of the loss that is hidden, ‖δ‖ / rms‖ε‖."""

    least_loss: float = 0.15
    hidden_share: float = 0.5
    least_ratio: float = 0.0


RULE = AlarmRule()


@dataclass(frozen=True)
class Alarm:
    """A warning about the last row of a log.

    Attributes:
        name: COLLAPSE or EROSION.
        step: of that row.
        loss: lost share of the first row's recall, 0–1.
        hidden: share of the loss that is back when the common part is taken away.
        ratio: size of the common part over that of the individual one.
    """

    name: str
    step: int
    loss: float
    hidden: float
    ratio: float

    @property
    def sentence(self) -> str:
        """The warning in words."""
        back = f"{self.hidden:.0%} of it comes back when the facts' common shift is taken away"
        return f"step {self.step}: {self.name}. {self.loss:.0%} of the old facts' recall is lost, and {back}."


def judge_log(log: pd.DataFrame, rule: AlarmRule = RULE) -> Alarm | None:
    """The warning that the last row deserves.

    Args:
        log: step, old (recall), common and individual (sizes of the parts), common_removed (recall without the common
            part), with the state before training in its first row.
        rule: thresholds.

    Returns:
        An Alarm, or None if too little is lost, or the model knew none of the facts.

    Raises:
        ValueError: columns missing, steps that do not rise, or no rows.
    """
    missing = [name for name in COLUMNS if name not in log]
    if missing or not len(log):
        what = f"columns {', '.join(missing)}" if missing else "rows"
        raise ValueError(f"The log has no {what}. Give a log with {', '.join(COLUMNS)}, from step 0 on.")
    if not log["step"].is_monotonic_increasing or log["step"].duplicated().any():
        raise ValueError("The steps of the log do not rise. Sort it, and give one run at a time.")
    start, now = float(log["old"].iloc[0]), log.iloc[-1]
    lost = start - float(now["old"])
    if start <= 0 or lost < rule.least_loss * start or lost <= 0:
        return None
    hidden = (float(now["common_removed"]) - float(now["old"])) / lost
    individual = float(now["individual"])
    ratio = float(now["common"]) / individual if individual > 0 else float("inf")
    reversible = hidden >= rule.hidden_share and ratio >= rule.least_ratio
    return Alarm(COLLAPSE if reversible else EROSION, int(now["step"]), lost / start, hidden, ratio)


def judge_run(log: pd.DataFrame, rule: AlarmRule = RULE) -> pd.Series:
    """What the rule would have said at each row, seeing only the rows up to it; None where nothing."""
    alarms = [judge_log(log.iloc[: i + 1], rule) for i in range(len(log))]
    return pd.Series([a.name if a else None for a in alarms], index=log.index, dtype=object)
