"""A member -> where its files lie and what they are: weights, tokenizer, configuration, and the facts in it."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from .errors import PsdError
from .files import sha256_of_file
from .pairs import Member, ModelFacts, model_folder, split_pickled

_SAFE_PATTERN, _PICKLED_PATTERN = "*.safetensors", "pytorch_model*.bin"
_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
_IDENTITY_SUFFIXES = {".json", ".txt", ".model"}
# a repository's name and a folder in it, as in org/name/checkpoints/last; "." and ".." are no folders
_IN_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)/((?:(?!\.{1,2}(?:/|$))[\w.-]+/)*(?!\.{1,2}$)[\w.-]+)")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Source:
    """Where a member's files lie, and what they are.

    `identity` goes into the capture's key: for a hub repository its name and commit, for a folder a hash of content.
    """

    member: Member
    folder: Path
    adapter_folder: Path | None
    identity: dict[str, Any]
    pickled: bool = False


def locate(member: Member, weights: bool = True) -> Source:
    """Find a member's files, downloading from the hub what is not a local folder.

    Only safetensors weights (pickled ones where the model's name asks for them), configurations and tokenizers are
    taken; `weights=False` leaves out the first, and gives a local folder no identity: that would read them all.

    Raises:
        PsdError: no such folder or repository, or no safetensors weights in it.
    """
    name, pickled = split_pickled(member.model)
    folder, identity = _locate_one(name, member.revision, "model", weights, pickled is not None)
    adapter_folder = None
    if member.adapter:
        adapter_folder, identity["adapter"] = _locate_one(member.adapter, None, "adapter", weights)
    return Source(member, folder, adapter_folder, identity, pickled is not None)


def _locate_one(
    name: str, revision: str | None, role: str, weights: bool, pickled: bool = False
) -> tuple[Path, dict[str, Any]]:
    local = model_folder(name)
    if name.endswith(".gguf"):
        raise PsdError(
            f"{role} {name} is a GGUF file, whose weights are mostly quantised and never the stored ones exactly: give "
            "the safetensors folder or repository that it was made from"
        )
    if local is not None:
        if revision:
            raise PsdError(f"{role} {name} is a local folder and has no revisions; leave out {revision!r}")
        return local, {"content": _content(local, role, pickled)} if weights else {}
    patterns = [_PICKLED_PATTERN if pickled else _SAFE_PATTERN] if weights else []
    folder, identity = _download(name, revision, role, [*patterns, *_HUB_PATTERNS])
    return folder, identity | ({"weights": "pickled"} if pickled else {})


def _content(folder: Path, role: str, pickled: bool) -> dict[str, str]:
    """Return the sha256 of every file that decides the model, by name."""
    weights = sorted(folder.glob(_PICKLED_PATTERN if pickled else _SAFE_PATTERN))
    if not weights:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; it holds pickled weights ({', '.join(others)}), which are not loaded" if others else ""
        if "pytorch_model.bin" in others:
            hint += f" unless asked for by name, as {folder / 'pytorch_model.bin'}"
        if any(p.suffix == ".gguf" for p in folder.iterdir()):
            hint = "; it holds GGUF weights, which are mostly quantised and never the stored ones exactly"
        kind = "pickled" if pickled else "safetensors"
        raise PsdError(f"{role} folder {folder} has no {kind} weights{hint}: save it with save_pretrained")
    files = [p for p in sorted(folder.iterdir()) if p.suffix in _IDENTITY_SUFFIXES and p.is_file()]
    return {p.name: sha256_of_file(p) for p in [*weights, *files]}


def _download(name: str, revision: str | None, role: str, patterns: list[str]) -> tuple[Path, dict[str, Any]]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, subfolder = name, None
    if (parts := _IN_REPOSITORY.fullmatch(name)) is not None:
        repository, subfolder = parts.groups()
        patterns = [f"{subfolder}/{pattern}" for pattern in patterns]
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise PsdError(f"{role} {name!r} is neither a local folder nor a hub name such as Qwen/Qwen2.5-1.5B") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise PsdError(
            f"{role} {name!r}{at} is not a local folder and could not be fetched from the hub: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if subfolder is None:
        return folder, {"repository": name, "commit": folder.name}
    if not (folder / subfolder).is_dir():
        raise PsdError(f"{role} {name!r}: the repository {repository} has no folder {subfolder} with weights in it")
    return folder / subfolder, {"repository": repository, "commit": folder.name, "subfolder": subfolder}


def weight_files(source: Source) -> list[Path]:
    """Return the files of a member's weights, without its adapter's."""
    return sorted(source.folder.glob(_PICKLED_PATTERN if source.pickled else _SAFE_PATTERN))


def load_tokenizer(source: Source) -> Any | None:
    """Return the member's tokenizer, or None if its files have none.

    Where there is a tokenizer.json, it alone decides. transformers' own choice may be a class that keeps the
    vocabulary and replaces the rule by which a text is split, so that the ids differ without a word.
    """
    if not any((source.folder / name).is_file() for name in _VOCABULARIES):
        return None
    try:
        if not (source.folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source.folder)
        if tokenizer.bos_token is None and tokenizer.eos_token is None:
            # old repositories such as gpt2 leave their names to the class
            named = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
            for role in ("bos_token", "eos_token"):
                if getattr(named, role) in tokenizer.get_vocab():
                    setattr(tokenizer, role, getattr(named, role))
        return tokenizer
    except Exception as error:  # each kind of tokenizer fails in its own way
        raise PsdError(f"the tokenizer of {source.member.label} cannot be loaded: {brief(error)}") from error


def load_config(source: Source) -> Any:
    """Return the text part of the member's configuration."""
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # each configuration fails in its own way
        raise PsdError(f"the configuration of {source.member.label} cannot be loaded: {brief(error)}") from error
    return config.get_text_config()


def brief(error: Exception) -> str:
    """Return the beginning of an error's text on one line, with its kind where the text may not speak for itself."""
    text = " ".join(str(error).split())
    return text[:300] if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text[:300]}"


def longest_context(config: Any) -> int | None:
    """Return the most positions a model can read, or None if its configuration does not say."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def widths_of(config: Any) -> ModelFacts:
    """Return the widths, layers and heads that a configuration states; None for those it does not."""
    names = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "mlp_width": "intermediate_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
    }
    return ModelFacts(**{own: getattr(config, theirs, None) for own, theirs in names.items()})


def check_facts(label: str, facts: ModelFacts, found: ModelFacts) -> None:
    """Compare what the registry expects with what was loaded.

    Raises:
        PsdError: a fact differs; the message has both values.
    """
    for name in (f.name for f in fields(ModelFacts)):
        expected, actual = getattr(facts, name), getattr(found, name)
        if expected is not None and actual is not None and expected != actual:
            raise PsdError(f"{label}: the registry expects {name} {expected}, found {actual}")
