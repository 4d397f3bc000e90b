"""The numbers behind the explorer's pictures: what a model and a correction give on the subsample of `eval`."""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize_scalar

from .calibration import reliability
from .correction import FITTED_BIAS_KINDS, KINDS
from .drawing import correction_label, floats
from .errors import PsdError, nearest
from .readings import Choice, Fitted, Interval, Reading
from .recovery import resample_counts
from .smaller_set import refit
from .study import Study
from .subsample import Subsample, load_subsample
from .surface import Surface

TEMPERATURES = (0.5, 2.0)
N_RESAMPLES = 2000
OF_A_SET = ("prior_ratio", "bias", "bias_temperature")
"""The kinds whose set can be made smaller."""

_DAMAGED = "damaged-0"
_CURVE = torch.from_numpy(np.geomspace(*TEMPERATURES, 61))


class Exploration:
    """A study's subsample, and what it says for any choice. Only tables and stored statistics are read; no model.

    Raises:
        PsdError: as `load_subsample`.
    """

    def __init__(self, study: Study, subsample: Subsample | None = None) -> None:
        self.study = study
        self.subsample = load_subsample(study) if subsample is None else subsample
        self._records = study.summary["fits"]
        keys = self.subsample.keys
        # the table of shares draws from documents sorted by key
        drawn = resample_counts(len(keys), N_RESAMPLES, study.summary["settings"]["seed"])
        self._resampled = drawn[:, np.argsort(np.argsort(keys))]
        self._fitted = lru_cache(maxsize=64)(self._find)
        self._damage = lru_cache(maxsize=64)(self._damage_share)

    @property
    def members(self) -> tuple[str, ...]:
        """The members that can be looked at."""
        return self.subsample.members

    def kinds(self, member: str) -> tuple[str, ...]:
        """Return the kinds of correction that a member has, in their usual order."""
        return tuple(kind for kind in KINDS if kind in self.subsample.models[member].losses)

    def set_sizes(self) -> tuple[int, ...]:
        """Return the sizes of smaller sets on offer, below the study's own."""
        most = len(self.subsample.set_ids)
        own = self._records["base"]["bias"]["set_size"]
        return tuple(k for k in dict.fromkeys((16, 64, most)) if k <= most and k < own)

    def fitted(self, member: str, kind: str, top_k: int | None = None) -> Fitted:
        """Return a member's fitted correction; with `top_k`, fitted anew on the subsample of `fit`.

        Raises:
            PsdError: no such member, kind or set.
        """
        if member not in self.members:
            raise PsdError(f"no member {member!r}: {nearest(member, list(self.members))}")
        if kind not in self.kinds(member):
            raise PsdError(f"{member} has no correction {kind!r}: {nearest(kind, list(self.kinds(member)))}")
        return self._fitted(member, kind, top_k if kind in OF_A_SET else None)

    def _find(self, member: str, kind: str, top_k: int | None) -> Fitted:
        record = self._records[member][kind]
        model = self.subsample.models[member]
        if top_k is None:
            origin = "fitted on fit by the study"
            if record["selected_none"]:
                origin = "the study kept the model uncorrected: no correction of this kind was better on select"
            return Fitted(self.study.corrections[member, kind], model.surface(kind), model.losses[kind], origin)
        found = refit(self.subsample, member, kind, record["penalty"] if kind in FITTED_BIAS_KINDS else 0.0, top_k)
        n = len(self.subsample.fit_targets)
        origin = f"fitted anew for {top_k} ids on {n:,} tokens of fit: rougher than the study"
        loss = found.surface.at(found.correction.temperature, 1.0).loss
        return Fitted(found.correction, found.surface, loss, origin)

    def reading(self, choice: Choice) -> Reading:
        """Return all that is shown for a choice.

        Raises:
            PsdError: no such member, kind or set; T outside [0.5, 2] or a strength outside [0, 1].
        """
        fitted = self.fitted(choice.member, choice.kind, choice.top_k)
        low, high = TEMPERATURES
        reachable = min(max(fitted.correction.temperature, low), high)
        temperature = reachable if choice.temperature is None else choice.temperature
        strength = 1.0 if choice.strength is None else choice.strength
        if not (low <= temperature <= high and 0 <= strength <= 1):
            found = f"{temperature} and {strength}"
            raise PsdError(f"T must lie between {low} and {high} and the strength between 0 and 1, found {found}")
        moved = strength != 1.0 and bool(fitted.correction.ids.numel())
        by_hand = moved or temperature != fitted.correction.temperature
        at = fitted.surface.at(temperature, strength)
        token_loss = at.loss if by_hand else fitted.token_loss
        plain = {m: self.subsample.models[m].losses["none"] for m in self.members}
        given_back = plain[choice.member] - token_loss
        gap, share = self._shares(choice, plain, given_back)
        best = _optimum(fitted.surface, strength)
        curve = torch.stack([_CURVE, fitted.surface.mean_losses(_CURVE, strength)])
        return Reading(
            choice=choice,
            fitted=fitted,
            temperature=temperature,
            strength=strength,
            by_hand=by_hand,
            loss=_mean(token_loss),
            uncorrected=_mean(plain[choice.member]),
            base_uncorrected=_mean(plain["base"]),
            gap=gap,
            share=share,
            damage_share=self._damage(choice.kind, choice.top_k),
            reliability=reliability(at.confidence.numpy(), at.correct.numpy()),
            curve=curve.numpy(),
            best_temperature=best,
            best_loss=float(fitted.surface.mean_losses(torch.tensor([best]), strength)[0]),
            token_loss=token_loss.numpy(),
            token_lost=(plain["derived"] - plain["base"]).numpy(),
            token_given_back=given_back.numpy(),
        )

    def _shares(
        self, choice: Choice, plain: dict[str, torch.Tensor], given_back: torch.Tensor
    ) -> tuple[Interval, Interval]:
        """Return gap and symmetric share; the base's gain is that of its own fitted correction of the same kind."""
        if choice.member == "base":
            nothing = Interval(np.nan, reason="the base has no gap to itself")
            return nothing, nothing
        lost = plain[choice.member] - plain["base"]
        # a correction that the base does not have, or fails to have, gives it nothing
        base_gain = plain["base"] - self.fitted("base", choice.kind, choice.top_k).token_loss
        by_document = np.stack([self._tokens, self._sums(lost), self._sums(given_back - base_gain)], axis=1)
        tokens, gap, gain = by_document.sum(axis=0)
        if len(self._tokens) < 2:
            reason = "one document: no interval, so the gap cannot be told from 0"
            return Interval(gap / tokens, reason=reason), Interval(np.nan, reason=reason)
        drawn = self._resampled @ by_document
        low, high = np.percentile(drawn[:, 1] / drawn[:, 0], (2.5, 97.5))
        found = Interval(gap / tokens, low, high)
        if not low > 0:
            return found, Interval(np.nan, reason="nothing to recover: the gap's interval reaches 0 or below")
        kept = drawn[drawn[:, 1] > 0]
        return found, Interval(gain / gap, *np.percentile(kept[:, 2] / kept[:, 1], (2.5, 97.5)))

    def _damage_share(self, kind: str, top_k: int | None) -> Interval:
        if _DAMAGED not in self.members or kind not in self.kinds(_DAMAGED):
            return Interval(np.nan, reason="no damaged model has this correction")
        plain = {member: self.subsample.models[member].losses["none"] for member in self.members}
        given_back = plain[_DAMAGED] - self.fitted(_DAMAGED, kind, top_k).token_loss
        return self._shares(Choice(_DAMAGED, kind, top_k), plain, given_back)[1]

    @cached_property
    def _tokens(self) -> np.ndarray:
        return self.subsample.offsets.diff().double().numpy()

    def _sums(self, values: torch.Tensor) -> np.ndarray:
        return np.add.reduceat(values.double().numpy(), self.subsample.offsets[:-1].numpy())

    def document(self, index: int) -> slice:
        """Return which of the N tokens are those of a document."""
        return slice(*self.subsample.offsets[index : index + 2].tolist())

    def tokens(self, index: int) -> list[str]:
        """Return the texts of a document's tokens."""
        return [self.subsample.texts[i] for i in self.subsample.targets[self.document(index)].tolist()]

    def biases(self, fitted: Fitted) -> pd.DataFrame:
        """Return the ids of a correction: `id, token` (decoded, in quotes), `bias` (nats), `count` (in `fit`)."""
        ids = fitted.correction.ids
        return pd.DataFrame(
            {
                "id": ids.numpy(),
                "token": [repr(self.subsample.texts[i]) for i in ids.tolist()],
                "bias": fitted.correction.bias.double().numpy(),
                "count": self.subsample.counts[ids].numpy(),
            }
        )

    def study_share(self, choice: Choice) -> Interval:
        """Return the share that the study reports on all of `eval` for a choice at its fitted values."""
        row = self._shares_of_study.get(choice.kind)
        if choice.member != "derived" or row is None or choice.top_k is not None:
            return Interval(np.nan, reason="the study reports no such share")
        return Interval(row["symmetric_share"], row["symmetric_low"], row["symmetric_high"])

    @cached_property
    def _shares_of_study(self) -> Mapping[str, Mapping[str, float]]:
        return {str(row["correction"]): floats(row) for _, row in self.study.recovery.iterrows()}

    def words(self, choice: Choice) -> str:
        """Return a choice in words."""
        size = "" if choice.top_k is None or choice.kind not in OF_A_SET else f", {choice.top_k} ids"
        return f"{self.study.pair.name}, {choice.member}: {correction_label(choice.kind)}{size}"


def _optimum(surface: Surface, strength: float) -> float:
    """Return the T in [0.5, 2] of the lowest mean loss; the loss is convex in 1/T, so there is one."""

    def loss(beta: float) -> float:
        return float(surface.mean_losses(torch.tensor([1.0 / beta], dtype=torch.float64), strength)[0])

    low, high = TEMPERATURES
    result: Any = minimize_scalar(loss, bounds=(1 / high, 1 / low), method="bounded", options={"xatol": 1e-5})
    return float(1.0 / result.x)


def _mean(values: torch.Tensor) -> float:
    return float(values.mean(dtype=torch.float64))
