"""The whole path for one pair: tables, files, resuming, refusing, and the matched damage."""

import filecmp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import psd_utils as psd
from psd_utils import controls, report, study
from psd_utils.corpus import SPLITS
from psd_utils.fit import PENALTIES
from psd_utils.head import OutputModel

OPTIONS: dict[str, Any] = {"n_damage_seeds": 2, "n_resamples": 500, "device": "cpu"}
LOSS_COLUMNS = [
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
]
RECOVERY_COLUMNS = [
    "pair",
    "correction",
    "top_k",
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
    "temperature_base",
    "temperature_derived",
    "temperature_damage",
    "penalty_base",
    "penalty_derived",
    "selected_none_base",
    "selected_none_derived",
    "resamples_without_gap",
    "converged",
    "reason",
    "code_version",
]


@pytest.fixture(scope="module")
def done(pair: psd.Pair, tmp_path_factory: pytest.TempPathFactory) -> psd.Study:
    return psd.run_study(pair, out_dir=tmp_path_factory.mktemp("results"), **OPTIONS)


def test_tables_have_the_columns_of_the_design(done: psd.Study) -> None:
    assert list(done.losses.columns) == LOSS_COLUMNS
    assert list(done.recovery.columns) == RECOVERY_COLUMNS
    assert set(done.recovery["correction"]) == {
        "none", "temperature", "prior_ratio", "bias", "bias_temperature", "bias_all"
    }  # fmt: skip
    stored = pd.read_parquet(done.path / "recovery.parquet")
    pd.testing.assert_frame_equal(stored, done.recovery, check_dtype=False)


def test_every_loss_is_the_models_own_under_the_saved_correction(done: psd.Study, pair: psd.Pair) -> None:
    """Full logits from transformers, float64 log-softmax, document by document."""
    for role, member in (("base", pair.base), ("derived", pair.derived)):
        model = AutoModelForCausalLM.from_pretrained(member.model, dtype=torch.float32).eval()
        corpus = done.captures[role].corpus
        for kind in ("none", "temperature", "bias", "bias_temperature", "bias_all"):
            fix = psd.Correction.load(done.path / "corrections" / f"{role}-{kind}.safetensors")
            own = done.losses[(done.losses["member"] == role) & (done.losses["correction"] == kind)]
            sums = own.set_index("document")["loss_sum"]
            for d in (0, 7, len(corpus.keys) - 1):
                ids = corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]]
                read = torch.cat([torch.tensor([corpus.prefix_id]), ids[:-1]])
                with torch.inference_mode():
                    logits = model(read[None]).logits[0].double()
                expected = torch.nn.functional.cross_entropy(fix.apply(logits), ids, reduction="sum")
                assert sums[corpus.keys[d]] == pytest.approx(float(expected), rel=1e-5)


def test_uncorrected_row_is_never_a_choice_of_select(done: psd.Study) -> None:
    none = done.recovery.set_index("correction").loc["none"]
    assert not none["selected_none_base"]
    assert not none["selected_none_derived"]
    assert not any(record["none"]["selected_none"] for record in done.summary["fits"].values())
    assert pd.isna(none["reason"]) or "no correction is better" not in none["reason"]


def test_losses_alone_rebuild_every_loss_based_column(done: psd.Study) -> None:
    rebuilt = psd.recovery_table(pd.read_parquet(done.path / "losses.parquet"), n_resamples=500, seed=0)
    for name in set(rebuilt.columns) - {"reason"}:
        pd.testing.assert_series_equal(rebuilt[name], done.recovery[name], check_dtype=False)


def test_rows_cover_every_split_document_model_and_kind_once(done: psd.Study) -> None:
    keys = ["member", "damage_seed", "correction", "document", "split"]
    assert not done.losses.duplicated(keys).any()
    corpus = done.captures["base"].corpus
    per_model = done.losses.groupby(["member", "damage_seed", "correction"], dropna=False).size()
    assert (per_model == len(corpus.keys)).all()
    assert len(per_model) == 2 * 6 + 2 * 5
    assert set(done.losses["split"]) == set(SPLITS)


def test_selected_penalty_is_the_best_on_select_without_looking_at_eval(done: psd.Study) -> None:
    capture = done.captures["derived"]
    model = OutputModel.of(capture, torch.device("cpu"))
    ids = done.corrections["derived", "bias"].ids
    losses = {}
    for penalty in PENALTIES:
        fit = psd.fit_correction(model.statistics("fit", ids), "bias", penalty)
        losses[penalty] = model.mean_loss("select", fit.correction)
    best = min(losses.values())
    chosen = done.summary["fits"]["derived"]["bias"]["penalty"]
    assert losses[chosen] == pytest.approx(best, abs=1e-7)


