"""How far the share of a pair depends on choices: the set, the penalty, the amount of text, the text, the fit itself.

Every analysis returns rows as in losses.parquet, told apart by `setting`, for base, derived and matched damage alike:
no share stands without its control.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from .capture import TextStates
from .correction import Correction
from .errors import PsdError
from .fit import PENALTIES, fit_correction
from .head import OutputModel, real_ids, top_k_ids
from .kernels import corrected_moments
from .losses import loss_rows
from .recovery import DAMAGE_CONTROL
from .selection import choose_corrections

KINDS = ("none", "bias", "bias_temperature")
WIDE_PENALTIES = (*PENALTIES, 1e-2, 1e-1)
FRACTIONS = (0.125, 0.25, 0.5, 1.0)
TINY_SIZES = (0, 64, 256, 512, 1024, None)
PUBLIC_SIZES = (0, 256, 1024, 4096, None)
_TINY_VOCABULARY = 8192


@dataclass(frozen=True)
class PairModels:
    """The output models of a pair, and what decides a set: special ids and the tokenizer's length.

    `damaged` is the base with matched noise on its head (the first seed); None where the pair has no gap to match.
    """

    name: str
    base: OutputModel
    derived: OutputModel
    special: torch.Tensor
    tokenizer_length: int
    damaged: OutputModel | None = None

    @property
    def members(self) -> Mapping[str, OutputModel]:
        """The models by role: base, derived and, where there is one, damaged."""
        damaged = {} if self.damaged is None else {"damaged": self.damaged}
        return {"base": self.base, "derived": self.derived, **damaged}

    def set_of(self, top_k: int | None) -> torch.Tensor:
        """Return the set of the `top_k` most frequent ids of `fit`; None: every non-special real id."""
        if top_k is None:
            return real_ids(self.special, self.tokenizer_length)
        return top_k_ids(self.base.splits["fit"].targets, top_k, self.special, self.tokenizer_length)

    def with_fit(self, n_tokens: int) -> "PairModels":
        """Return the pair with `fit` cut to its first whole documents, at least one, of about `n_tokens` tokens."""

        def cut(model: OutputModel) -> OutputModel:
            return replace(model, splits={**model.splits, "fit": first_documents(model.splits["fit"], n_tokens)})

        damaged = None if self.damaged is None else cut(self.damaged)
        return replace(self, base=cut(self.base), derived=cut(self.derived), damaged=damaged)


def labels_of(role: str) -> dict[str, Any]:
    """Return the columns `member`, `control` and `damage_seed` of a model of `PairModels`."""
    damage = {"control": DAMAGE_CONTROL, "damage_seed": 0} if role == "damaged" else {}
    return {"member": role, "control": None, "damage_seed": None} | damage


def first_documents(states: TextStates, n_tokens: int) -> TextStates:
    """Return the first whole documents of a split that hold no more than `n_tokens` tokens, at least one document."""
    ends = states.lengths.cumsum(0)
    n = max(1, int((ends <= n_tokens).sum()))
    stop = int(ends[n - 1])
    return TextStates(states.hidden[:stop], states.targets[:stop], states.lengths[:n], states.keys[:n])


def _eval_rows(pair: PairModels, setting: str, corrections: Mapping[str, Mapping[str, Correction]]) -> pd.DataFrame:
    frames = [
        loss_rows(model, corrections[role], pair=pair.name, setting=setting, splits=("eval",), **labels_of(role))
        for role, model in pair.members.items()
    ]
    return pd.concat(frames, ignore_index=True)


def with_set(pair: PairModels, ids: torch.Tensor, setting: str) -> pd.DataFrame:
    """Return loss rows on `eval` with corrections fitted and selected anew on the set `ids` (empty: temperature only).

    Raises:
        PsdError: as `choose_corrections`.
    """
    corrections: dict[str, dict[str, Correction]] = {}
    for role, model in pair.members.items():
        if ids.numel() == 0:
            chosen = choose_corrections(model, ids, ("none", "temperature"))
            none = chosen["none"].correction
            corrections[role] = {"none": none, "bias": none, "bias_temperature": chosen["temperature"].correction}
        else:
            chosen = choose_corrections(model, ids, KINDS)
            corrections[role] = {kind: c.correction for kind, c in chosen.items()}
    return _eval_rows(pair, setting, corrections)


def set_sizes(pair: PairModels) -> dict[str, int | None]:
    """Return the sizes of the set to try, by setting; None stands for every non-special real id.

    {0, 64, 256, 512, 1024, all} for small vocabularies, {0, 256, 1024, 4096, all} for others.
    """
    sizes = TINY_SIZES if pair.tokenizer_length <= _TINY_VOCABULARY else PUBLIC_SIZES
    return {f"top_k={'all' if size is None else size}": size for size in sizes}


def with_top_k(pair: PairModels, top_k: int | None, setting: str) -> pd.DataFrame:
    """Return `with_set` for the `top_k` most frequent ids; 0: temperature only, None: every non-special real id."""
    ids = torch.empty(0, dtype=torch.int64) if top_k == 0 else pair.set_of(top_k)
    return with_set(pair, ids, setting)


def penalties(pair: PairModels, ids: torch.Tensor, grid: Sequence[float] = WIDE_PENALTIES) -> pd.DataFrame:
    """Return loss rows for each λ by itself, nothing selected on `select`."""
    corrections: dict[float, dict[str, dict[str, Correction]]] = {
        penalty: {role: {"none": Correction.identity()} for role in pair.members} for penalty in grid
    }
    for role, model in pair.members.items():
        statistics = model.statistics("fit", ids)
        for kind in KINDS[1:]:
            start = None
            for penalty in sorted(grid, reverse=True):
                start = fit_correction(statistics, kind, penalty, start).correction
                corrections[penalty][role][kind] = start
    frames = [_eval_rows(pair, f"penalty={penalty:g}", by_role) for penalty, by_role in corrections.items()]
    return pd.concat(frames, ignore_index=True)


def amounts(pair: PairModels) -> list[int]:
    """Return the amounts of `fit` text to try, in tokens of whole documents, ascending; short texts give few."""
    total = len(pair.base.splits["fit"].targets)
    parts = (first_documents(pair.base.splits["fit"], round(total * fraction)) for fraction in FRACTIONS)
    return sorted({len(part.targets) for part in parts})


def with_amount(pair: PairModels, top_k: int, n_tokens: int, setting: str) -> pd.DataFrame:
    """Return loss rows for corrections fitted on the first part of `fit`; the set is chosen from that part, too."""
    part = pair.with_fit(n_tokens)
    return with_set(part, part.set_of(top_k), setting)


def transferred(pair: PairModels, corrections: Mapping[str, Mapping[str, Correction]], setting: str) -> pd.DataFrame:
    """Return loss rows on the `eval` of `pair`'s text with corrections that were fitted on another text."""
    return _eval_rows(pair, setting, corrections)


