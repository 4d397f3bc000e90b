"""The acceptance rows of data/spurious/acceptance.yaml, with its tolerances.

The fast tests run every arm with three seeds and judge rows 1 to 24; the laws (rows 25 to 33) are slow.
"""

import numpy as np
import pandas as pd
import pytest

from psd_utils.spurious import acceptance, equations, findings, interventions, laws
from psd_utils.spurious.acceptance import FAILS, HOLDS, NOT_RUN, Check, Row
from psd_utils.spurious.arms import ARMS, mean_curves, run_arms, summary_table

ROWS = {row.id: row for row in acceptance.load_rows()}
SLOW = range(25, 34)
DO_NOT_HOLD = {
    27: "after equally many steps a higher rate has eroded more, and its trough is deeper: see docs/spurious.md",
    30: "the recovered maximum is no higher at d = 256 than at 192: see docs/spurious.md",
}


@pytest.fixture(scope="module")
def results():
    return run_arms(list(ARMS), range(3), 5000)


@pytest.fixture(scope="module")
def found(results):
    model, linear = results["model"], results["linear"]
    start, moments = model.pretrained.weights, interventions.moments(model)
    offsets = {m: interventions.offset_subtraction(model.world, start, w) for m, w in moments.items()}
    replays = interventions.brief_replay(model.world, moments["trough"], model.matched.rate, (8, 32), (200,))
    surgeries = interventions.surgery(model.world, start, moments)
    equal = interventions.equal_accuracy(interventions.surgery_curves(model, ("trained", "row")))
    leading = interventions.leading_directions(model)
    reduced = {
        name: equations.reduced_run(arm.world, arm.pretrained.weights, arm.matched.rate)
        for name, arm in (("rms", model), ("linear", linear))
    }
    return {
        **findings.arm_findings(results),
        **findings.equation_findings(model, reduced),
        **findings.intervention_findings(offsets, replays, surgeries, equal, leading, 5000),
    }


@pytest.fixture(scope="module")
def laws_found(results):
    model = results["model"]
    long = laws.long_run()
    replay = interventions.replay_in_training(model, (0, 4, 16, 64), (16,))
    return {
        **findings.law_findings(laws.sweep(), model),
        **findings.erosion_findings(laws.erosion_in_time(long), long),
        **findings.replay_findings(replay),
    }


def holds(row: Row, numbers: acceptance.Findings) -> None:
    line = acceptance.judge([row], numbers).iloc[0]
    assert line.verdict == HOLDS, f"row {row.id}, {row.claim}: expected {line.tolerance}; found {line.found}"


@pytest.mark.parametrize("number", [n for n in ROWS if n not in SLOW])
def test_row(number, found):
    holds(ROWS[number], found)


@pytest.mark.slow
@pytest.mark.parametrize("number", SLOW)
def test_law(number, laws_found, request):
    if number in DO_NOT_HOLD:
        request.applymarker(pytest.mark.xfail(reason=DO_NOT_HOLD[number]))
    holds(ROWS[number], laws_found)


def test_rows_are_the_specifications():
    assert list(ROWS) == list(range(1, 34))
    for row in ROWS.values():
        assert any(c.low is not None or c.high is not None for c in row.checks), row.id
        for check in row.checks:
            if check.expected is not None:
                assert check.accepts(check.expected), (row.id, check.quantity)


def test_the_committed_table_is_of_these_rows():
    table = pd.read_csv(acceptance.data_folder() / "full_run" / "acceptance.csv").set_index("row")
    assert list(table.index) == list(ROWS)
    for number, row in ROWS.items():
        tolerances = [f"{c.quantity} {c.tolerance}" for c in row.checks if c.tolerance != "reported only"]
        assert table.loc[number, "tolerance"] == "; ".join(tolerances)
        assert table.loc[number, "verdict"] == (FAILS if number in DO_NOT_HOLD else HOLDS)


