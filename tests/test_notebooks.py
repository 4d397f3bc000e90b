"""The notebooks as papermill runs them, and as a person does in JupyterLab."""

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import papermill
import pytest
from nbclient import NotebookClient

import psd_utils as psd

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
STUDY_PARAMETERS = {
    "pair", "base", "derived", "base_revision", "derived_revision", "base_adapter", "derived_adapter", "text",
    "n_tokens", "top_k", "device", "dtype", "seed", "n_resamples", "n_damage_seeds", "members", "out_dir", "overwrite",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(pair: psd.Pair, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., nbformat.NotebookNode]:
    """Return run(name, **parameters) -> the executed notebook; all run in one folder."""
    folder = tmp_path_factory.mktemp("notebooks")

    def execute(name: str, **parameters: Any) -> nbformat.NotebookNode:
        output = folder / f"{name}.ipynb"
        source = NOTEBOOKS / f"{name}.ipynb"
        return papermill.execute_notebook(source, output, {**parameters}, progress_bar=False, cwd=str(folder))

    execute.folder = folder
    return execute


def own_pair(pair: psd.Pair, folder: Path) -> dict[str, Any]:
    return {
        "base": pair.base.model,
        "derived": pair.derived.model,
        "text": str(pair.text),
        "top_k": 64,
        "n_damage_seeds": 2,
        "n_resamples": 500,
        "dtype": "float32",
        "out_dir": str(folder / "results"),
    }


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return "".join(o.get("text", "") for o in outputs if o.output_type == "stream")


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


def check_widgets(notebook: nbformat.NotebookNode) -> None:
    """Check that a saved notebook has a state for every widget that it shows, and a picture for viewers without any."""
    nbformat.validate(notebook)
    view = "application/vnd.jupyter.widget-view+json"
    shown = [o.data for c in notebook.cells if c.cell_type == "code" for o in c.outputs if view in o.get("data", {})]
    explorers = [data for data in shown if "image/png" in data]
    assert len(explorers) == 1
    state = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert {data[view]["model_id"] for data in shown} <= set(state)


def test_own_pair_by_two_paths_goes_through_all_three_notebooks(pair: psd.Pair, run: Any) -> None:
    given = own_pair(pair, run.folder)
    scored = run("01_score", **given)
    assert "120 documents" in printed(scored)
    assert pictures(scored) == 1
    fitted = run("02_fit", **given)
    assert "random damage of the same size gives back" in printed(fitted)
    assert pictures(fitted) == 6
    check_widgets(fitted)
    results = run.folder / "results" / pair.name
    recovery = pd.read_parquet(results / "recovery.parquet")
    assert recovery["symmetric_share"].notna().sum() == 6
    drawn = run("04_figures", out_dir=given["out_dir"])
    overview = ("forest", "gap_share", "temperatures", "published")
    own = tuple(f"{what}_{pair.name}" for what in ("shares", "losses", "temperatures", "biases", "profile"))
    assert pictures(drawn) == len(overview + own)
    assert f"1 pairs, 0 with controls, {len(overview + own)} pictures as SVG, PNG and CSV, 1 reports" in printed(drawn)
    assert (results / "report.html").stat().st_size < 1_500_000
    figures = run.folder / "results" / "figures"
    for name in overview + own:
        for suffix in (".svg", ".png", ".csv"):
            assert (figures / f"{name}{suffix}").stat().st_size > 100
    temperatures = pd.read_csv(figures / "temperatures.csv")
    assert list(temperatures["correction"]) == ["temperature", "bias and temperature"]
    assert (temperatures["pair"] == pair.name).all()


def test_notebook_finds_the_same_captures_from_any_folder(
    pair: psd.Pair, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psd_utils.paths import captures_dir

    before = sorted(p.name for p in captures_dir().iterdir())
    monkeypatch.chdir(tmp_path)
    given = own_pair(pair, run.folder) | {"out_dir": "elsewhere"}
    papermill.execute_notebook(NOTEBOOKS / "02_fit.ipynb", "out.ipynb", given, progress_bar=False)
    assert sorted(p.name for p in captures_dir().iterdir()) == before
    assert (tmp_path / "elsewhere" / pair.name / "recovery.parquet").is_file()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"pairs": "tiny_math"}, "unknown parameter 'pairs'; did you mean 'pair'"),
        ({"base": "a", "derived": "b", "base_revision": 7}, "give it with -r base_revision"),
    ],
)
def test_wrong_parameters_stop_the_notebook_with_words(parameters: dict[str, Any], message: str, run: Any) -> None:
    with pytest.raises(papermill.PapermillExecutionError) as stopped:
        run("01_score", **parameters)
    assert message in str(stopped.value)


def test_running_all_cells_twice_in_one_kernel_works(pair: psd.Pair, run: Any) -> None:
    notebook = nbformat.read(NOTEBOOKS / "02_fit.ipynb", as_version=4)
    given = own_pair(pair, run.folder)
    injected = nbformat.v4.new_code_cell("# Parameters\n" + "\n".join(f"{k} = {v!r}" for k, v in given.items()))
    at = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
    notebook.cells.insert(at + 1, injected)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(run.folder)}})
    with client.setup_kernel():
        for _ in range(2):
            for i, cell in enumerate(notebook.cells):
                client.execute_cell(cell, i)
    assert pictures(notebook) == 6


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_is_committed_clean_and_says_what_it_needs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code)
    assert "widgets" not in notebook.metadata
    heading = notebook.cells[0].source
    for what in ("In", "Out", "(Time|Run time)"):
        assert re.search(rf"\*\*{what}(puts?)?:?\*\*", heading)
    tagged = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert tagged[0].source.startswith("# Defaults")
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)


@pytest.mark.parametrize("name", ["01_score", "02_fit"])
def test_study_notebooks_take_the_parameters_of_the_design(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    source = next(c.source for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    names = {t.id for s in ast.parse(source).body if isinstance(s, ast.Assign) for t in s.targets}
    assert names == STUDY_PARAMETERS


def test_papermill_command_line_runs_a_registered_pair(run: Any, tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "papermill", str(NOTEBOOKS / "01_score.ipynb"), "out.ipynb"]
    command += ["-r", "pair", "tiny_math_light", "-p", "n_tokens", "4000", "-r", "members", "base"]
    finished = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "documents" in printed(nbformat.read(tmp_path / "out.ipynb", as_version=4))
