"""The gallery: each copy comes from the committed notebook, is small and whole, and names no place of the machine."""

import base64
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from conftest import REPOSITORY
from PIL import Image

GALLERY = REPOSITORY / "docs" / "gallery"
COPIES = sorted(GALLERY.glob("*.ipynb"))
V4 = nbformat.v4


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import make_gallery

    yield make_gallery
    sys.path.remove(str(REPOSITORY / "scripts"))
    del sys.modules["make_gallery"]


def test_gallery_shows_the_notebooks_of_the_study() -> None:
    assert {path.stem for path in COPIES} >= {"01_score", "02_fit", "03_controls", "04_figures", "05_spurious"}
    assert all((REPOSITORY / "notebooks" / path.name).is_file() for path in COPIES)


@pytest.mark.parametrize("path", COPIES, ids=lambda p: p.stem)
def test_copy_comes_from_the_committed_notebook(path: Path, script: ModuleType) -> None:
    copy, source = (nbformat.read(p, as_version=4) for p in (path, REPOSITORY / "notebooks" / path.name))
    assert script.differences(source, copy) == [], "run `make gallery`"


@pytest.mark.parametrize("path", COPIES, ids=lambda p: p.stem)
def test_copy_is_small_executed_and_without_widgets_or_places(path: Path, script: ModuleType) -> None:
    assert path.stat().st_size <= script.LARGEST == 500_000
    copy = nbformat.read(path, as_version=4)
    nbformat.validate(copy)
    code = [c for c in copy.cells if c.cell_type == "code" and c.source.strip()]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c.outputs]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not any(o.output_type == "error" for o in outputs)
    text = path.read_text(encoding="utf-8")
    assert "widget-view" not in text
    assert not re.search(r"/(home|work|root|tmp|Users)/", text)


@pytest.mark.parametrize("path", sorted(GALLERY.iterdir()), ids=lambda p: p.name)
def test_gallery_is_linked_from_the_readme(path: Path) -> None:
    assert f"docs/gallery/{path.name}" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def notebook(*sources: str) -> nbformat.NotebookNode:
    cells = [V4.new_markdown_cell(sources[0]), *(V4.new_code_cell(s, execution_count=1) for s in sources[1:])]
    return V4.new_notebook(cells=cells)


def test_changed_added_and_injected_cells(script: ModuleType) -> None:
    source, copy = notebook("# Title", "a = 1", "a"), notebook("# Title", "a = 1", "a")
    injected = V4.new_code_cell("# Parameters\na = 2", metadata={"tags": ["injected-parameters"]})
    copy.cells.insert(2, injected)
    assert script.differences(source, copy) == []
    copy.cells[3].source = "a + 1"
    assert script.differences(source, copy) == ["cell 2 differs"]
    copy.cells[0].source = "# Other"
    assert script.differences(source, copy) == ["cell 0 differs", "cell 2 differs"]
    del copy.cells[3]
    assert script.differences(source, copy) == ["3 cells in the notebook, 2 in the copy"]


def picture(width: int, height: int) -> str:
    buffer = io.BytesIO()
    Image.effect_noise((width, height), 90).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_copy_has_no_progress_no_widgets_no_places_and_small_pictures(script: ModuleType) -> None:
    executed = notebook("# Title", "a = 1")
    executed.metadata = {"papermill": {"output_path": "/somewhere"}, "widgets": {}, "kernelspec": {"name": "python3"}}
    executed.cells[1].metadata = {"papermill": {"duration": 3}, "tags": ["parameters"]}
    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "0%|   | 0/7"}
    executed.cells[1].outputs = [
        V4.new_output("stream", name="stderr", text="fit:  10%|█  | 1/10\n"),
        V4.new_output("stream", name="stdout", text="results: /my/root/data/results\n"),
        V4.new_output("display_data", data=widget),
        V4.new_output(
            "display_data",
            data={"image/png": picture(800, 400), "text/html": "<b>/my/root/a</b>\n  <i>b c</i>", "text/plain": "a"},
        ),
    ]
    copy = script.cleaned(executed, (500, 16), Path("/my/root"))
    assert copy.metadata == {"kernelspec": {"name": "python3"}}
    assert copy.cells[1].metadata == {"tags": ["parameters"]}
    said, shown = copy.cells[1].outputs
    assert said.text == "results: data/results\n"
    assert shown.data["text/html"] == "<b>a</b><i>b c</i>"
    assert "text/plain" not in shown.data
    assert Image.open(io.BytesIO(base64.b64decode(shown.data["image/png"]))).size == (500, 250)


def test_failed_changed_or_too_large_notebooks_are_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "NOTEBOOKS", tmp_path / "notebooks")
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook("# Title", "a = 1"), tmp_path / "notebooks" / "09_x.ipynb")
    path = tmp_path / "09_x_pair.ipynb"
    with pytest.raises(SystemExit, match="has a name that this one begins with"):
        script.write_copy(tmp_path / "08_other.ipynb", tmp_path / "out")
    nbformat.write(notebook("# Title", "a = 2"), path)
    with pytest.raises(SystemExit, match=r"no longer comes from 09_x.ipynb \(cell 1 differs\): run it again"):
        script.write_copy(path, tmp_path / "out")
    executed = notebook("# Title", "a = 1")
    executed.cells[1].outputs = [V4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    nbformat.write(executed, path)
    with pytest.raises(SystemExit, match="a cell failed: ValueError: no"):
        script.write_copy(path, tmp_path / "out")
    executed.cells[1].outputs = [V4.new_output("display_data", data={"image/png": picture(480, 1400)})] * 3
    nbformat.write(executed, path)
    with pytest.raises(SystemExit, match="bytes even with pictures 480 pixels wide"):
        script.write_copy(path, tmp_path / "out")
    executed.cells[1].outputs = executed.cells[1].outputs[:1]
    nbformat.write(executed, path)
    assert script.write_copy(path, tmp_path / "out").stat().st_size <= script.LARGEST
