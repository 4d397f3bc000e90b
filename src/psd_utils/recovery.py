"""Per-document loss sums -> gaps, gains, shares and their intervals: every loss-based number of a study.

Needs nothing but losses.parquet, so any laptop can rebuild the table.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from .errors import PsdError

LOSS_COLUMNS = (
    "pair",
    "member",
    "control",
    "damage_seed",
    "correction",
    "setting",
    "document",
    "split",
    "tokens",
    "loss_sum",
)
SHARE_COLUMNS = (
    "pair",
    "correction",
    "n_documents",
    "n_tokens",
    "loss_base",
    "loss_derived",
    "gap",
    "gap_low",
    "gap_high",
    "gain_base",
    "gain_derived",
    "raw_share",
    "raw_low",
    "raw_high",
    "symmetric_share",
    "symmetric_low",
    "symmetric_high",
    "damage_share",
    "damage_sd",
    "n_damage_seeds",
    "excess_share",
    "excess_low",
    "excess_high",
    "resamples_without_gap",
    "reason",
)
DAMAGE_CONTROL = "head_noise"
CONTROLS = (DAMAGE_CONTROL, "hidden_noise", "permuted_difference")
FEW_DOCUMENTS = 40
"""Below this many documents the interval covers the truth in 89 to 94 % of studies (data/controls/coverage.csv)."""

_PERCENTILES = (2.5, 97.5)
_CHUNK = 500


def recovery_table(
    losses: pd.DataFrame, *, n_resamples: int = 10_000, seed: int = 0, split: str = "eval"
) -> pd.DataFrame:
    """Return a row per pair and correction: losses, gap, gains, shares and 95 % intervals, in nats per token.

    `losses` has the columns of losses.parquet (DESIGN §5); rows with a `setting` are left out. Intervals are
    percentile bootstraps over documents, all models resampled together; that of the excess share resamples damage
    seeds too. They depend on neither the order of rows nor any global random state. The columns are `SHARE_COLUMNS`.

    Raises:
        PsdError: columns are missing, a document is given twice, or members were scored on different documents.
    """
    missing = [name for name in LOSS_COLUMNS if name not in losses.columns]
    if missing:
        raise PsdError(f"losses lack the columns {', '.join(missing)}")
    if n_resamples < 1:
        raise PsdError(f"n_resamples must be at least 1, found {n_resamples}")
    kept = losses[(losses["split"] == split) & losses["setting"].isna()]
    if kept.empty:
        raise PsdError(f"losses hold no rows of the split {split!r} without a setting")
    kept = kept.assign(**{n: pd.to_numeric(kept[n], errors="coerce") for n in ("tokens", "loss_sum")})
    if not (np.isfinite(kept["loss_sum"]).all() and (kept["tokens"] > 0).all()):
        raise PsdError("losses hold a loss that is not finite, or a document without tokens")
    _check_labels(kept)
    rows = []
    for pair, group in kept.groupby("pair", sort=False):
        sums = _Sums.of(group)
        resample = _Resamples(sums.n_documents, n_resamples, seed)
        rows += [{"pair": pair, **_row(sums, correction, resample)} for correction in sums.corrections]
    return pd.DataFrame(rows, columns=list(SHARE_COLUMNS)).astype({"reason": object})


def _check_labels(rows: pd.DataFrame) -> None:
    """Raise PsdError for a row whose labels would make it vanish from the table."""
    for name in ("pair", "member", "correction", "document"):
        if rows[name].isna().any():
            raise PsdError(f"losses hold rows without a {name}")
    for name, known in (("member", ("base", "derived", "damaged")), ("control", CONTROLS)):
        unknown = set(rows[name].dropna()) - set(known)
        if unknown:
            raise PsdError(f"losses hold an unknown {name} {sorted(unknown)[0]!r}; known: {', '.join(known)}")
    damaged = rows[rows["member"] == "damaged"]
    for name in ("control", "damage_seed"):
        if damaged[name].isna().any():
            raise PsdError(f"losses hold rows of a damaged model without a {name}")


@dataclass(frozen=True)
class _Sums:
    """Loss sums by document [D], of every member and correction of one pair, documents sorted by key."""

    tokens: np.ndarray
    base: dict[str, np.ndarray]
    derived: dict[str, np.ndarray]
    damaged: dict[str, dict[int, np.ndarray]]
    corrections: list[str]

    @property
    def n_documents(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, group: pd.DataFrame) -> "_Sums":
        base = group[(group["member"] == "base")]
        derived = group[(group["member"] == "derived")]
        damaged = group[(group["member"] == "damaged") & (group["control"] == DAMAGE_CONTROL)]
        pair = group["pair"].iloc[0]
        for name, rows in (("base", base), ("derived", derived)):
            if rows[rows["correction"] == "none"].empty:
                raise PsdError(f"pair {pair}: losses hold no uncorrected rows of the {name} model")
        reference = base[base["correction"] == "none"].set_index("document")["tokens"].sort_index()

        def by_correction(rows: pd.DataFrame, label: str) -> dict[str, np.ndarray]:
            columns = {}
            for correction, part in rows.groupby("correction", sort=False):
                indexed = part.set_index("document").sort_index()
                if indexed.index.has_duplicates:
                    twice = indexed.index[indexed.index.duplicated()][0]
                    raise PsdError(f"pair {pair}: document {twice} occurs twice for {label}, correction {correction}")
                if not indexed["tokens"].equals(reference):
                    raise PsdError(
                        f"pair {pair}: {label}, correction {correction}, has other documents or token counts"
                    )
                columns[str(correction)] = indexed["loss_sum"].to_numpy(dtype=np.float64)
            return columns

        columns_of_base = by_correction(base, "the base")
        columns_of_derived = by_correction(derived, "the derived model")
        by_seed = {
            int(part["damage_seed"].iloc[0]): by_correction(part, f"damaged model {seed}")
            for seed, part in damaged.groupby("damage_seed", sort=True)
        }
        corrections = [c for c in columns_of_derived if c in columns_of_base and c != "none"]
        return cls(
            reference.to_numpy(dtype=np.float64),
            columns_of_base,
            columns_of_derived,
            _transpose(by_seed),
            ["none", *corrections],
        )


def _transpose(by_seed: dict[int, dict[str, np.ndarray]]) -> dict[str, dict[int, np.ndarray]]:
    """Return {correction: {seed: sums}} from {seed: {correction: sums}}."""
    result: dict[str, dict[int, np.ndarray]] = {}
    for seed, columns in by_seed.items():
        for correction, sums in columns.items():
            result.setdefault(correction, {})[seed] = sums
    return result


class _Resamples:
    """Bootstrap sums over documents: the same documents for every model, in chunks."""

    def __init__(self, n_documents: int, n_resamples: int, seed: int) -> None:
        self.n_documents, self.n_resamples, self.seed = n_documents, n_resamples, seed

    def sums(self, columns: np.ndarray) -> np.ndarray:
        """Return [resamples, C] sums of columns [D, C] over documents drawn with replacement."""
        rng = np.random.default_rng([self.seed, 0])
        d = self.n_documents
        out = np.empty((self.n_resamples, columns.shape[1]))
        for start in range(0, self.n_resamples, _CHUNK):
            # always whole chunks, so that fewer resamples are a prefix of more
            draws = rng.integers(0, d, size=(_CHUNK, d)) + d * np.arange(_CHUNK)[:, None]
            counts = np.bincount(draws.ravel(), minlength=d * _CHUNK).reshape(_CHUNK, d)
            out[start : start + _CHUNK] = (counts @ columns)[: self.n_resamples - start]
        return out

    def damage_seeds(self, n_seeds: int) -> np.ndarray:
        """Return [resamples, seeds] damage seeds drawn with replacement."""
        return np.random.default_rng([self.seed, 1]).integers(0, n_seeds, size=(self.n_resamples, n_seeds))


def resample_counts(n_documents: int, n_resamples: int, seed: int = 0) -> np.ndarray:
    """Return how often each resample of `recovery_table` draws each document, float64 [resamples, documents]."""
    return _Resamples(n_documents, n_resamples, seed).sums(np.eye(n_documents))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, _PERCENTILES)
    return float(low), float(high)


def _row(sums: _Sums, correction: str, resample: _Resamples) -> dict[str, object]:
    tokens = sums.tokens.sum()
    gap_by_document = sums.derived["none"] - sums.base["none"]
    gain_derived = sums.derived["none"] - sums.derived[correction]
    gain_base = sums.base["none"] - sums.base[correction]
    gap = gap_by_document.sum()
    row: dict[str, object] = {
        "correction": correction,
        "n_documents": sums.n_documents,
        "n_tokens": int(tokens),
        "loss_base": sums.base[correction].sum() / tokens,
        "loss_derived": sums.derived[correction].sum() / tokens,
        "gap": gap / tokens,
        "gain_base": gain_base.sum() / tokens,
        "gain_derived": gain_derived.sum() / tokens,
        "n_damage_seeds": len(sums.damaged.get(correction, {})),
        "reason": None,
    }
    if sums.n_documents < 2:
        return row | {"reason": "one document: no interval, so the gap cannot be told from 0"}
    damage = _damage(sums, correction, gain_base)
    columns = np.stack([sums.tokens, gap_by_document, gain_derived, gain_derived - gain_base, *damage], axis=1)
    drawn = resample.sums(columns)
    low, high = _interval(drawn[:, 1] / drawn[:, 0])
    with_gap = drawn[:, 1] > 0
    row |= {"gap_low": low, "gap_high": high, "resamples_without_gap": int((~with_gap).sum())}
    if not low > 0:
        where = "reaches 0" if high >= 0 else "lies below 0"
        words = f"nothing to recover: the gap's 95 % interval, {low:.4f} to {high:.4f} nats per token, {where}"
        return row | {"reason": words}
    reasons = []
    if np.ptp(gap_by_document / sums.tokens) == 0 and np.ptp(sums.base["none"] / sums.tokens) == 0:
        reasons.append("all documents have equal losses: the intervals have no width")
    elif sums.n_documents < FEW_DOCUMENTS:
        reasons.append(f"fewer than {FEW_DOCUMENTS} documents: the 95 % intervals cover less than 95 %")
    row["raw_share"] = gain_derived.sum() / gap
    row["symmetric_share"] = (gain_derived - gain_base).sum() / gap
    symmetric = drawn[:, 3] / np.where(with_gap, drawn[:, 1], np.nan)
    row["raw_low"], row["raw_high"] = _interval(drawn[with_gap, 2] / drawn[with_gap, 1])
    row["symmetric_low"], row["symmetric_high"] = _interval(symmetric[with_gap])
    if damage:
        row |= _excess(columns, drawn, symmetric, resample, reasons)
    return row | {"reason": "; ".join(reasons) or None}


def _damage(sums: _Sums, correction: str, gain_base: np.ndarray) -> list[np.ndarray]:
    """Return, for each damage seed, its gap and its symmetric gain by document."""
    columns = []
    for seed, corrected in sums.damaged.get(correction, {}).items():
        plain = sums.damaged["none"][seed]
        columns += [plain - sums.base["none"], plain - corrected - gain_base]
    return columns


def _excess(
    columns: np.ndarray, drawn: np.ndarray, symmetric: np.ndarray, resample: _Resamples, reasons: list[str]
) -> dict[str, object]:
    totals = columns.sum(axis=0)
    gaps, gains = totals[4::2], totals[5::2]
    if (gaps <= 0).any():
        reasons.append("the damaged models have no gap on eval: no damage share")
        return {}
    shares = gains / gaps
    drawn_gaps = drawn[:, 4::2]
    drawn_shares = drawn[:, 5::2] / np.where(drawn_gaps > 0, drawn_gaps, np.nan)
    chosen = np.take_along_axis(drawn_shares, resample.damage_seeds(len(shares)), axis=1)
    excess = symmetric - chosen.mean(axis=1)
    excess = excess[np.isfinite(excess)]
    result: dict[str, object] = {
        "damage_share": shares.mean(),
        "damage_sd": shares.std(ddof=1) if len(shares) > 1 else None,
        "n_damage_seeds": len(shares),
        "excess_share": totals[3] / totals[1] - shares.mean(),
    }
    if excess.size:
        result["excess_low"], result["excess_high"] = _interval(excess)
    return result
