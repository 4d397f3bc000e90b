"""Which two models are compared: the registry in data/pairs.yaml, and the user's own pairs."""

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from .errors import PsdError, nearest
from .paths import project_root, registry_file

DTYPES = ("float32", "bfloat16", "float16")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Pickled weights, or the index of several files of them: loaded only where a member's model ends in such a name."""


@dataclass(frozen=True)
class Member:
    """One model: a local folder or a hub repository, optionally at a revision and with a PEFT adapter on it.

    Weights are read from safetensors; pickled ones only if named, as in `path/or/name/pytorch_model.bin`.
    """

    model: str
    revision: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "revision", "adapter"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise PsdError(f"{name} must be text, found {value!r} ({type(value).__name__}); quote it in YAML")
        if not self.model:
            raise PsdError("a member needs a model: a local folder or a hub name such as Qwen/Qwen2.5-1.5B")

    @property
    def leaf(self) -> str:
        """The last part of the model's name, for labels and file names."""
        return Path(split_pickled(self.model)[0].rstrip("/")).name.lstrip(".") or "model"

    @property
    def label(self) -> str:
        """The member in words, for messages."""
        revision = f" at {self.revision}" if self.revision else ""
        adapter = f" with adapter {self.adapter}" if self.adapter else ""
        return f"{self.model}{revision}{adapter}"


@dataclass(frozen=True)
class ModelFacts:
    """What is expected of a model when it is loaded; None where nothing is known. A mismatch stops the run.

    `width` of the hidden states, `mlp_width` of the layers between them; `heads` of the attention, `kv_heads` of its
    keys and values.
    """

    head_rows: int | None = None
    tokenizer_length: int | None = None
    tied: bool | None = None
    prefix_id: int | None = None
    width: int | None = None
    layers: int | None = None
    mlp_width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True)
class Text:
    """A text to score: a path or an hf:// address of JSON lines, with its licence and a note."""

    path: str
    licence: str = ""
    note: str = ""


