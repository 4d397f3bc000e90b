"""Writing that never leaves half a file: everything goes to a temporary name and is renamed when complete."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from .errors import PsdError

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 1 << 24


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary path beside `path`, flush it to disk and rename it to `path`.

    Raises:
        PsdError: the disk is full or the folder is not writable; an earlier `path` is untouched.
    """
    # The process id keeps two writers of the same file apart; the last rename wins with a whole file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except Exception as error:
        # safetensors reports a full disk as its own exception, so the text is looked at too
        if isinstance(error, OSError) or "os error" in str(error).lower():
            raise PsdError(
                f"could not write {path}: {error}; what was there before is unchanged: put this right and run again"
            ) from error
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as sorted, indented JSON."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(path, lambda p: p.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        PsdError: the file is not valid JSON.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PsdError(f"{path} is damaged: {error}; delete it to have it made again") from error
    if not isinstance(value, dict):
        raise PsdError(f"{path} is damaged: it holds no JSON object; delete it to have it made again")
    return value


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any] | None = None) -> None:
    """Write tensors as safetensors, with `note` and a digest of the tensors as one JSON entry of the header.

    One entry only: safetensors keeps several in the order of a hash map, and equal content must give equal bytes.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    entry = {"note": dict(note or {}), "sha256": _digest(plain, note or {})}
    header = {"psd": json.dumps(entry, sort_keys=True, ensure_ascii=False)}
    write_atomically(path, lambda p: save_file(plain, str(p), metadata=header))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the note of a file that `write_tensors` wrote.

    Raises:
        PsdError: the file is missing or unreadable, or its tensors are not those that were written.
    """
    try:
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tensors = load(data)
        entry = json.loads(header["__metadata__"]["psd"])
        note, digest = dict(entry["note"]), entry["sha256"]
    except FileNotFoundError as error:
        raise PsdError(f"{path} is missing") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise PsdError(f"{path} is damaged, or not a file of this package ({error})") from error
    if _digest(tensors, note) != digest:
        raise PsdError(f"{path} is damaged: its content is not what was written")
    return tensors, note


def _digest(tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(note, sort_keys=True, ensure_ascii=False).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as parquet."""
    write_atomically(path, lambda p: table.to_parquet(p, index=False, write_page_checksum=True))


def read_table(path: Path) -> pd.DataFrame:
    """Return the parquet table in `path`.

    Raises:
        PsdError: the file is missing or damaged.
    """
    try:
        return pd.read_parquet(path, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise PsdError(f"{path} is missing; delete summary.json beside it and run again") from error
    except (OSError, ValueError) as error:
        raise PsdError(f"{path} is damaged ({error}); delete it and run again") from error


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_of_json(value: object) -> str:
    """Return the sha256 of a JSON value with sorted keys, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
