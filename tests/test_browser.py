"""The explorers in JupyterLab in a real browser: what is shown is what Python computes, and nothing complains."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from browser import ARTEFACTS, Lab, OpenNotebook, Seen, browser_page, check_offline_page, chromium, jupyter_lab
from conftest import REPOSITORY
from playwright.sync_api import Locator, Page

from psd_utils.exploration import Exploration
from psd_utils.html_report import write_report
from psd_utils.readings import Choice, Reading
from psd_utils.study import Study

EXPLORER_OF_05 = """from psd_utils.spurious.explorer import Explorer

explorer = Explorer()
first = explorer.start()
explorer.view"""


def write_notebook(path: Path, *sources: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def write_02_fit(path: Path, parameters: dict[str, Any]) -> None:
    """Copy 02_fit with a cell of parameters, as papermill writes it."""
    notebook = nbformat.read(REPOSITORY / "notebooks" / "02_fit.ipynb", as_version=4)
    lines = [f"{name} = {value!r}" for name, value in parameters.items()]
    at = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell("\n".join(["# Parameters", *lines])))
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    chromium()  # before anything is started
    with jupyter_lab(tmp_path_factory.mktemp("lab"), {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}) as running:
        yield running


@pytest.fixture
def opened(lab: Lab) -> Iterator[tuple[Page, Seen]]:
    with browser_page() as found:
        yield found


@pytest.fixture(scope="module")
def exploration(small_study: Study) -> Exploration:
    return Exploration(small_study)


def shown(notebook: OpenNotebook, quantity: str) -> str:
    return notebook.text(f".psd-readouts [data-quantity='{quantity}']")


def place_of(element: Locator) -> tuple[float, float]:
    """Return where the middle of an element is in the window."""
    box = element.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def four_digits(value: float) -> str:
    return f"{value:.4f}"


def assert_shows(notebook: OpenNotebook, reading: Reading) -> None:
    """Wait for the loss of a reading, then compare every number."""
    notebook.wait_for_text(".psd-readouts [data-quantity='loss']", four_digits(reading.loss))
    notebook.settle()
    table = reading.table().set_index("quantity")
    for quantity in ("temperature T", "loss", "calibration error", "best T at this strength"):
        assert shown(notebook, quantity.replace(" ", "-")) == four_digits(table.loc[quantity, "value"])
    share = reading.share
    interval = f"{share.value:.4f} [{share.low:.4f}, {share.high:.4f}]"
    assert shown(notebook, "symmetric-share") == interval


def test_explorer_of_02_fit_shows_what_python_computes(
    lab: Lab, opened: tuple[Page, Seen], small_study: Study, exploration: Exploration
) -> None:
    page, seen = opened
    members = {"base": small_study.pair.base.model, "derived": small_study.pair.derived.model}
    given = members | {"text": str(small_study.pair.text), "top_k": 64, "n_damage_seeds": 1, "n_resamples": 300}
    write_02_fit(lab.folder / "02_fit.ipynb", given | {"dtype": "float32", "out_dir": str(small_study.path.parent)})
    notebook = OpenNotebook(page, lab, "02_fit.ipynb")
    notebook.run_all()
    errors = [o for o in notebook.outputs() if o["output_type"] == "error"]
    assert not errors, errors
    assert_shows(notebook, exploration.reading(Choice()))
    assert "fitted on fit by the study" in notebook.text(".psd-status")
    page.wait_for_selector(".psd-loss-plot svg path")

    # the temperature: by key, then dragged with the mouse to its end
    handle = page.locator(".psd-temperature [role=slider]")
    fitted = round(exploration.reading(Choice()).temperature, 2)
    handle.press("ArrowRight")
    assert_shows(notebook, exploration.reading(Choice(temperature=round(fitted + 0.01, 2))))
    assert "set by hand while looking at eval: an illustration, not a result" in notebook.text(".psd-status")
    before = place_of(page.locator(".psd-loss-plot .dot").last)
    x, y = place_of(handle)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 600, y, steps=25)
    page.mouse.up()
    assert_shows(notebook, exploration.reading(Choice(temperature=2.0)))
    assert place_of(page.locator(".psd-loss-plot .dot").last)[0] > before[0] + 50

    # the strength of the bias, fifty steps down in quick succession, end in one right state
    strength = page.locator(".psd-strength [role=slider]")
    strength.focus()
    for _ in range(50):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function("document.querySelector('.psd-strength [role=slider]').ariaValueNow == 0.5")
    assert_shows(notebook, exploration.reading(Choice(temperature=2.0, strength=0.5)))

    # back to what was fitted; another correction, another model, a smaller set
    page.locator("button.psd-reset").click()
    assert_shows(notebook, exploration.reading(Choice()))
    notebook.choose("psd-kind", "bias")
    assert_shows(notebook, exploration.reading(Choice(kind="bias")))
    notebook.choose("psd-top-k", "16 (fitted anew)")
    assert_shows(notebook, exploration.reading(Choice(kind="bias", top_k=16)))
    assert "rougher than the study" in notebook.text(".psd-status")
    notebook.choose("psd-member", "randomly damaged base")
    assert_shows(notebook, exploration.reading(Choice("damaged-0", "bias", 16)))

    # a document: another one, and its tokens by what was given back
    notebook.choose("psd-member", "derived")
    page.locator(".psd-document select").select_option(index=1)
    page.locator(".psd-colouring button", has_text="given back").click()
    notebook.wait_for_text(".psd-text", "loss given back")
    assert page.locator(".psd-text i").count() == len(exploration.tokens(1))
    page.locator(".psd-search input").fill("zzzz")
    notebook.wait_for_text(".psd-biases", "0 shown of 0 found")
    page.locator(".psd-search input").fill("")
    notebook.settle()
    kept = notebook.screenshot("explorer", ".psd-explorer")
    assert kept.stat().st_size > 20_000
    assert not seen.errors, seen.errors
    assert not seen.outside, seen.outside


def test_explorer_of_05_trains_again_when_a_control_moves(lab: Lab, opened: tuple[Page, Seen]) -> None:
    page, seen = opened
    write_notebook(lab.folder / "explorer_05.ipynb", EXPLORER_OF_05)
    notebook = OpenNotebook(page, lab, "explorer_05.ipynb")
    notebook.run_all()
    assert not [o for o in notebook.outputs() if o["output_type"] == "error"]
    page.wait_for_selector("text=A falls to")
    before = page.locator(".jp-OutputArea-output img").first.get_attribute("src")
    page.locator(".widget-toggle-buttons button", has_text="off").click()
    page.wait_for_function(
        "old => document.querySelector('.jp-OutputArea-output img').src !== old", arg=before, timeout=30_000
    )
    notebook.screenshot("explorer_05", ".jp-OutputArea-output")
    assert "Not computed" not in page.content()
    assert not seen.errors, seen.errors
    assert not seen.outside, seen.outside


def test_report_of_a_pair_opens_offline(small_study: Study, tmp_path: Path) -> None:
    chromium()
    check_offline_page(write_report(small_study, path=tmp_path / "report.html"))


def test_without_chromium_tests_are_skipped_here_and_fail_where_they_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make browser"):
        chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make browser"):
        chromium()


def test_artefacts_are_ignored_by_git() -> None:
    done = subprocess.run(["git", "check-ignore", str(ARTEFACTS)], cwd=REPOSITORY, capture_output=True, check=False)
    assert done.returncode in (0, 128)  # 128: not a git checkout
