"""What the study of checkpoints keeps on disk: whole files only, and one folder for each measured model.

In: tables and small tensors. Out: parquet, safetensors and JSON, each written under another name and then renamed.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_part(place: Path, tables: Mapping[str, pd.DataFrame], states: dict[str, Tensor]) -> None:
    """Write what was measured of one model; `done.json` comes last, and says that the rest is whole."""
    place.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_table(place / f"{name}.parquet", table)
    if states:
        write_states(place / "states.safetensors", states)
    write_json(place / "done.json", {"tables": sorted(tables)})


def is_done(place: Path) -> bool:
    """Whether a model was measured to the end."""
    return (place / "done.json").is_file()


def read_part(place: Path, names: tuple[str, ...], label: str, step: int) -> dict[str, pd.DataFrame]:
    """The tables of one model that it has, with its label and step as first columns.

    Label and step are not part of what was measured: another list of checkpoints may count otherwise.

    Raises:
        ValueError: a table that was written is missing or damaged.
    """
    tables = {}
    with _advised(place):
        written = json.loads((place / "done.json").read_text(encoding="utf-8"))["tables"]
        for name in (n for n in names if n in written):
            tables[name] = pd.read_parquet(place / f"{name}.parquet")
            tables[name].insert(0, "checkpoint", label)
            tables[name].insert(1, "step", step)
    return tables


def read_states(place: Path) -> dict[str, Tensor]:
    """The states that were kept of a model.

    Raises:
        ValueError: they are missing or damaged.
    """
    with _advised(place):
        return load_file(place / "states.safetensors")


@contextmanager
def _advised(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"{place} is damaged ({error}). Delete this folder, and the model is measured again."
        ) from error


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as parquet."""
    _atomically(path, lambda p: table.to_parquet(p, index=False))


def write_states(path: Path, states: dict[str, Tensor]) -> None:
    """Write tensors as safetensors."""
    _atomically(path, lambda p: save_file(states, str(p)))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON; what is not a finite number becomes null, since JSON has no NaN."""
    text = json.dumps(_plain(value), indent=1, ensure_ascii=False) + "\n"
    _atomically(path, lambda p: p.write_text(text, encoding="utf-8"))


def digest(value: Any) -> str:
    """12 hex digits that tell one JSON value from another."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]


def file_name(label: str) -> str:
    """A label as part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in label).lstrip(".") or "checkpoint"


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