def test_damaged_models_lose_what_the_pair_loses_on_fit(done: psd.Study) -> None:
    uncorrected = done.losses[(done.losses["correction"] == "none") & (done.losses["split"] == "fit")]

    def mean(rows: pd.DataFrame) -> float:
        return float(rows["loss_sum"].sum() / rows["tokens"].sum())

    base = mean(uncorrected[uncorrected["member"] == "base"])
    gap = mean(uncorrected[uncorrected["member"] == "derived"]) - base
    damaged = uncorrected[uncorrected["member"] == "damaged"]
    for _, rows in damaged.groupby("damage_seed"):
        assert mean(rows) - base == pytest.approx(gap, abs=controls.GAP_TOLERANCE)


def test_damage_is_noise_on_real_rows_only_and_differs_by_seed(done: psd.Study) -> None:
    capture = done.captures["base"]
    base = OutputModel.of(capture, torch.device("cpu"))
    real = capture.manifest["tokenizer_length"]
    loss = base.mean_loss("fit")
    made = [controls.matched_head_noise(base, loss, 0.2, seed, real) for seed in (0, 1)]
    noises = [(damage.model.head - base.head) / damage.noise_sd for damage in made]
    for damage, noise in zip(made, noises, strict=True):
        assert damage.fit_gap == pytest.approx(0.2, abs=controls.GAP_TOLERANCE)
        assert damage.model.mean_loss("fit") - loss == pytest.approx(0.2, abs=controls.GAP_TOLERANCE)
        assert base.head.shape[0] > real
        assert bool((noise[real:] == 0).all())
        values = noise[:real].double().flatten()
        assert float(values.mean()) == pytest.approx(0.0, abs=4 / np.sqrt(len(values)))
        assert float(values.std()) == pytest.approx(1.0, abs=4 / np.sqrt(2 * len(values)))
    assert abs(float(torch.corrcoef(torch.stack([n[:real].flatten() for n in noises]))[0, 1])) < 0.05


def test_no_gap_means_no_damage_no_share_and_a_reason(pair: psd.Pair, tmp_path: Path) -> None:
    swapped = psd.Pair(base=pair.derived, derived=pair.base, text=pair.text, top_k=64, dtype="float32")
    result = psd.run_study(swapped, out_dir=tmp_path, **OPTIONS)
    assert set(result.losses["member"]) == {"base", "derived"}
    assert result.recovery["symmetric_share"].isna().all()
    assert result.recovery["reason"].str.contains("nothing to recover").all()
    assert "no share is defined" in report.sentences(result.recovery)[0]


def test_other_settings_are_refused_in_the_same_folder_unless_overwritten(pair: psd.Pair, done: psd.Study) -> None:
    before = (done.path / "recovery.parquet").read_bytes()
    with pytest.raises(psd.PsdError, match="holds the results of other settings \\(top_k: 64 there, 32 now\\)"):
        psd.run_study(pair, out_dir=done.path.parent, top_k=32, **OPTIONS)
    assert (done.path / "recovery.parquet").read_bytes() == before


def test_overwrite_replaces_the_results(pair: psd.Pair, tmp_path: Path) -> None:
    psd.run_study(pair, out_dir=tmp_path, **OPTIONS | {"n_damage_seeds": 1})
    again = psd.run_study(pair, out_dir=tmp_path, overwrite=True, **OPTIONS | {"n_damage_seeds": 0})
    assert set(again.losses["member"]) == {"base", "derived"}
    assert not list((again.path / "parts").glob("damaged*"))
    assert again.recovery["damage_share"].isna().all()
    assert again.recovery["reason"].str.contains("no damaged models").all()


def test_same_folders_spelt_otherwise_are_the_same_run(
    pair: psd.Pair, done: psd.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(pair.base.model).parent)
    spelt = psd.Pair(base="base", derived="./derived", text=pair.text, top_k=64, dtype="float32")
    assert spelt.name == pair.name
    again = psd.run_study(spelt, out_dir=done.path.parent, **OPTIONS)
    pd.testing.assert_frame_equal(again.recovery, done.recovery, check_dtype=False)


def test_other_settings_are_refused_before_anything_is_scored(
    pair: psd.Pair, done: psd.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "score_member", None)
    with pytest.raises(psd.PsdError, match="holds the results of other settings"):
        psd.run_study(pair, out_dir=done.path.parent, n_tokens=2000, **OPTIONS)


def test_damaged_part_is_named_with_what_to_do(pair: psd.Pair, tmp_path: Path) -> None:
    result = psd.run_study(pair, out_dir=tmp_path, **OPTIONS | {"n_damage_seeds": 0})
    part = result.path / "parts" / "derived.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(psd.PsdError, match=r"derived.parquet is damaged .*delete it and run again"):
        psd.run_study(pair, out_dir=tmp_path, **OPTIONS | {"n_damage_seeds": 0})
    part.unlink()
    again = psd.run_study(pair, out_dir=tmp_path, **OPTIONS | {"n_damage_seeds": 0})
    pd.testing.assert_frame_equal(again.recovery, result.recovery, check_dtype=False)


