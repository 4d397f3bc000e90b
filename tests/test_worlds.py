"""Known-answer worlds: drawn as specified, through captures on disk, and answered as theory and scipy say."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from psd_utils.capture import verify
from psd_utils.errors import PsdError
from psd_utils.head import OutputModel
from psd_utils.known_answers import acceptance, independent, judge, measure, run_worlds
from psd_utils.worlds import NOISE_SD, PRIOR_SD, WORLDS, Sizes, make_world, write_capture

SMALL = Sizes(fit=4000, select=400, eval=4000)
COMMITTED = Path(__file__).resolve().parents[1] / "data" / "controls" / "worlds.csv"

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    return pd.read_csv(COMMITTED)


@pytest.mark.parametrize("name", WORLDS)
def test_real_code_path_agrees_with_an_independent_fit_on_full_logits(name: str) -> None:
    """Captures, statistics, L-BFGS and bootstrap against plain numpy logits and scipy's trust-region Newton."""
    world = make_world(name, 3, SMALL)
    found = measure(world, n_resamples=200).set_index("correction")
    expected = independent(world).set_index("correction")
    for kind in ("temperature", "bias", "bias_temperature"):
        f, e = found.loc[kind], expected.loc[kind]
        assert f["temperature_derived"] == pytest.approx(e["expected_temperature"], abs=1e-3)
        if name == "no_change":
            assert np.isnan(f["symmetric_share"])
            assert "nothing to recover" in f["reason"]
            continue
        assert f["raw_share"] == pytest.approx(e["expected_raw"], abs=2e-3)
        assert f["symmetric_share"] == pytest.approx(e["expected_symmetric"], abs=2e-3)


def test_committed_table_meets_every_tolerance(committed: pd.DataFrame) -> None:
    claims = acceptance()
    assert (committed.groupby("world")["seed"].nunique() == claims["seeds"]).all()
    table = judge(committed, claims)
    assert set(table["world"]) == set(WORLDS) == set(claims["worlds"])
    faulty = table[table["verdict"] != "holds"]
    assert faulty.empty, faulty.to_string()


@pytest.mark.parametrize("name", ["head_noise", "head_noise_prior_shift", "special_swap"])
def test_a_committed_seed_is_found_again(name: str, committed: pd.DataFrame) -> None:
    again = run_worlds([name], n_seeds=1, n_independent=0).set_index("correction")
    kept = committed[(committed["world"] == name) & (committed["seed"] == 0)].set_index("correction")
    for column in ("gap", "raw_share", "symmetric_share", "temperature_derived"):
        np.testing.assert_allclose(again[column], kept[column], atol=2e-4)


@pytest.mark.slow
def test_twenty_seeds_meet_every_tolerance() -> None:
    table = judge(run_worlds(n_independent=3))
    faulty = table[table["verdict"] != "holds"]
    assert faulty.empty, faulty.to_string()


def test_worlds_are_drawn_as_specified() -> None:
    world = make_world("head_noise", 0)
    assert world.base.hidden.shape == (42_000, 32)
    assert world.base.head.std() == pytest.approx(0.5, rel=0.05)
    assert (world.derived.head - world.base.head).std() == pytest.approx(NOISE_SD, rel=0.05)
    assert world.base.hidden.mean() == pytest.approx(0.0, abs=0.01)
    # labels come from the base: its own probabilities and the counts agree
    p = np.exp(world.base.logits())
    p /= p.sum(axis=1, keepdims=True)
    counts = np.bincount(world.corpus.tokens, minlength=64)
    assert np.abs(counts / 42_000 - p.mean(axis=0)).max() < 4 * np.sqrt(counts.max()) / 42_000
    shifted = make_world("head_noise_prior_shift", 0)
    counts_shifted = np.bincount(shifted.corpus.tokens, minlength=64)
    prior = np.random.default_rng([0, 1]).standard_normal(64) * PRIOR_SD
    assert np.corrcoef(np.log(counts_shifted / counts), prior)[0, 1] > 0.9
    other = make_world("head_noise", 1)
    assert not np.array_equal(world.base.head, other.base.head)


def test_a_world_depends_on_its_seed_alone() -> None:
    first = make_world("low_rank_head", 5, SMALL)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    second = make_world("low_rank_head", 5, SMALL)
    np.testing.assert_array_equal(first.derived.head, second.derived.head)
    assert first.corpus.manifest == second.corpus.manifest
    assert np.linalg.matrix_rank(first.derived.head - first.base.head, tol=1e-4) == 2


def test_a_world_is_a_capture_like_any_other(tmp_path: Path) -> None:
    world = make_world("planted_bias", 0, SMALL)
    capture = write_capture(world, "derived", tmp_path)
    assert verify(capture) == []
    model = OutputModel.of(capture, torch.device("cpu"))
    assert [len(model.splits[s].targets) for s in ("fit", "select", "eval")] == [4000, 400, 4000]
    logits = torch.from_numpy(world.derived.logits())
    expected = torch.nn.functional.cross_entropy(logits, world.corpus.tokens, reduction="none")
    assert torch.allclose(capture.nll().double(), expected, atol=1e-5)
    assert torch.equal(torch.cat([model.splits[s].targets for s in ("fit", "select", "eval")]), world.corpus.tokens)


def test_special_tokens_stay_out_of_the_set_and_a_uniform_rise_is_undone_through_the_others() -> None:
    rise = measure(make_world("special_rise", 0, SMALL), n_resamples=200).set_index("correction")
    swap = measure(make_world("special_swap", 0, SMALL), n_resamples=200).set_index("correction")
    assert rise.loc["bias", "symmetric_share"] > 0.95
    assert abs(swap.loc["bias", "symmetric_share"]) < 0.15


def test_a_claim_that_does_not_hold_says_so() -> None:
    found = run_worlds(["planted_bias"], n_seeds=2, n_independent=0, sizes=SMALL, n_resamples=200)
    quantity = {"quantity": "symmetric_share.bias", "expected": 0.5}

    def verdict(**check: float | str) -> str:
        return judge(found, {"worlds": {"planted_bias": {"checks": [quantity | check]}}})["verdict"].iloc[0]

    assert verdict(low=0.9) == "holds"
    assert verdict(high=0.6) == "the mean is out of bounds"
    assert verdict(published=0.5) == "the published value is more than two sd away"
    assert verdict(published_above=0.99999) == "the mean is not above the published bound"
    assert verdict(expected="independent", within=0.1) == "not judged: no seed was fitted independently"
    one = judge(found[found["seed"] == 0], {"worlds": {"planted_bias": {"checks": [quantity | {"published": 0.5}]}}})
    assert one["verdict"].iloc[0] == "one seed has no spread to judge the published value by"


def test_unknown_world_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PsdError, match="did you mean 'head_noise'"):
        make_world("head_nois", 0)
