"""Where things lie: PSD_ROOT, else the nearest parent, else the source tree; defaults hang on the root."""

import re

import pytest
from conftest import REPOSITORY

from psd_utils import paths
from psd_utils.errors import PsdError
from psd_utils.pairs import model_folder


@pytest.fixture
def no_psd_root(monkeypatch):
    monkeypatch.delenv("PSD_ROOT")


def make_root(folder):
    (folder / "data").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "data" / "pairs.yaml").touch()
    return folder


def test_psd_root_comes_first(tmp_path, monkeypatch):
    root, other = make_root(tmp_path / "root"), make_root(tmp_path / "other")
    monkeypatch.chdir(other)
    monkeypatch.setenv("PSD_ROOT", str(root))
    assert paths.project_root() == root
    monkeypatch.setenv("PSD_ROOT", "../root")
    assert paths.project_root() == root


def test_wrong_psd_root_is_an_error_and_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PSD_ROOT", str(tmp_path))
    message = f"PSD_ROOT is {str(tmp_path)!r}, which does not hold pyproject.toml and data/pairs.yaml"
    with pytest.raises(PsdError, match=re.escape(message)):
        paths.project_root()


@pytest.mark.usefixtures("no_psd_root")
def test_nearest_parent_of_the_working_folder_is_the_root(tmp_path, monkeypatch):
    outer = make_root(tmp_path / "outer")
    inner = make_root(outer / "deep" / "inner")
    (inner / "notebooks").mkdir()
    (outer / "pyproject_only").mkdir()
    (outer / "pyproject_only" / "pyproject.toml").touch()
    for folder, expected in ((inner, inner), (inner / "notebooks", inner), (outer / "pyproject_only", outer)):
        monkeypatch.chdir(folder)
        assert paths.project_root() == expected


@pytest.mark.usefixtures("no_psd_root")
def test_source_tree_is_the_root_from_elsewhere(tmp_path, monkeypatch):
    """The tests run from an editable install."""
    monkeypatch.chdir(tmp_path)
    assert paths.project_root() == REPOSITORY


@pytest.mark.usefixtures("no_psd_root")
def test_without_any_root_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "lib" / "site-packages" / "psd_utils" / "paths.py"))
    message = f"no project root above {tmp_path}: run inside the repository, or set PSD_ROOT to the folder that holds"
    with pytest.raises(PsdError, match=re.escape(message)):
        paths.project_root()
    # a hub name is still one
    assert model_folder("org/model") is None


def test_default_folders_hang_on_the_root(root):
    assert paths.captures_dir() == root / "data" / "captures"
    assert paths.results_dir() == root / "data" / "results"
    assert paths.registry_file() == root / "data" / "pairs.yaml"


def test_models_are_found_in_the_working_folder_then_under_the_root(root, tmp_path, monkeypatch):
    (root / "models" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("models/m") == root / "models" / "m"
    (tmp_path / "models" / "m").mkdir(parents=True)
    assert model_folder("models/m").resolve() == tmp_path / "models" / "m"
    assert model_folder(str(root / "models" / "m")) == root / "models" / "m"
    assert model_folder("models/none") is None
    assert model_folder(str(tmp_path / "none")) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder("~/models/m") == tmp_path / "models" / "m"
