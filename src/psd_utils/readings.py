"""What the explorer looks at and what it reads there: plain values, from which every picture is drawn."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from .calibration import Reliability
from .correction import Correction
from .surface import Surface


@dataclass(frozen=True)
class Choice:
    """What is looked at: a member under a kind of correction, fitted on a set of `top_k` ids (None: the study's set).

    `temperature` and `strength` set by hand replace the fitted T and the full bias; None stands for the fitted ones.
    """

    member: str = "derived"
    kind: str = "bias_temperature"
    top_k: int | None = None
    temperature: float | None = None
    strength: float | None = None


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % percentile bootstrap interval over documents; NaN and a `reason` where undefined."""

    value: float
    low: float = np.nan
    high: float = np.nan
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A member's correction of a kind on the subsample: `token_loss` [N] is its loss at the fitted values, nats."""

    correction: Correction
    surface: Surface
    token_loss: torch.Tensor
    origin: str


@dataclass(frozen=True)
class Reading:
    """What is shown for a choice; losses in nats per token, on N tokens of `eval`.

    `by_hand` says that T or strength are not the fitted ones. `damage_share` is what matched random damage, with its
    own fitted correction of the same kind, gives back on the same documents. `curve` float64 [2, A] holds temperatures
    and losses at this strength, `best_temperature` and `best_loss` its optimum. `token_loss`, `token_lost` (derived
    minus base, uncorrected) and `token_given_back` (this member, uncorrected minus corrected) are float32 [N].
    """

    choice: Choice
    fitted: Fitted
    temperature: float
    strength: float
    by_hand: bool
    loss: float
    uncorrected: float
    base_uncorrected: float
    gap: Interval
    share: Interval
    damage_share: Interval
    reliability: Reliability
    curve: np.ndarray
    best_temperature: float
    best_loss: float
    token_loss: np.ndarray
    token_lost: np.ndarray
    token_given_back: np.ndarray

    @property
    def origin(self) -> str:
        """Where the values come from, in words."""
        if self.by_hand:
            return "set by hand while looking at eval: an illustration, not a result"
        return self.fitted.origin

    def table(self) -> pd.DataFrame:
        """Return the numbers that the explorer shows: `quantity`, `value`, `low`, `high`, `note`."""
        gap, share, damage, bins = self.gap, self.share, self.damage_share, self.reliability
        rows: list[tuple[Any, ...]] = [
            ("temperature T", self.temperature, np.nan, np.nan, ""),
            ("bias strength", self.strength, np.nan, np.nan, ""),
            ("loss", self.loss, np.nan, np.nan, "nats per token"),
            ("loss, uncorrected", self.uncorrected, np.nan, np.nan, "nats per token"),
            ("gap to the base", gap.value, gap.low, gap.high, gap.reason or "nats per token, uncorrected"),
            ("symmetric share", share.value, share.low, share.high, share.reason),
            ("share of random damage", damage.value, damage.low, damage.high, damage.reason),
            ("calibration error", bins.error, np.nan, np.nan, "expected, 15 bins"),
            ("best T at this strength", self.best_temperature, np.nan, np.nan, f"loss {self.best_loss:.4f}"),
        ]
        return pd.DataFrame(rows, columns=["quantity", "value", "low", "high", "note"])
