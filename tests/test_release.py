"""The release archive: what is in it and what is not, that it is whole, and that it suffices for the figures."""

import hashlib
import logging
import shutil
import tarfile
from pathlib import Path

import pandas as pd
import papermill
import pytest
import yaml
from conftest import REPOSITORY
from safetensors import safe_open

import psd_utils as psd
from psd_utils import figures, recovery, release, report
from psd_utils.errors import PsdError

pytestmark = pytest.mark.usefixtures("single_thread")
PAIR_FILES = [
    *("losses.parquet", "recovery.parquet", "loss_profile.parquet", "tokens.parquet", "summary.json"),
    *("manifests/base.json", "manifests/derived.json"),
]


@pytest.fixture(scope="module")
def study(pair, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    options = {"n_tokens": 2000, "n_damage_seeds": 2, "n_resamples": 300, "device": "cpu"}
    return psd.run_study(pair, **options, out_dir=results)


def pack(path, study, results=None, captures=None):
    """Write a release of the repository's own files and a study's results; return the names of its files."""
    captures = captures or study.captures["base"].folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PSD_ROOT", str(REPOSITORY))
        return release.write_release(path, results or study.path.parent, captures)


@pytest.fixture(scope="module")
def archive(study, tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "release.tar.gz"
    return path, pack(path, study)


@pytest.fixture(scope="module")
def unpacked(archive, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive[0]) as opened:
        opened.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def test_archive_holds_what_its_list_says(archive, unpacked, study):
    found = sorted(str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file())
    assert found == sorted(archive[1])
    place = f"data/results/{study.pair.name}"
    assert {f"{place}/{name}" for name in PAIR_FILES} <= set(found)
    for name in ("CITATION.cff", "LICENSE", "SHA256SUMS", "data/published/pairs.csv", "notebooks/04_figures.ipynb"):
        assert name in found
    assert yaml.safe_load((unpacked / "CITATION.cff").read_text())["license"] == "Apache-2.0"


def test_no_hidden_states_and_no_weights_are_published(unpacked):
    for path in unpacked.rglob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            assert set(file.keys()) == {"ids", "bias", "temperature"}
    assert not [p for p in unpacked.rglob("*") if p.name.startswith(("hidden", "head", "corpus", "model"))]


def test_archive_is_small(archive, study):
    """Documents are few, so that even fourteen real pairs make some tens of megabytes."""
    rows = len(study.losses)
    assert archive[0].stat().st_size < 2**20
    assert (study.path / "losses.parquet").stat().st_size < 40 * rows


def test_checksums_are_those_of_the_files(unpacked, tmp_path):
    lines = (unpacked / "SHA256SUMS").read_text().splitlines()
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((unpacked / name).read_bytes()).hexdigest() == digest
    assert release.check_release(unpacked) == []
    copy = tmp_path / "copy"
    shutil.copytree(unpacked, copy)
    (copy / "LICENSE").write_text("changed")
    (copy / "CITATION.cff").unlink()
    assert release.check_release(copy) == ["CITATION.cff", "LICENSE"]
    with pytest.raises(PsdError, match="holds no SHA256SUMS: it is not an unpacked release"):
        release.check_release(tmp_path)


def test_same_results_give_the_same_archive(archive, study, tmp_path):
    pack(tmp_path / "again.tar.gz", study)
    assert (tmp_path / "again.tar.gz").read_bytes() == archive[0].read_bytes()


def test_recovery_follows_from_the_published_losses(unpacked, study):
    losses = pd.read_parquet(unpacked / "data" / "results" / study.pair.name / "losses.parquet")
    again = recovery.recovery_table(losses, n_resamples=300, seed=0)
    for name in ("gap", "symmetric_share", "symmetric_low", "damage_share", "excess_share"):
        pd.testing.assert_series_equal(again[name], study.recovery[name], check_dtype=False)


def test_figures_are_made_from_the_archive_alone(unpacked, study, monkeypatch, tmp_path):
    """No model, no capture, no other folder: the unpacked archive is the project's root."""
    root = tmp_path / "root"
    shutil.copytree(unpacked, root)
    monkeypatch.setenv("PSD_ROOT", str(root))
    (found,) = report.finished_studies(None)
    pd.testing.assert_frame_equal(found.recovery, study.recovery)
    assert set(found.corrections) == set(study.corrections)
    folder = report.figures_folder(None)
    assert folder == root / "data" / "results" / "figures"
    figures.save_figure(figures.share_figure(found.recovery), found.recovery, folder / "shares")
    published = pd.read_csv(root / "data" / "published" / "pairs.csv")
    figures.save_figure(figures.published_figure(published, found.recovery), published, folder / "published")
    assert {p.name for p in folder.iterdir()} >= {"shares.svg", "shares.csv", "published.svg"}


@pytest.mark.slow
def test_04_figures_runs_from_the_archive_alone(unpacked, monkeypatch, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(unpacked, root)
    monkeypatch.setenv("PSD_ROOT", str(root))
    notebook = root / "notebooks" / "04_figures.ipynb"
    papermill.execute_notebook(notebook, tmp_path / "out.ipynb", {}, progress_bar=False, cwd=str(tmp_path))
    assert len(list((root / "data" / "results" / "figures").glob("*.svg"))) >= 9
    assert len(list((root / "data" / "results").glob("*/report.html"))) == 1


def test_places_on_this_machine_are_pointed_out(study, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="psd_utils"):
        pack(tmp_path / "a.tar.gz", study)
    assert f"summary.json names places on this machine: {study.pair.base.model}" in caplog.text


def test_capture_that_is_gone_leaves_out_its_manifest_and_says_so(study, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="psd_utils"):
        names = pack(tmp_path / "a.tar.gz", study, captures=tmp_path / "none")
    assert not [name for name in names if "manifests" in name]
    assert "the capture of the base model is gone, so its manifest is left out" in caplog.text


def test_unfinished_studies_are_left_out(study, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "summary.json").write_text('{"settings": {}}')
    with pytest.raises(PsdError, match="no finished study in"):
        pack(tmp_path / "a.tar.gz", study, results=tmp_path)
    assert not (tmp_path / "a.tar.gz").exists()


def test_foreign_tensors_among_the_corrections_are_refused(study, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(study.path.parent, results)
    shutil.copy(
        Path(REPOSITORY / "data" / "demo" / "base" / "model.safetensors"), results / study.pair.name / "corrections"
    )
    with pytest.raises(
        PsdError, match=r"model.safetensors is damaged, or not a file of this package|is not a saved correction"
    ):
        pack(tmp_path / "a.tar.gz", study, results=results)


def test_a_study_under_another_name_is_not_counted_twice(study, tmp_path, caplog):
    for name in (study.pair.name, "kept_for_later"):
        shutil.copytree(study.path, tmp_path / name)
    (found,) = report.finished_studies(str(tmp_path))
    assert found.pair.name == study.pair.name
    assert "kept_for_later holds a study of" in caplog.text


def test_a_study_without_one_of_its_corrections_is_refused(study, tmp_path):
    shutil.copytree(study.path, tmp_path / study.pair.name)
    (tmp_path / study.pair.name / "corrections" / "derived-bias.safetensors").unlink()
    with pytest.raises(PsdError, match="lacks derived-bias: run 02_fit again"):
        psd.load_study(study.pair, tmp_path)