@dataclass(frozen=True)
class Pair:
    """A base and a derived model, with what the registry says about them.

    `base` and `derived` may be given as text. `text` is a path or hf:// address, or the name of a registered text.
    """

    base: Member
    derived: Member
    name: str = ""
    text: str | None = None
    n_tokens: int | None = None
    top_k: int | None = None
    dtype: str | None = None
    family: str = ""
    size: str = ""
    kind: str = ""
    licence: str = ""
    note: str = ""
    facts: ModelFacts = field(default_factory=ModelFacts)

    def __post_init__(self) -> None:
        for role in ("base", "derived"):
            value = getattr(self, role)
            if isinstance(value, str):
                object.__setattr__(self, role, Member(value))
            elif not isinstance(value, Member):
                raise PsdError(f"{role} must be a path, a hub name or a Member, found {value!r}")
        for name in ("name", "text"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise PsdError(f"{name} must be text, found {value!r} ({type(value).__name__}); quote it in YAML")
        for name in ("n_tokens", "top_k"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PsdError(f"{name} must be a whole number of at least 1, found {value!r}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise PsdError(f"dtype {self.dtype!r}: {nearest(str(self.dtype), list(DTYPES))}")
        if resolved(self.base) == resolved(self.derived):
            raise PsdError(f"base and derived are the same model, {self.base.label}")
        if not self.name:
            object.__setattr__(self, "name", self._own_name())
        if "/" in self.name or self.name.startswith(".") or "\\" in self.name:
            raise PsdError(f"pair name {self.name!r} would leave the results folder; use letters, digits, - and _")

    def _own_name(self) -> str:
        """Return "<base leaf>--<derived leaf>-<8 hex>" for a pair given by two paths or hub names."""
        members = []
        for member in (self.base, self.derived):
            model, adapter = (_place(name) for name in (member.model, member.adapter))
            members.append([model, member.revision, adapter])
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:8]
        return f"{self.base.leaf}--{self.derived.leaf}-{digest}"


def _place(name: str | None) -> str | None:
    """Return the absolute path of a local folder, so that it is the same from every working folder, or a hub name."""
    if name is None:
        return None
    model, pickled = split_pickled(name)
    folder = model_folder(model)
    return name if folder is None else "/".join([str(folder.resolve()), *filter(None, [pickled])])


def resolved(member: Member) -> Member:
    """Return a member whose local folders are written so that they are found from any working folder."""
    return replace(member, model=_place(member.model) or member.model, adapter=_place(member.adapter))


def load_pair(name: str, registry: Path | None = None) -> Pair:
    """Return a registered pair by name.

    Raises:
        PsdError: no such pair (the message lists the nearest names), or the registry is malformed.
    """
    pairs = load_registry(registry or registry_file())
    if name not in pairs:
        raise PsdError(f"no pair named {name!r}; {nearest(str(name), list(pairs))}")
    return pairs[name]


def load_registry(path: Path) -> Mapping[str, Pair]:
    """Return the registered pairs of a YAML file, by name.

    Raises:
        PsdError: the file is missing or malformed; the message names the entry.
    """
    document = _read_yaml(path)
    return {name: _parse_pair(path, name, entry, document["models"]) for name, entry in document["pairs"].items()}


def load_texts(path: Path) -> Mapping[str, Text]:
    """Return the registered texts of a YAML file, by name."""
    texts = {name: _build(Text, entry, f"{path}: text {name}") for name, entry in _read_yaml(path)["texts"].items()}
    for name, text in texts.items():
        _check_inside(f"{path}: text {name}", text.path)
    return texts


def resolve_text(pair: Pair, text: str | None = None) -> str:
    """Return the path or hf:// address of the text to score: `text` if given, else the pair's own.

    A registered name stands for its address; a registered relative path hangs on the project root, the user's own
    on the working folder.

    Raises:
        PsdError: no text is given and the pair has none, or the file does not exist.
    """
    source = text or pair.text
    if not source:
        raise PsdError(f"pair {pair.name} has no text of its own: give one, a path to JSON lines with a `text` field")
    registered = load_texts(registry_file())
    if source in registered:
        path = registered[source].path
        return path if "://" in path else str(project_root() / path)
    if "://" in source:
        return source
    own = Path(source).expanduser()
    if text is None and not own.exists():
        own = project_root() / own
    if not own.exists():
        known = nearest(source, list(registered))
        raise PsdError(f"no text at {source} (from {Path.cwd()}), and no registered text of that name; {known}")
    return str(own)


def split_pickled(model: str) -> tuple[str, str | None]:
    """Return a model's folder or repository, and the pickled weights in it that its name asks for, if it does."""
    folder, _, leaf = model.rpartition("/")
    return (folder, leaf) if leaf in PICKLED and folder else (model, None)


def model_folder(model: str) -> Path | None:
    """Return the local folder of a model, or None if the name is not one (and so names a hub repository).

    A relative path is looked for in the working folder, then under the project root.
    """
    given = Path(model).expanduser()
    if given.is_dir():
        return given
    if given.is_absolute():
        return None
    try:
        registered = project_root() / given
    except PsdError:  # without a root the name can only be a hub repository's
        return None
    return registered if registered.is_dir() else None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PsdError(f"no registry at {path}") from error
    except yaml.YAMLError as error:
        raise PsdError(f"{path} is not valid YAML: {error}") from error
    parts = ("pairs", "texts", "models")
    if not isinstance(document, dict) or any(not isinstance(document.get(part) or {}, dict) for part in parts):
        raise PsdError(f"{path} must hold a mapping `pairs:`, and may hold `texts:` and `models:`, mappings as well")
    for key in document:
        if key not in parts:
            raise PsdError(f"{path}: unknown key {key!r}; {nearest(str(key), list(parts))}")
    return {part: document.get(part) or {} for part in parts}


def _check_inside(where: str, *values: str | None) -> None:
    """Check that no path of a registry leads out of the project: registries are shared, and their paths read."""
    for value in values:
        if value is None or "://" in value:
            continue
        if Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts:
            raise PsdError(
                f"{where}: {value!r} leads out of the project; a registry names hub repositories, addresses and paths "
                "below the project's root. Give other folders directly, as base, derived and text"
            )


def _parse_pair(path: Path, name: str, entry: Any, models: Mapping[str, Any]) -> Pair:
    where = f"{path}: pair {name}"
    if not isinstance(entry, dict):
        raise PsdError(f"{where} must be a mapping with `base` and `derived`, found {entry!r}")
    values = dict(entry)
    for role in ("base", "derived"):
        if role not in values:
            raise PsdError(f"{where} has no `{role}`")
        values[role] = _parse_member(f"{where}: {role}", values[role], models)
    if "facts" in values:
        values["facts"] = _build(ModelFacts, values["facts"], f"{where}: facts")
    pair: Pair = _build(Pair, {"name": name, **values}, where)
    _check_inside(where, pair.text)
    return pair


def _parse_member(where: str, value: Any, models: Mapping[str, Any]) -> Member:
    if isinstance(value, str):
        value = models.get(value, {"model": value})
    member: Member = _build(Member, value, where)
    _check_inside(where, member.model, member.adapter)
    return member


def _build(kind: type, values: Any, where: str) -> Any:
    """Return `kind` made of a mapping; every error begins with `where`."""
    if not isinstance(values, dict):
        raise PsdError(f"{where} must be a mapping, found {values!r}")
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            raise PsdError(f"{where}: unknown key {key!r}; {nearest(str(key), known)}")
    for f in fields(kind):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise PsdError(f"{where} has no `{f.name}`")
    try:
        return kind(**values)
    except PsdError as error:
        raise PsdError(f"{where}: {error}") from error
