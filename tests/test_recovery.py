"""Gaps, gains, shares and intervals, from tables of loss sums alone."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import psd_utils as psd
from psd_utils.recovery import SHARE_COLUMNS


def rows(member: str, correction: str, tokens: np.ndarray, sums: np.ndarray, **other: Any) -> pd.DataFrame:
    documents = [f"text:{i}:{i:012x}" for i in range(len(tokens))]
    values: dict[str, Any] = {
        "pair": "p",
        "member": member,
        "control": None,
        "damage_seed": None,
        "correction": correction,
        "setting": None,
        "document": documents,
        "split": "eval",
        "tokens": tokens,
        "loss_sum": sums,
    }
    return pd.DataFrame(values | other)


def world(n: int = 60, seed: int = 0, gap: float = 0.3, damage_seeds: int = 3) -> pd.DataFrame:
    """A pair whose derived model loses `gap` nats, of which a bias gives back 40 %, and the base 10 % of the gap."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(50, 400, n)
    base = tokens * rng.normal(3.0, 0.4, n)
    derived = base + tokens * rng.normal(gap, 0.1, n)
    frames = [
        rows("base", "none", tokens, base),
        rows("base", "bias", tokens, base - 0.1 * gap * tokens),
        rows("derived", "none", tokens, derived),
        rows("derived", "bias", tokens, derived - 0.4 * gap * tokens),
    ]
    for s in range(damage_seeds):
        damaged = base + tokens * rng.normal(gap, 0.05, n)
        extra = {"control": "head_noise", "damage_seed": s}
        frames.append(rows("damaged", "none", tokens, damaged, **extra))
        frames.append(rows("damaged", "bias", tokens, damaged - (0.35 + 0.02 * s) * gap * tokens, **extra))
    return pd.concat(frames, ignore_index=True)


def bias_row(losses: pd.DataFrame, **options: Any) -> pd.Series:
    options = {"n_resamples": 2000, **options}
    return psd.recovery_table(losses, **options).set_index("correction").loc["bias"]


def sums(losses: pd.DataFrame, member: str, correction: str) -> tuple[float, float]:
    own = losses[(losses["member"] == member) & (losses["correction"] == correction)]
    return own["loss_sum"].sum(), own["tokens"].sum()


def test_columns_are_those_of_the_design() -> None:
    assert tuple(psd.recovery_table(world(), n_resamples=100).columns) == SHARE_COLUMNS


def test_shares_are_ratios_of_sums_not_means_of_means() -> None:
    losses = world()
    row = bias_row(losses)
    plain = {m: sums(losses, m, "none")[0] for m in ("base", "derived")}
    fitted = {m: sums(losses, m, "bias")[0] for m in ("base", "derived")}
    gap = plain["derived"] - plain["base"]
    assert row["gap"] == pytest.approx(gap / sums(losses, "base", "none")[1])
    assert row["raw_share"] == pytest.approx((plain["derived"] - fitted["derived"]) / gap)
    gain_base = plain["base"] - fitted["base"]
    assert row["symmetric_share"] == pytest.approx((plain["derived"] - fitted["derived"] - gain_base) / gap)
    assert row["symmetric_low"] < row["symmetric_share"] < row["symmetric_high"]


def test_excess_is_the_share_less_the_mean_over_damage_seeds() -> None:
    losses = world()
    row = bias_row(losses)
    gain_base = sums(losses, "base", "none")[0] - sums(losses, "base", "bias")[0]
    damage = losses[losses["member"] == "damaged"]
    shares = []
    for s in range(3):
        own = damage[damage["damage_seed"] == s]
        plain, fitted = sums(own, "damaged", "none")[0], sums(own, "damaged", "bias")[0]
        shares.append((plain - fitted - gain_base) / (plain - sums(losses, "base", "none")[0]))
    assert row["damage_share"] == pytest.approx(np.mean(shares))
    assert row["damage_sd"] == pytest.approx(np.std(shares, ddof=1))
    assert row["excess_share"] == pytest.approx(row["symmetric_share"] - np.mean(shares))
    assert row["excess_low"] < row["excess_share"] < row["excess_high"]
    assert row["n_damage_seeds"] == 3


def test_interval_agrees_with_an_independent_bootstrap() -> None:
    losses = world()
    tables = {
        (m, c): losses[(losses["member"] == m) & (losses["correction"] == c)]["loss_sum"].to_numpy()
        for m in ("base", "derived")
        for c in ("none", "bias")
    }
    rng = np.random.default_rng(123)
    shares = []
    for _ in range(4000):
        pick = rng.integers(0, 60, 60)
        total = {key: values[pick].sum() for key, values in tables.items()}
        gap = total["derived", "none"] - total["base", "none"]
        gain = total["derived", "none"] - total["derived", "bias"] - total["base", "none"] + total["base", "bias"]
        shares.append(gain / gap)
    row = bias_row(losses, n_resamples=10_000)
    width = row["symmetric_high"] - row["symmetric_low"]
    assert [row["symmetric_low"], row["symmetric_high"]] == pytest.approx(
        np.percentile(shares, [2.5, 97.5]).tolist(), abs=0.06 * width
    )


