"""Controls of a pair: matched damage of other kinds, the ladder, sensitivity, and 03_controls as papermill runs it."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import torch

import psd_utils as psd
from psd_utils import control_steps, controls, pair_controls, sensitivity
from psd_utils.control_report import control_sentences
from psd_utils.control_steps import ControlSettings
from psd_utils.errors import PsdError
from psd_utils.files import read_json, write_json
from psd_utils.pair_controls import CONTROL_COLUMNS, PairControls, read_controls, run_controls
from psd_utils.recovery import LOSS_COLUMNS
from psd_utils.settings import Settings, resolve_settings

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "03_controls.ipynb"
OPTIONS: dict[str, Any] = {"n_damage_seeds": 2, "n_resamples": 200, "device": "cpu"}
SMALL = ControlSettings(n_damage_seeds=2, ladder_tokens=0, second_text=None, n_refits=4, n_resamples=200, ranks=(1, 4))

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def study(pair: psd.Pair, out_dir: Path) -> psd.Study:
    return psd.run_study(pair, out_dir=out_dir, **OPTIONS)


@pytest.fixture(scope="module")
def settings(pair: psd.Pair, out_dir: Path) -> Settings:
    return resolve_settings(pair, out_dir=out_dir, **OPTIONS)


@pytest.fixture(scope="module")
def second_text(tmp_path_factory: pytest.TempPathFactory, write_documents: Any) -> Path:
    from conftest import english_like

    return write_documents(tmp_path_factory.mktemp("second") / "second.jsonl", english_like(60, seed=9))


@pytest.fixture(scope="module")
def done(study: psd.Study, settings: Settings, second_text: Path) -> PairControls:
    return run_controls(study, settings, replace(SMALL, second_text=str(second_text)))


@pytest.fixture(scope="module")
def models(study: psd.Study, settings: Settings) -> sensitivity.PairModels:
    return control_steps.pair_models(study, settings)


def mean(rows: pd.DataFrame) -> float:
    return float(rows["loss_sum"].sum() / rows["tokens"].sum())


def test_tables_have_their_columns_and_are_read_back_alike(
    done: PairControls, study: psd.Study, settings: Settings, second_text: Path
) -> None:
    assert list(done.losses.columns) == list(LOSS_COLUMNS)
    assert list(done.table.columns) == list(CONTROL_COLUMNS)
    again = run_controls(study, settings, replace(SMALL, second_text=str(second_text)))
    pd.testing.assert_frame_equal(again.table, done.table, check_dtype=False)
    pd.testing.assert_frame_equal(again.losses, done.losses, check_dtype=False)
    assert not list(done.path.glob(".*.tmp"))
    with pytest.raises(PsdError, match="controls of other settings"):
        run_controls(study, settings, replace(SMALL, n_damage_seeds=1))


@pytest.mark.parametrize("control", ["hidden_noise", "permuted_difference"])
def test_other_damage_costs_on_fit_what_the_pair_lost_there(control: str, done: PairControls, study: psd.Study) -> None:
    plain = study.losses[(study.losses["split"] == "fit") & (study.losses["correction"] == "none")]
    base = mean(plain[plain["member"] == "base"])
    gap = mean(plain[plain["member"] == "derived"]) - base
    own = done.losses[(done.losses["control"] == control) & (done.losses["correction"] == "none")]
    for _, rows in own[own["split"] == "fit"].groupby("damage_seed"):
        assert mean(rows) - base == pytest.approx(gap, abs=controls.GAP_TOLERANCE)
    shares = done.table[(done.table["analysis"] == "damage") & (done.table["control"] == control)]
    assert shares.loc[shares["correction"] == "bias_temperature", "damage_share"].notna().all()
    assert (shares.loc[shares["correction"] == "bias_temperature", "n_damage_seeds"] == 2).all()


def test_hidden_noise_is_noise_on_the_states_of_every_split(models: sensitivity.PairModels) -> None:
    base = models.base
    made = [controls.matched_hidden_noise(base, base.mean_loss("fit"), 0.2, seed) for seed in (0, 1)]
    noises = []
    for damage in made:
        assert torch.equal(damage.model.head, base.head)
        for split in ("fit", "select", "eval"):
            noise = (damage.model.splits[split].hidden - base.splits[split].hidden).double() / damage.noise_sd
            assert float(noise.std()) == pytest.approx(1.0, abs=0.03)
            noises.append(noise)
    assert not torch.allclose(noises[0], noises[3])
    assert made[0].model.mean_loss("fit") - base.mean_loss("fit") == pytest.approx(0.2, abs=controls.GAP_TOLERANCE)


def test_permuted_difference_moves_the_pairs_own_rows_to_other_tokens(models: sensitivity.PairModels) -> None:
    real = models.tokenizer_length
    damage = controls.matched_permuted_difference(
        models.base, models.derived, models.base.mean_loss("fit"), 0.2, 0, real
    )
    change = (damage.model.head - models.base.head).double()
    difference = (models.derived.head - models.base.head)[:real].double()
    assert bool((change[real:] == 0).all())
    # the same rows, all stretched alike, in another order
    ratio = change[:real].norm(dim=1).sort().values / difference.norm(dim=1).sort().values
    assert float(ratio.std() / ratio.mean()) < 1e-3
    assert not torch.allclose(change[:real] / ratio.mean(), difference, atol=1e-3)


def test_permuted_difference_is_refused_with_a_reason(models: sensitivity.PairModels) -> None:
    base = models.base
    loss, real = base.mean_loss("fit"), models.tokenizer_length
    with pytest.raises(PsdError, match="the same head"):
        controls.matched_permuted_difference(base, base, loss, 0.2, 0, real)
    with pytest.raises(PsdError, match="differ in shape"):
        controls.matched_permuted_difference(base, base.with_head(base.head[:-1]), loss, 0.2, 0, real)
    for make in (
        lambda: controls.matched_hidden_noise(base, loss, 0.0, 0),
        lambda: controls.matched_permuted_difference(base, models.derived, loss, -1.0, 0, real),
    ):
        with pytest.raises(PsdError, match="no damage to match"):
            make()


def test_every_setting_of_the_sensitivity_has_shares(done: PairControls, study: psd.Study, second_text: Path) -> None:
    rows = done.table[done.table["analysis"] == "sensitivity"]
    named = set(rows["setting"])
    assert {"top_k=0", "top_k=64", "top_k=all", "penalty=0", "penalty=0.1", "specials allowed"} <= named
    assert {f"text={second_text}", f"text={second_text}, fitted on the first"} <= named
    assert sum(s.startswith("fit_tokens=") for s in named) == 4
    # the study's own set is one of the settings, and gives the study's own shares
    own = rows[rows["setting"] == "top_k=64"].set_index("correction")["symmetric_share"]
    reported = study.recovery.set_index("correction")["symmetric_share"]
    for kind in ("bias", "bias_temperature"):
        assert own[kind] == pytest.approx(reported[kind], abs=1e-6)


def test_no_share_stands_without_its_damage_control(done: PairControls) -> None:
    kinds = done.table["correction"].isin(["bias", "bias_temperature"])
    shares = done.table[kinds & done.table["symmetric_share"].notna()]
    assert set(shares["analysis"]) == {"damage", "in-sample", "ladder", "sensitivity"}
    assert shares["damage_share"].notna().all()
    assert shares["excess_share"].to_numpy() == pytest.approx(
        (shares["symmetric_share"] - shares["damage_share"]).to_numpy(), abs=1e-12
    )


def test_killed_run_goes_on_after_its_last_finished_step(
    study: psd.Study, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = replace(study, path=tmp_path / study.path.name)
    copy.path.mkdir()
    shutil.copy(study.path / "summary.json", copy.path)
    calls: list[str] = []

    def fake(stop_at: str) -> Any:
        def steps(*_: Any) -> Any:
            rows = study.losses[study.losses["member"] == "derived"].assign(setting="top_k=0")
            rungs = rows.assign(setting="ladder", **dict.fromkeys(control_steps.RUNG_FACTS, 1.0))
            for name in ("first", "second", "third"):

                def make(name: str = name) -> pd.DataFrame:
                    calls.append(name)
                    if name == stop_at:
                        raise KeyboardInterrupt
                    made = rungs if name == "first" else rows
                    base = study.losses[study.losses["member"] == "base"].assign(setting=made["setting"].iloc[0])
                    return pd.concat([made, base]).assign(setting=lambda r: r["setting"] + ("" if name < "t" else "3"))

                yield name, make

        return steps

    monkeypatch.setattr(pair_controls, "steps", fake("third"))
    with pytest.raises(KeyboardInterrupt):
        run_controls(copy, settings, SMALL)
    monkeypatch.setattr(pair_controls, "steps", fake("none"))
    run_controls(copy, settings, SMALL)
    assert calls == ["first", "second", "third", "third"]
    assert not (copy.path / "control_parts").exists()

    def full(path: Path, table: pd.DataFrame) -> None:
        raise PsdError("no room")

    monkeypatch.setattr(pair_controls, "write_table", full)
    with pytest.raises(PsdError, match="no room"):
        run_controls(copy, settings, replace(SMALL, n_refits=3), overwrite=True)


def test_replaced_controls_are_never_read_with_the_facts_of_the_earlier(
    study: psd.Study, done: PairControls, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = replace(study, path=Path(shutil.copytree(study.path, tmp_path / study.path.name)))
    assert read_controls(copy.path) is not None
    write = pair_controls.write_table

    def killed_between_tables(path: Path, table: pd.DataFrame) -> None:
        write(path, table)
        if path.parent == copy.path:
            raise KeyboardInterrupt

    monkeypatch.setattr(pair_controls, "write_table", killed_between_tables)
    monkeypatch.setattr(pair_controls, "steps", lambda *_: [("ladder", lambda: done.losses)])
    monkeypatch.setattr(pair_controls, "_rung_facts", lambda _: pd.DataFrame({"correction": []}))
    with pytest.raises(KeyboardInterrupt):
        run_controls(copy, settings, replace(SMALL, n_refits=3), overwrite=True)
    assert read_controls(copy.path) is None


def test_controls_are_not_written_beside_another_study(study: psd.Study, settings: Settings, tmp_path: Path) -> None:
    copy = replace(study, path=tmp_path / study.path.name)
    copy.path.mkdir()
    write_json(copy.path / "summary.json", {**study.summary, "settings_sha256": "another"})
    with pytest.raises(PsdError, match="now holds a study with other settings"):
        run_controls(copy, settings, SMALL)


def test_controls_of_other_settings_or_without_captures_are_refused_at_once(
    study: psd.Study, settings: Settings, second_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(PsdError, match=r"of other settings \(top_k: \d+ there, 3 here\)"):
        run_controls(study, replace(settings, top_k=3), SMALL)
    for change in ({"n_damage_seeds": -1}, {"ladder_tokens": -1}, {"n_refits": 1}, {"n_resamples": 10}):
        with pytest.raises(PsdError, match=f"{next(iter(change))} must be at least"):
            run_controls(study, settings, replace(SMALL, **change))
    loaded = psd.load_study(study.pair, study.path.parent)
    with pytest.raises(PsdError, match="was loaded without its captures"):
        run_controls(loaded, settings, replace(SMALL, n_refits=3), overwrite=True)


def test_controls_of_another_study_are_left_out(done: PairControls, tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / done.path.name
    shutil.copytree(done.path, folder)
    assert read_controls(folder) is not None
    write_json(folder / "summary.json", {**read_json(folder / "summary.json"), "settings_sha256": "another"})
    assert read_controls(folder) is None
    assert "are those of another study" in caplog.text


def test_a_second_text_with_other_content_is_another_run(
    done: PairControls, study: psd.Study, settings: Settings, second_text: Path, tmp_path: Path
) -> None:
    before = second_text.read_bytes()
    try:
        second_text.write_bytes(before + before)
        with pytest.raises(PsdError, match="holds controls of other settings"):
            run_controls(study, settings, replace(SMALL, second_text=str(second_text)))
    finally:
        second_text.write_bytes(before)


def test_a_text_of_few_documents_has_each_amount_once(models: sensitivity.PairModels) -> None:
    lengths = models.base.splits["fit"].lengths.cumsum(0).tolist()
    assert set(sensitivity.amounts(models)) <= set(lengths)
    short = models.with_fit(lengths[1])
    assert sensitivity.amounts(short) == lengths[:2]


def test_in_sample_shares_are_those_of_the_fit_split(done: PairControls, study: psd.Study) -> None:
    rows = done.table[done.table["analysis"] == "in-sample"]
    expected = psd.recovery_table(study.losses, n_resamples=200, split="fit").set_index("correction")
    found = rows[rows["split"] == "fit"].set_index("correction")
    for kind in ("bias", "bias_temperature", "prior_ratio"):
        assert found.loc[kind, "symmetric_share"] == pytest.approx(expected.loc[kind, "symmetric_share"])


def test_what_the_set_leaves_out_adds_up(done: PairControls, models: sensitivity.PairModels) -> None:
    sums = done.left_out.groupby(["member", "correction"])[["mass", "tokens", "ids", "loss_sum"]].sum()
    np.testing.assert_allclose(sums["mass"], 1.0, atol=1e-5)
    assert (sums["tokens"] == len(models.base.splits["eval"].targets)).all()
    assert (sums["ids"] == models.base.head.shape[0]).all()
    losses = models.derived.losses("eval", [None])[0].double()
    assert sums.loc[("derived", "none"), "loss_sum"] == pytest.approx(float(losses.sum()), rel=1e-5)
    counts = done.left_out.drop_duplicates("group").set_index("group")["ids"]
    assert counts.to_dict() == {"set": 64, "special": 3, "padded": 8, "rare": 408 - 75}


def test_refitting_adds_to_the_spread(done: PairControls, study: psd.Study) -> None:
    refit = done.facts["refit"]
    row = study.recovery.set_index("correction").loc["bias_temperature"]
    assert refit["refit"] > 0
    assert refit["both"] > refit["documents"] * 0.9
    assert refit["documents"] == pytest.approx((row["symmetric_high"] - row["symmetric_low"]) / 3.92, rel=0.3)


def test_sentences_say_what_the_controls_found(done: PairControls) -> None:
    said = control_sentences(done)
    assert any("noise on the final states" in s for s in said)
    assert any("refitting inside the bootstrap" in s for s in said)


def test_pair_without_a_gap_gets_reasons_instead_of_shares(pair: psd.Pair, tmp_path: Path) -> None:
    turned = replace(pair, base=pair.derived, derived=pair.base, name="")
    study = psd.run_study(turned, out_dir=tmp_path, **OPTIONS)
    found = run_controls(study, resolve_settings(turned, out_dir=tmp_path, **OPTIONS), replace(SMALL, ranks=(1,)))
    assert found.table["symmetric_share"].isna().all()
    assert "no damage to match" in found.facts["refused"]["hidden_noise"]
    assert "nothing to recover" in found.facts["refused"]["refitting inside the bootstrap"]
    assert any("left out" in s for s in control_sentences(found))


def test_notebook_runs_at_a_small_size(pair: psd.Pair, tmp_path: Path, second_text: Path) -> None:
    given = {
        "base": pair.base.model, "derived": pair.derived.model, "text": str(pair.text), "top_k": 64, "dtype": "float32",
        "n_damage_seeds": 1, "n_resamples": 200, "out_dir": str(tmp_path / "results"), "n_seeds": 1,
        "n_independent": 1, "n_control_seeds": 1, "ladder_tokens": 1000, "second_text": str(second_text),
        "n_refits": 2,
    }  # fmt: skip
    notebook = papermill.execute_notebook(NOTEBOOK, tmp_path / "out.ipynb", given, progress_bar=False)
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 7
    text = "".join(o.get("text", "") for o in outputs if o.output_type == "stream")
    assert "does not exceed" in text or "exceeds" in text
    results = tmp_path / "results"
    for name in ("controls", "controls_losses", "left_out"):
        assert (results / pair.name / f"{name}.parquet").is_file()
    for figure in ("worlds", "coverage", f"damage_{pair.name}", f"ladder_{pair.name}", f"sensitivity_{pair.name}"):
        assert (results / "figures" / f"{figure}.png").stat().st_size > 1000
    source = "".join(c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells)
    assert "Noise alone gives T of 1.4" in source