def test_masked_padding_is_another_run_with_the_padded_rows_out_of_the_softmax(pair: psd.Pair, tmp_path: Path) -> None:
    options = OPTIONS | {"n_damage_seeds": 0}
    plain = psd.run_study(pair, out_dir=tmp_path / "plain", **options).recovery.set_index("correction")
    masked = psd.run_study(pair, out_dir=tmp_path / "masked", mask_padding=True, **options)
    assert (masked.recovery.set_index("correction")["loss_base"] < plain["loss_base"]).all()
    with pytest.raises(psd.PsdError, match="mask_padding"):
        psd.run_study(pair, out_dir=tmp_path / "masked", **options)


def test_study_can_be_loaded_without_any_model(done: psd.Study, pair: psd.Pair) -> None:
    loaded = psd.load_study(pair, done.path.parent)
    pd.testing.assert_frame_equal(loaded.recovery, done.recovery, check_dtype=False)
    assert set(loaded.corrections) == set(done.corrections)
    for key, fix in done.corrections.items():
        assert torch.equal(loaded.corrections[key].bias, fix.bias)


RUN = """
import sys
import psd_utils as psd
pair = psd.Pair(base=sys.argv[1], derived=sys.argv[2], text=sys.argv[3], top_k=64, dtype="float32")
psd.run_study(pair, out_dir=sys.argv[4], n_damage_seeds=2, n_resamples=500, device="cpu")
"""


def files(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}


def test_killed_study_resumes_and_ends_with_the_same_bytes(pair: psd.Pair, done: psd.Study, tmp_path: Path) -> None:
    assert pair.text is not None
    command = [sys.executable, "-c", RUN, pair.base.model, pair.derived.model, pair.text, str(tmp_path)]
    target = tmp_path / pair.name
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    # kill as soon as each of these files appears, that is between and inside the parts of the run
    for awaited in ("summary.json", "parts/base.parquet", "parts/damaged-0.parquet"):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not (target / awaited).exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    expected, found = files(done.path), files(target)
    assert found.keys() == expected.keys()
    different = [name for name in expected if not filecmp.cmp(expected[name], found[name], shallow=False)]
    assert different == []


def test_a_run_clears_its_own_half_written_files_and_no_others(pair: psd.Pair, done: psd.Study) -> None:
    own = [done.path / name for name in (".losses.parquet.1.tmp", "parts/.base.parquet.1.tmp")]
    others = [done.path / name for name in (".controls_losses.parquet.1.tmp", "explorer/.base.safetensors.1.tmp")]
    others[1].parent.mkdir(exist_ok=True)
    for path in (*own, *others):
        path.touch()
    psd.run_study(pair, out_dir=done.path.parent, **OPTIONS)
    assert not any(path.exists() for path in own)
    for path in others:
        path.unlink()
    others[1].parent.rmdir()


@pytest.mark.parametrize(
    ("name", "value"), [("n_tokens", 0), ("top_k", -1), ("seed", 1.5), ("n_damage_seeds", True), ("n_resamples", 5)]
)
def test_settings_out_of_range_are_refused_by_name(pair: psd.Pair, name: str, value: Any) -> None:
    with pytest.raises(psd.PsdError, match=f"{name} must be a whole number of at least"):
        psd.run_study(pair, **{name: value})


def test_unknown_device_and_dtype_are_refused(pair: psd.Pair) -> None:
    with pytest.raises(psd.PsdError, match="device 'gpu' cannot be used here"):
        psd.run_study(pair, device="gpu")
    with pytest.raises(psd.PsdError, match="dtype 'float23': did you mean 'float32'"):
        psd.run_study(pair, dtype="float23")


def test_padded_rows_stay_in_the_softmax_and_their_mass_is_reported(done: psd.Study) -> None:
    capture = done.captures["base"]
    model = OutputModel.of(capture, torch.device("cpu"))
    states, length = model.splits["eval"], capture.manifest["tokenizer_length"]
    p = (states.hidden.double() @ model.head.double().T).softmax(dim=1)
    assert done.summary["padded_mass"]["base"] == pytest.approx(float(p[:, length:].sum(dim=1).mean()), rel=1e-5)
    masked = OutputModel.of(capture, torch.device("cpu"), mask_padding=True)
    expected = -(p[:, :length] / p[:, :length].sum(dim=1, keepdim=True)).gather(1, states.targets[:, None]).log()
    assert masked.mean_loss("eval") == pytest.approx(float(expected.mean()), rel=1e-6)
    assert masked.mean_loss("eval") < model.mean_loss("eval")


def test_study_is_frozen(done: psd.Study) -> None:
    with pytest.raises(AttributeError):
        done.path = Path("elsewhere")