@given(seed=st.integers(0, 2**32 - 1), global_seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_interval_depends_on_neither_row_order_nor_global_random_state(seed: int, global_seed: int) -> None:
    losses = world(n=25)
    np.random.seed(global_seed)  # noqa: NPY002 - the global state is what must not matter
    shuffled = losses.sample(frac=1.0, random_state=np.random.default_rng(seed))
    expected = psd.recovery_table(losses, n_resamples=200).set_index("correction").sort_index()
    found = psd.recovery_table(shuffled, n_resamples=200).set_index("correction").sort_index()
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_seed_changes_the_interval_but_not_the_share() -> None:
    a, b = bias_row(world(), seed=0), bias_row(world(), seed=1)
    assert a["symmetric_share"] == b["symmetric_share"]
    assert a["symmetric_low"] != b["symmetric_low"]


def test_ten_times_the_tokens_of_every_document_changes_nothing() -> None:
    losses = world()
    larger = losses.assign(tokens=losses["tokens"] * 10, loss_sum=losses["loss_sum"] * 10)
    a, b = bias_row(losses), bias_row(larger)
    for name in (
        "gap_low",
        "gap_high",
        "raw_share",
        "symmetric_share",
        "symmetric_low",
        "symmetric_high",
        "excess_low",
    ):
        assert b[name] == pytest.approx(a[name], rel=1e-12)


def test_ten_copies_of_every_document_narrow_the_interval_by_the_root_of_ten() -> None:
    losses = world(n=80)
    copies = pd.concat([losses.assign(document=losses["document"] + f"-{i}") for i in range(10)])
    a, b = bias_row(losses, n_resamples=10_000), bias_row(copies, n_resamples=10_000)
    ratio = (a["symmetric_high"] - a["symmetric_low"]) / (b["symmetric_high"] - b["symmetric_low"])
    assert b["symmetric_share"] == pytest.approx(a["symmetric_share"])
    assert ratio == pytest.approx(np.sqrt(10), rel=0.08)


def test_no_positive_gap_gives_null_shares_and_the_reason() -> None:
    row = bias_row(world(gap=-0.2))
    assert pd.isna(row["symmetric_share"])
    assert pd.isna(row["raw_share"])
    assert pd.isna(row["excess_share"])
    assert row["reason"].startswith("nothing to recover: the gap's 95 % interval, -0.")
    assert row["gap"] == pytest.approx(-0.2, abs=0.05)
    assert row["resamples_without_gap"] == 2000


def test_gap_not_distinguishable_from_zero_gives_null_shares() -> None:
    losses = world(gap=0.001)
    row = bias_row(losses)
    assert row["gap_low"] <= 0
    assert pd.isna(row["symmetric_share"])


def test_negative_shares_are_not_clipped() -> None:
    losses = world()
    worse = (losses["member"] == "derived") & (losses["correction"] == "bias")
    losses.loc[worse, "loss_sum"] += 0.5 * losses.loc[worse, "tokens"]
    row = bias_row(losses)
    assert row["symmetric_share"] < -1
    assert row["symmetric_low"] < row["symmetric_share"]


def test_one_document_has_no_interval_and_says_so() -> None:
    losses = world()
    row = bias_row(losses[losses["document"] == losses["document"].iloc[0]])
    assert row["reason"] == "one document: no interval, so the gap cannot be told from 0"
    assert pd.isna(row["symmetric_share"])
    assert pd.isna(row["gap_low"])


def test_equal_documents_give_an_interval_without_width_and_say_so() -> None:
    losses = world(n=2, damage_seeds=0)
    first = losses[losses["document"] == losses["document"].iloc[0]]
    row = bias_row(pd.concat([first.assign(document=f"copy {i}") for i in range(12)]))
    assert row["symmetric_low"] == pytest.approx(row["symmetric_share"])
    assert row["symmetric_high"] == pytest.approx(row["symmetric_share"])
    assert row["reason"] == "all documents have equal losses: the intervals have no width"


def test_document_scored_twice_is_refused_by_name() -> None:
    losses = world()
    with pytest.raises(psd.PsdError, match=r"document text:0:0{12} occurs twice for the base, correction none"):
        psd.recovery_table(pd.concat([losses, losses.iloc[:1]]))


def test_members_scored_on_different_documents_are_refused() -> None:
    losses = world()
    with pytest.raises(psd.PsdError, match="has other documents or token counts"):
        psd.recovery_table(losses.drop(index=losses[losses["member"] == "derived"].index[0]))


def test_missing_columns_are_named() -> None:
    with pytest.raises(psd.PsdError, match="losses lack the columns split, tokens"):
        psd.recovery_table(world().drop(columns=["split", "tokens"]))


def test_losses_that_are_not_finite_are_refused() -> None:
    losses = world()
    losses.loc[3, "loss_sum"] = np.nan
    with pytest.raises(psd.PsdError, match="not finite"):
        psd.recovery_table(losses)


def test_rows_with_a_setting_are_left_out() -> None:
    losses = world()
    other = losses[losses["correction"] == "bias"].assign(setting="top_k=256", loss_sum=0.0)
    pd.testing.assert_frame_equal(
        psd.recovery_table(pd.concat([losses, other]), n_resamples=100), psd.recovery_table(losses, n_resamples=100)
    )


def test_damage_seeds_may_be_floats_as_pandas_makes_them_beside_nulls() -> None:
    losses = world()
    pd.testing.assert_frame_equal(
        psd.recovery_table(losses.astype({"damage_seed": float}), n_resamples=100),
        psd.recovery_table(losses.astype({"damage_seed": "Int64"}), n_resamples=100),
    )
