"""Executed copies of notebooks for readers without a kernel: `python scripts/make_gallery.py FOLDER EXECUTED...`.

Each EXECUTED is what papermill wrote; its name begins with that of the notebook in notebooks/. The copy in FOLDER has
smaller pictures, no widgets, and no places on this machine.
"""

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
LARGEST = 500_000
"""Bytes of a copy."""
SIZES = ((900, 64), (700, 64), (700, 24), (560, 24), (480, 16))
"""Width in pixels and number of colours of pictures, tried from the first on until the copy is small enough."""
_PROGRESS = re.compile(r"\d+%\|")


def source_of(executed: Path) -> Path:
    """Return the committed notebook that an executed copy was made from, by its name."""
    found = [path for path in NOTEBOOKS.glob("*.ipynb") if executed.stem.startswith(path.stem)]
    if not found:
        raise SystemExit(f"{executed}: no notebook in {NOTEBOOKS} has a name that this one begins with")
    return max(found, key=lambda path: len(path.stem))


def differences(source: nbformat.NotebookNode, copy: nbformat.NotebookNode) -> list[str]:
    """Return how the cells of a copy differ from the notebook it was made from, the injected parameters aside."""
    own = [(cell.cell_type, cell.source) for cell in source.cells]
    copied = [(c.cell_type, c.source) for c in copy.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    if len(own) != len(copied):
        return [f"{len(own)} cells in the notebook, {len(copied)} in the copy"]
    return [f"cell {i} differs" for i, (a, b) in enumerate(zip(own, copied, strict=True)) if a != b]


def cleaned(executed: nbformat.NotebookNode, size: tuple[int, int], root: Path = REPOSITORY) -> nbformat.NotebookNode:
    """Return a copy for readers: small pictures (`size`: width, colours), no widgets, progress bars or absolute paths.

    Raises:
        SystemExit: a cell failed, or was not run.
    """
    copy = nbformat.from_dict(executed)
    copy.metadata = {key: executed.metadata[key] for key in ("kernelspec", "language_info") if key in executed.metadata}
    for i, cell in enumerate(copy.cells):
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None and cell.source.strip():
            raise SystemExit(f"cell {i} was not run")
        cell.outputs = [kept for output in cell.outputs if (kept := _output(output, size, str(root))) is not None]
    return copy


def _output(output: Any, size: tuple[int, int], root: str) -> Any | None:
    if output.output_type == "error":
        raise SystemExit(f"a cell failed: {output.ename}: {output.evalue}")
    if output.output_type == "stream":
        lines = [line for line in output.text.splitlines(keepends=True) if not _PROGRESS.search(line)]
        output.text = _relative("".join(lines), root)
        return output if output.text.strip() else None
    data = output.data
    if any(mime.startswith("application/vnd.jupyter.widget") for mime in data):
        return None
    if len(data) > 1:
        data.pop("text/plain", None)  # says less than the picture or table beside it
    for mime, content in data.items():
        if mime == "image/png":
            data[mime] = smaller_png(content, *size)
        elif isinstance(content, str):
            data[mime] = _relative(content, root)
    if "text/html" in data:
        data["text/html"] = re.sub(r">\s+<", "><", data["text/html"])
    output.metadata = {}
    return output


def _relative(text: str, root: str) -> str:
    return text.replace(f"{root}/", "").replace(root, ".")


def smaller_png(content: str, width: int, colours: int) -> str:
    """Return a base64 PNG with at most `width` pixels a row and so many colours."""
    picture = Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")
    if picture.width > width:
        height = round(picture.height * width / picture.width)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.quantize(colours, dither=Image.Dither.NONE).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def write_copy(executed: Path, folder: Path) -> Path:
    """Write the copy of an executed notebook in the largest size that is small enough; return the file.

    Raises:
        SystemExit: the notebook has changed since it was executed, a cell failed, or no size is small enough.
    """
    source = source_of(executed)
    read = nbformat.read(executed, as_version=4)
    changed = differences(nbformat.read(source, as_version=4), read)
    if changed:
        raise SystemExit(f"{executed} no longer comes from {source.name} ({'; '.join(changed)}): run it again")
    for size in SIZES:
        text = nbformat.writes(cleaned(nbformat.read(executed, as_version=4), size))
        if len(text.encode()) <= LARGEST:
            break
    else:
        raise SystemExit(f"{executed}: {len(text.encode()):,} bytes even with pictures {SIZES[-1][0]} pixels wide")
    target = folder / source.name
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n", encoding="utf-8")
    return target


def main(folder: str, *executed: str) -> None:
    """Write a copy of each executed notebook and say how large it is."""
    for path in map(Path, executed):
        target = write_copy(path, Path(folder))
        print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
