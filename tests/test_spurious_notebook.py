"""The explorer, and the notebook run from top to bottom in its quick setting."""

import threading
from pathlib import Path

import nbformat
import pytest

from psd_utils.spurious import rates
from psd_utils.spurious.explorer import Exploration, Explorer, explore
from psd_utils.spurious.memory import MemorySettings, make_world
from psd_utils.spurious.training import gate_step, pretrain

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "05_spurious.ipynb"


@pytest.fixture(scope="module")
def table():
    return rates.load_rates()


def test_stored_rates_cover_the_grid_and_meet_the_gate(table):
    n_cells = 1
    for values in rates.GRID.values():
        n_cells *= len(values)
    assert len(table) == n_cells * len(rates.SEEDS)
    assert bool(table["matched"].all())
    settings = MemorySettings(alpha=0.3, n_new=64)
    world = make_world(settings, rates.SEEDS)
    found = gate_step(world, pretrain(world).weights, rates.stored_rate(table, settings), 230)
    assert bool(((found - 200).abs() <= 30).all())
    with pytest.raises(KeyError, match=r"No stored rate for .* alpha = 0\.35"):
        rates.stored_rate(table, MemorySettings(alpha=0.35))


def test_explorer_shows_the_acts_and_their_absence(table):
    model = explore(MemorySettings(), table).numbers().iloc[0]
    linear = explore(MemorySettings(normalisation="none"), table).numbers().iloc[0]
    control = explore(MemorySettings(new_answers="all"), table).numbers().iloc[0]
    assert model.trough < 0.3 < 0.45 < model.max_after
    assert linear.max_after < 0.05
    assert control.trough > 0.6


def test_the_last_move_wins_and_errors_are_shown(table):
    base = explore(MemorySettings(), table, 20)
    gate, seen = threading.Event(), []

    def slow(settings: MemorySettings, rates_table: object) -> Exploration:
        seen.append(settings.alpha)
        if settings.alpha == 0.2:
            gate.wait(10)
        if settings.alpha == 0.7:
            raise RuntimeError("<no>")
        return Exploration(settings, base.trajectory)

    explorer = Explorer(table, slow, delay=0.05)
    assert explorer.start().settings.alpha == 0.5
    assert bytes(explorer.image.value).startswith(b"\x89PNG")
    explorer.alpha.value = 0.2
    while len(seen) < 2:
        threading.Event().wait(0.01)
    explorer.alpha.value = 0.3
    explorer.alpha.value = 0.4
    gate.set()
    assert explorer.wait()
    assert seen == [0.5, 0.2, 0.4]
    assert explorer.result.settings.alpha == 0.4
    explorer.alpha.value = 0.7
    assert explorer.wait()
    assert "Not computed" in explorer.status.value
    assert "&lt;no&gt;" in explorer.status.value
    explorer.n_new.value = 64
    explorer.alpha.value = 0.1
    assert explorer.wait()
    assert "A falls to" in explorer.status.value


def test_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(
        not c.get("outputs") and c.get("execution_count") is None for c in notebook.cells if c.cell_type == "code"
    )
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1


def test_notebook_runs_quickly_from_another_folder(tmp_path, monkeypatch):
    papermill = pytest.importorskip("papermill")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PSD_ROOT", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1] / "src"))
    parameters = {"n_seeds": 2, "n_steps": 600, "out_dir": "run"}
    papermill.execute_notebook(str(NOTEBOOK), "out.ipynb", parameters, kernel_name="python3", progress_bar=False)
    written = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"acceptance.csv", "arms.csv", "curves.csv", "sweep.csv", "settings.json"} <= written
    assert {"acceptance_transformer.csv", "transformer_runs.csv", "spurious_transformer_acts.png"} <= written
    errors = [
        o.get("text", "")
        for c in nbformat.read("out.ipynb", as_version=4).cells
        for o in c.get("outputs", [])
        if o.get("name") == "stderr"
    ]
    assert not errors, errors
