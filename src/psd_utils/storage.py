"""Room for captures: what scoring needs and whether it is there; and whether captures are still what was written."""

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .capture import SHARD_TOKENS, plan_shards
from .corpus import LONGEST_CUT, Corpus
from .devices import Device
from .errors import PsdError
from .files import read_json, sha256_of_file
from .sources import Source, weight_files

_LOG = logging.getLogger(__name__)

WORKSPACE = 256 * 2**20
"""Bytes that scoring takes on the CPU beside the weights and one shard; an accelerator adds a batch's activations."""


@dataclass(frozen=True)
class Needs:
    """What scoring one member takes, in bytes: `disk` for the capture, `memory` at its peak."""

    disk: int
    memory: int


def scoring_needs(corpus: Corpus, source: Source, device: Device, config: Any) -> Needs | None:
    """Return what scoring takes, or None where the configuration does not say the sizes of the head."""
    rows, width = getattr(config, "vocab_size", None), getattr(config, "hidden_size", None)
    if not isinstance(rows, int) or not isinstance(width, int):
        return None
    size = device.dtype.itemsize
    tokens, documents = int(corpus.tokens.numel()), len(corpus.keys)
    # states and float32 losses, then the head, then ids and document keys; a header for each shard
    disk = tokens * (width * size + 4) + rows * width * size + tokens * 8 + documents * 80
    disk += 4096 * (3 + len(plan_shards(corpus)))
    stored = getattr(torch, str(getattr(config, "dtype", None) or "float32").removeprefix("torch."))
    weights = sum(p.stat().st_size for p in weight_files(source)) * size // stored.itemsize
    shard = min(tokens, SHARD_TOKENS + LONGEST_CUT) * (width * size + 4)
    return Needs(disk, weights + shard + WORKSPACE)


def check_room(label: str, needs: Needs, target: Path, device: Device) -> None:
    """Say what scoring needs and what is there; `target` is the capture's folder, with what is written already.

    Raises:
        PsdError: the disk is clearly too small.
    """
    written = sum(p.stat().st_size for p in target.glob("*.safetensors")) if target.is_dir() else 0
    missing = max(0, needs.disk - written)
    free = shutil.disk_usage(target if target.is_dir() else target.parent).free
    memory = free_memory(device.device)
    there = "unknown" if memory is None else f"{_size(memory)} free"
    _LOG.info(
        "%s: the capture needs %s on disk (%s free) and about %s of memory on %s (%s)",
        label,
        _size(missing),
        _size(free),
        _size(needs.memory),
        device.device.type,
        there,
    )
    if missing > free:
        raise PsdError(
            f"{label}: its capture needs {_size(missing)} more in {target.parent}, where {_size(free)} are free; make "
            "room, lower n_tokens, or let data/captures be a link to a larger disk"
        )
    if memory is not None and needs.memory > memory:
        _LOG.warning("%s: scoring may run out of memory: about %s needed, %s", label, _size(needs.memory), there)


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            values = dict(line.split(":") for line in file)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _size(n_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 2**10:.0f} KiB"


@dataclass(frozen=True)
class Verified:
    """A capture whose files were hashed again: `damaged` names those that are not what the manifest says."""

    folder: Path
    label: str
    bytes: int
    damaged: tuple[str, ...]


def verify_captures(folder: Path, repair: bool = False) -> list[Verified]:
    """Hash every file of every complete capture in `folder` again.

    `repair` deletes damaged files together with the manifest beside them, so that the next run scores them, and only
    them, anew. A capture without a manifest is unfinished, and its next run checks it.
    """
    found = []
    for path in sorted(folder.glob("*/manifest.json")):
        try:
            manifest = read_json(path)
            files = {name: facts["sha256"] for name, facts in manifest["files"].items()}
        except (PsdError, KeyError, TypeError, AttributeError):
            # what it said is lost, so nothing beside it can be trusted
            damaged = ("manifest.json", *sorted(p.name for p in path.parent.glob("*.safetensors")))
            found.append(Verified(path.parent, "unknown", 0, damaged))
        else:
            damaged = tuple(name for name, digest in files.items() if _differs(path.parent / name, digest))
            size = sum(facts["bytes"] for facts in manifest["files"].values())
            found.append(Verified(path.parent, str(manifest.get("label")), size, damaged))
        if repair and damaged:
            # the manifest first: without it the capture is unfinished, whatever happens next
            path.unlink()
            for name in damaged:
                (path.parent / os.path.basename(name)).unlink(missing_ok=True)
    return found


def _differs(path: Path, digest: str) -> bool:
    return not path.is_file() or sha256_of_file(path) != digest
