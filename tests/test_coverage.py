"""Coverage of the 95 % interval: the committed measurement, and that the script measures the interval of the tables."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

import psd_utils as psd

REPOSITORY = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import coverage

    yield coverage
    sys.path.remove(str(REPOSITORY / "scripts"))
    del sys.modules["coverage"]


@pytest.fixture(scope="module")
def text(script: ModuleType) -> pd.DataFrame:
    return script.population(0.3, 1500, seed=1)


def test_committed_coverage_is_near_nominal_with_many_documents_and_less_with_few() -> None:
    table = pd.read_csv(REPOSITORY / "data" / "controls" / "coverage.csv")
    own = table[table["method"] == "percentile"].set_index(["share", "documents"])["symmetric_coverage"]
    assert (table["worlds"] == 2000).all()
    for share in (0.0, 0.3, 0.9):
        assert 0.92 <= own[share, 100] <= 0.98
        assert own[share, 10] < 0.92
        assert own[share, 20] < own[share, 100] + 0.01


def test_the_measured_interval_is_that_of_recovery_table(script: ModuleType, text: pd.DataFrame) -> None:
    places = script.draw(text, 25, 3, seed=4)
    drawn = script.bootstrap(text, places, 600, seed=4)
    for world in range(3):
        rows = script.loss_rows(text, places[world])
        table = psd.recovery_table(rows, n_resamples=600, seed=4).set_index("correction")
        for name in ("gap", "raw", "symmetric"):
            low, high = np.percentile(drawn[name][:, world], (2.5, 97.5))
            assert table.loc["fixed", f"{name}_low"] == pytest.approx(low, rel=1e-9)
            assert table.loc["fixed", f"{name}_high"] == pytest.approx(high, rel=1e-9)


def test_a_small_run_covers_about_as_often_as_the_committed_one(
    script: ModuleType, text: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PAIRS", {0.3: script.PAIRS[0.3]})
    monkeypatch.setattr(script, "population", lambda *_: text)
    found = script.coverage(n_worlds=300, sizes=(60,), n_resamples=300).set_index("method")["symmetric_coverage"]
    # 300 worlds know a coverage to about 0.013
    assert 0.89 <= found["percentile"] <= 0.98
    assert found["expanded"] >= found["percentile"]


def test_the_true_share_is_known(script: ModuleType, text: pd.DataFrame) -> None:
    assert 0.2 < script.true_shares(text)["symmetric"] < 0.4
    assert script.levels("percentile", 20) == (2.5, 97.5)
    assert script.levels("expanded", 20)[0] < 2.5 < script.levels("expanded", 10_000)[0] + 0.01


def test_a_study_of_few_documents_says_that_its_intervals_cover_less(script: ModuleType, text: pd.DataFrame) -> None:
    few, many = (script.loss_rows(text, script.draw(text, n, 1, seed=0)[0]) for n in (30, 60))
    warned = psd.recovery_table(few, n_resamples=200).set_index("correction").loc["fixed", "reason"]
    assert warned == "fewer than 40 documents: the 95 % intervals cover less than 95 %"
    assert psd.recovery_table(many, n_resamples=200).set_index("correction").loc["fixed", "reason"] is None