def test_verdicts():
    rows = [
        Row(1, "a", "b", "c", "M", (Check("x", 1.0, 0.5, 1.5), Check("seen"))),
        Row(2, "a", "b", "c", "M", (Check("y", high=0.0),)),
        Row(3, "a", "b", "c", "M", (Check("z", low=0.0), Check("x", low=0.0))),
    ]
    table = acceptance.judge(rows, {"x": np.array([0.5, 1.0]), "y": np.array([np.nan])})
    assert table["verdict"].tolist() == [HOLDS, FAILS, NOT_RUN]
    assert table["found"][0] == "x 0.75 ± 0.35 (n=2)"
    assert table["tolerance"].tolist() == ["x 0.5 … 1.5", "y ≤ 0", "z ≥ 0; x ≥ 0"]
    assert acceptance.judge(rows, {})["verdict"].tolist() == [NOT_RUN] * 3


def test_short_runs_do_not_judge_the_end(results):
    short = run_arms(["model"], [0], 300)
    numbers = findings.arm_findings(short)
    assert "model.end" not in numbers
    verdicts = acceptance.judge(acceptance.load_rows(), numbers).set_index("row")["verdict"]
    assert verdicts[5] == verdicts[9] == verdicts[28] == NOT_RUN
    assert (
        findings.law_findings(pd.DataFrame({"setting": ["alpha"], "value": [0.5], "seed": [0], "trough": [0.1]})) == {}
    )


def test_a_broken_row_is_named(tmp_path):
    path = tmp_path / "rows.yaml"
    path.write_text("rows:\n  - {id: 7, claim: x, checks: [{quantity: a, lo: 1}]}\n")
    with pytest.raises(ValueError, match=r"Row 7 of rows\.yaml"):
        acceptance.load_rows(path)


def test_no_data_folder_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PSD_ROOT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set PSD_ROOT"):
        acceptance.data_folder()


def test_tables_of_the_arms(results, tmp_path):
    table = summary_table(results).set_index("arm")
    assert list(table.index) == list(ARMS)
    assert table.loc["model", "recovery"] > 0.25 > table.loc["linear", "recovery"]
    curves = mean_curves(results, ["accuracy_A"])
    assert set(curves["n"]) == {3}
    acceptance.save_run(tmp_path / "run", {"arms": table}, {"seeds": [0, 1, 2], "alpha": 0.5})
    assert (tmp_path / "run" / "arms.csv").read_text().startswith("rate,")
    assert '"seeds"' in (tmp_path / "run" / "settings.json").read_text()


@pytest.mark.parametrize("shape", [1.0, -1.1, 0.5])
def test_power_law_finds_the_exponent(shape):
    x = np.array([0.125, 0.5, 1.0, 4.0])
    fit = laws.power_law(x, 3 * x**shape)
    assert fit.slope == pytest.approx(shape)
    assert np.exp(fit.intercept) == pytest.approx(3)
    assert fit.r2 == pytest.approx(1)
    with pytest.raises(ValueError, match="two different x"):
        laws.power_law([1.0, 1.0], [1.0, 2.0])


def test_withdrawal_of_a_constant_is_exact():
    table = pd.DataFrame({"peak_content": [0.2, 1.0, 2.0, 3.0], "end_content": [9.0, 0.5, 0.5, 0.5]})
    law = laws.withdrawal(table)
    assert (law.K, law.n) == (0.5, 3)
    assert law.r2 == pytest.approx(1)


def test_a_small_sweep_and_its_axes():
    table = laws.sweep({"n_new": (16, 128), "dose": (2.0,)}, (0,), 60)
    assert table["setting"].tolist() == ["n_new", "n_new", "dose"]
    assert table["value"].tolist() == [16, 128, 2]
    assert table["rate"][2] == pytest.approx(2 * table["rate"][1])
    with pytest.raises(ValueError, match="No axis width"):
        laws.sweep({"width": (1,)}, (0,), 10)


def test_bad_interventions_are_refused(results):
    model = results["model"]
    with pytest.raises(ValueError, match="No surgery 'rows'"):
        interventions.edited(model.world, model.pretrained.weights, model.pretrained.weights, "rows")
    with pytest.raises(ValueError, match=r"n_facts holds \[128\]; expected 1 … 127"):
        interventions.brief_replay(model.world, model.pretrained.weights, model.matched.rate, (8, 128))


def test_the_dose_axis_reports_finer_and_equal_measures():
    table = laws.sweep({"dose": (1.0, 8.0)}, (0,), 200)
    assert (table["trough_every_step"] <= table["trough"]).all()
    assert set(table["trough_step"] % 5) == {0}
    assert table["at_equal_training"].between(0, 1).all()