def left_out(pair: PairModels, ids: torch.Tensor, corrections: Mapping[str, Mapping[str, Correction]]) -> pd.DataFrame:
    """Return what lies outside the set: a row per member, correction and group of tokens, on `eval`.

    Groups: `set`, `special`, `padded` (rows beyond the tokenizer), `rare` (the other real tokens). Columns: `pair,
    member, correction, group, ids, tokens, mass, loss_sum`: head rows in the group, targets in it, the model's mean
    probability on it, and the summed loss of those targets in nats.
    """
    rows = []
    for role in corrections:
        model = pair.members[role]
        group = groups(ids, pair.special, pair.tokenizer_length, model.head.shape[0])
        states = model.splits["eval"]
        own = group[states.targets]
        for kind, correction in corrections[role].items():
            bias = torch.zeros(model.head.shape[0], dtype=correction.bias.dtype)
            bias[correction.ids] = correction.bias
            everywhere = Correction(torch.arange(model.head.shape[0]), bias, correction.temperature)
            moments = corrected_moments(states.hidden, model.head, states.targets, everywhere, readout=model.readout)
            nll = moments.nll.double().cpu()
            mass = moments.probability_sums.double().cpu() / len(states.targets)
            for number, name in enumerate(GROUPS):
                rows.append(
                    {
                        "pair": pair.name,
                        "member": role,
                        "correction": kind,
                        "group": name,
                        "ids": int((group == number).sum()),
                        "tokens": int((own == number).sum()),
                        "mass": float(mass[group == number].sum()),
                        "loss_sum": float(nll[own == number].sum()),
                    }
                )
    return pd.DataFrame(rows)


