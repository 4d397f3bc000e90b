"""A list of fine-tuning checkpoints in words -> members with steps, in order of training, each with a loader.

In: text such as `my_run`, `my_run/checkpoint-*` or `org/name@step100, org/name@step200`. Out: RunMember, and functions
that load one as transformers' own model, checked as for scoring, with adapters merged in float32.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from typing import Any

from .devices import Device
from .errors import PsdError
from .files import sha256_of_json
from .models import load_causal_model
from .pairs import Member, model_folder
from .sources import Source, load_tokenizer, locate

_LOG = logging.getLogger(__name__)

ADAPTER = "adapter:"
_NUMBER = re.compile(r"(\d+)\D*$")


@dataclass(frozen=True)
class RunMember:
    """A checkpoint of a run: its label in tables, its fine-tuning step, and the model."""

    label: str
    step: int
    member: Member


def run_members(text: str, base: Member) -> tuple[RunMember, ...]:
    """Return the checkpoints that a text names, separated by commas or lines, in the order given.

    An item is a folder with a model or a PEFT adapter in it; a folder of such folders, or a pattern with `*`, which
    stand for all of them by the last number in their names; a hub name, with @revision if need be; or `adapter:` and
    the hub name of an adapter of `base`. Steps are the last numbers of the names where all have one and they rise,
    else 1, 2, 3 ….

    Raises:
        PsdError: nothing is named, or a pattern or folder holds no model.
    """
    items = [item.strip() for item in re.split(r"[,\n]", text) if item.strip()]
    found = [one for item in items for one in _expand(item, base)]
    if not found:
        raise PsdError("no checkpoints are named: give folders or hub names, separated by commas")
    numbers = [int(m.group(1)) if (m := _NUMBER.search(_leaf(one))) else 0 for one in found]
    if numbers != sorted(set(numbers)) or numbers[0] < 1:
        _LOG.info("the names of the checkpoints hold no rising steps: they are numbered in the order given")
        numbers = list(range(1, len(found) + 1))
    labels = [_leaf(one) for one in found]
    if len(set(labels)) < len(labels):
        labels = [f"{Path(one.adapter or one.model).parent.name}/{_leaf(one)}" for one in found]
    return tuple(RunMember(*parts) for parts in zip(labels, numbers, found, strict=True))


def require(given: Mapping[str, Any], *names: str) -> None:
    """Check that parameters which go with a base of one's own are given.

    Raises:
        PsdError: one of them is None.
    """
    lacking = [name for name in names if given[name] is None]
    if lacking:
        raise PsdError(f"a base of your own needs {', '.join(names)} as well; not given: {', '.join(lacking)}")


def _expand(item: str, base: Member) -> list[Member]:
    if item.startswith(ADAPTER):
        return [replace(base, adapter=item.removeprefix(ADAPTER).strip())]
    if has_magic(item):
        pattern = Path(item).expanduser()
        matches = sorted(pattern.parent.glob(pattern.name), key=_in_order)
        folders = [folder for folder in matches if folder.is_dir()]
        if not folders:
            raise PsdError(f"no folder matches {item} (from {Path.cwd()})")
        return [_of_folder(folder, base) for folder in folders]
    folder = model_folder(item)
    if folder is not None:
        if _is_model(folder):
            return [_of_folder(folder, base)]
        inside = sorted((f for f in folder.iterdir() if f.is_dir() and _is_model(f)), key=_in_order)
        if not inside:
            raise PsdError(
                f"{folder} holds no model (config.json), no adapter (adapter_config.json), and no folders with one: "
                "save checkpoints with save_pretrained or transformers' Trainer"
            )
        return [_of_folder(f, base) for f in inside]
    if Path(item).expanduser().is_absolute() or item.startswith((".", "~")):
        raise PsdError(f"there is no folder {item} (from {Path.cwd()})")
    name, _, revision = item.partition("@")
    return [Member(name, revision or None)]


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def _of_folder(folder: Path, base: Member) -> Member:
    if (folder / "config.json").is_file():
        return Member(str(folder))
    if (folder / "adapter_config.json").is_file():
        return replace(base, adapter=str(folder))
    raise PsdError(f"{folder} holds no model (config.json) and no adapter (adapter_config.json)")


def _in_order(folder: Path) -> tuple[int, str]:
    number = _NUMBER.search(folder.name)
    return (int(number.group(1)) if number else 0, folder.name)


def _leaf(member: Member) -> str:
    if member.adapter:
        return Path(member.adapter.rstrip("/")).name
    return member.revision or member.leaf


def identity_of(source: Source, device: Device) -> str:
    """Return a hash of what decides the numbers of a member: its content or commit, and the dtype."""
    return sha256_of_json([source.identity, device.dtype_name])[:16]


def loader(source: Source, device: Device) -> Callable[[], tuple[Any, Any]]:
    """Return a function that loads the member on the device: (transformers' model, its tokenizer or None).

    Raises:
        PsdError: device "spread"; and when called, as `load_causal_model`.
    """
    if device.spread:
        raise PsdError(
            'device "spread": update surgery needs all weights on one device; give another, such as cuda or cpu'
        )

    def load() -> tuple[Any, Any]:
        return load_causal_model(source, device)[0], load_tokenizer(source)

    return load


def located(members: tuple[RunMember, ...]) -> tuple[Source, ...]:
    """Return where all members lie, so that a missing one is found before the first is measured.

    Raises:
        PsdError: as `locate`.
    """
    return tuple(locate(one.member) for one in members)