GROUPS = ("set", "special", "padded", "rare")


def groups(ids: torch.Tensor, special: torch.Tensor, tokenizer_length: int, rows: int) -> torch.Tensor:
    """Return the place in `GROUPS` of every head row, int64 [rows]."""
    group = torch.full((rows,), GROUPS.index("rare"))
    group[tokenizer_length:] = GROUPS.index("padded")
    group[special[special < rows]] = GROUPS.index("special")
    group[ids] = GROUPS.index("set")
    return group


@dataclass(frozen=True)
class RefitSpread:
    """What the fit's own variance adds to a symmetric share: standard deviations, as fractions of the gap.

    `documents`: over resampled `eval` documents with the fit held fixed, as the reported interval; `refit`: over fits
    on resampled `fit` documents with `eval` held fixed; `both`: over both at once. `low` and `high`: the 95 % interval
    of both at once.
    """

    share: float
    documents: float
    refit: float
    both: float
    low: float
    high: float
    n_refits: int


def refit_spread(
    pair: PairModels, ids: torch.Tensor, penalty: Mapping[str, float], n_refits: int = 20, seed: int = 0
) -> RefitSpread:
    """Return how much refitting inside the bootstrap adds for `bias_temperature`, at the given λ by member.

    λ is not selected anew, and no fit is turned down on `select`.

    Raises:
        PsdError: `n_refits` is below 2.
    """
    if n_refits < 2:
        raise PsdError(f"n_refits must be at least 2, found {n_refits}")
    lengths = pair.base.splits["fit"].lengths
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    generator = np.random.default_rng([seed, 2])
    # the first "resample" is the text itself
    draws = [np.arange(len(lengths)), *generator.integers(0, len(lengths), size=(n_refits, len(lengths)))]
    picks = [torch.cat([torch.arange(int(offsets[d]), int(offsets[d + 1])) for d in draw]) for draw in draws]
    sums = {}
    for role, model in (("base", pair.base), ("derived", pair.derived)):
        statistics = model.statistics("fit", ids)
        start, fits = None, []
        for pick in picks:
            fit = fit_correction(statistics.tokens(pick), "bias_temperature", penalty[role], start)
            start = start or fit.correction
            fits.append(fit.correction)
        states = model.splits["eval"]
        sums[role] = states.document_sums(model.losses("eval", [None, *fits])).numpy()
    gap = sums["derived"][0] - sums["base"][0]
    gain = {role: s[0] - s[1:] for role, s in sums.items()}
    net = gain["derived"] - gain["base"]
    counts = generator.multinomial(len(gap), np.full(len(gap), 1 / len(gap)), size=2000)
    drawn_gap = counts @ gap
    fixed = counts @ net[0] / drawn_gap
    both = (counts @ net[1:].T / drawn_gap[:, None]).ravel()
    low, high = np.percentile(both, (2.5, 97.5))
    refit = net[1:].sum(axis=1) / gap.sum()
    share = float(net[0].sum() / gap.sum())
    spreads = (float(fixed.std()), float(refit.std(ddof=1)), float(both.std()))
    return RefitSpread(share, *spreads, float(low), float(high), n_refits)
