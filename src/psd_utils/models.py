"""A member -> a loaded model whose final states and head reproduce its own logits, or an error that says why not."""

import logging
import math
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from .errors import PsdError, nearest
from .files import sha256_of_file
from .kernels import Readout
from .pairs import DTYPES, Member, ModelFacts, model_folder

_LOG = logging.getLogger(__name__)
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_IDENTITY_SUFFIXES = {".safetensors", ".json", ".txt", ".model"}
# a repository's name and a folder in it, as in org/name/checkpoints/last; "." and ".." are no folders
_IN_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)/((?:(?!\.{1,2}(?:/|$))[\w.-]+/)*(?!\.{1,2}$)[\w.-]+)")
SPREAD_MEMORY: dict[int | str, int | str] | None = None
"""How much of each device (its number, or "cpu") a spread model may take; None: what accelerate finds free."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Device:
    """A device and dtype to compute with, and why they were chosen.

    `spread`: models are laid out by accelerate over all accelerators, then memory, then disk, and `device` is where
    they read; everything after scoring happens on `device`.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str
    spread: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype as text, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")


def choose_device(device: str = "auto", dtype: str | None = None) -> Device:
    """Return the device ("auto": CUDA if there is one) and the dtype (None: bfloat16 on CUDA, float32 elsewhere).

    "spread" is "auto" for models larger than one device: accelerate lays them out over what there is.

    Raises:
        PsdError: an unknown dtype, or a device that this machine lacks.
    """
    spread = device == "spread"
    if device in ("auto", "spread"):
        name, why = ("cuda", "a CUDA device is there") if torch.cuda.is_available() else ("cpu", "no CUDA device")
    else:
        name, why = device, "asked for"
    try:
        chosen = torch.device(name)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise PsdError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if dtype is not None and dtype not in DTYPES:
        raise PsdError(f"dtype {dtype!r}: {nearest(dtype, list(DTYPES))}")
    dtype_name = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    dtype_why = "asked for" if dtype else f"the default on {chosen.type}"
    over = "; models spread over all devices" if spread else ""
    return Device(chosen, getattr(torch, dtype_name), f"{name}: {why}; {dtype_name}: {dtype_why}{over}", spread)


@dataclass(frozen=True)
class Source:
    """Where a member's files lie, and what they are.

    `identity` goes into the capture's key: for a hub repository its name and commit, for a folder a hash of content.
    """

    member: Member
    folder: Path
    adapter_folder: Path | None
    identity: dict[str, Any]


def locate(member: Member, weights: bool = True) -> Source:
    """Find a member's files, downloading from the hub what is not a local folder.

    Only safetensors weights, configurations and tokenizers are taken; `weights=False` leaves out the first.

    Raises:
        PsdError: no such folder or repository, or no safetensors weights in it.
    """
    folder, identity = _locate_one(member.model, member.revision, "model", weights)
    adapter_folder = None
    if member.adapter:
        adapter_folder, identity["adapter"] = _locate_one(member.adapter, None, "adapter", weights)
    return Source(member, folder, adapter_folder, identity)


def _locate_one(name: str, revision: str | None, role: str, weights: bool) -> tuple[Path, dict[str, Any]]:
    local = model_folder(name)
    if name.endswith(".gguf"):
        raise PsdError(
            f"{role} {name} is a GGUF file, whose weights are mostly quantised and never the stored ones exactly: give "
            "the safetensors folder or repository that it was made from"
        )
    if local is not None:
        if revision:
            raise PsdError(f"{role} {name} is a local folder and has no revisions; leave out {revision!r}")
        return local, {"content": _content(local, role)}
    return _download(name, revision, role, _HUB_PATTERNS if weights else _HUB_PATTERNS[1:])


def _content(folder: Path, role: str) -> dict[str, str]:
    files = sorted(p for p in folder.iterdir() if p.suffix in _IDENTITY_SUFFIXES and p.is_file())
    if not any(p.suffix == ".safetensors" for p in files):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; it holds pickled weights ({', '.join(others)}), which are not loaded" if others else ""
        if any(p.suffix == ".gguf" for p in folder.iterdir()):
            hint = "; it holds GGUF weights, which are mostly quantised and never the stored ones exactly"
        raise PsdError(f"{role} folder {folder} has no safetensors weights{hint}: save it with save_pretrained")
    return {p.name: sha256_of_file(p) for p in files}


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
        raise PsdError(f"the tokenizer of {source.member.label} cannot be loaded: {_brief(error)}") from error


def load_config(source: Source) -> Any:
    """Return the text part of the member's configuration."""
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # each configuration fails in its own way
        raise PsdError(f"the configuration of {source.member.label} cannot be loaded: {_brief(error)}") from error
    return config.get_text_config()


def _brief(error: Exception) -> str:
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


@dataclass(frozen=True)
class LoadedModel:
    """A model split at its output layer: `states(ids, mask)`, then readout(hidden @ headᵀ)."""

    backbone: torch.nn.Module
    head: torch.Tensor
    readout: Readout
    tied: bool
    stored_dtype: str

    @torch.inference_mode()
    def states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after the final norm, [batch, positions, width], in the dtype of the head."""
        states = self.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return states.to(self.head)


def load_model(source: Source, device: Device) -> LoadedModel:
    """Load a member in one explicit dtype and check that its states and head give its own logits.

    Raises:
        PsdError: weights are missing or left over, or the output layer is not one this package can reproduce.
    """
    return load_causal_model(source, device)[1]


def load_causal_model(source: Source, device: Device) -> tuple[Any, LoadedModel]:
    """Return transformers' own model, and the same split at its output layer; checked as by `load_model`."""
    label = source.member.label
    for folder in filter(None, (source.folder, source.adapter_folder)):
        _check_headers(label, folder)
    layout: dict[str, Any] = {}
    if device.spread:
        if source.adapter_folder:
            raise PsdError(f"{label}: an adapter is merged on one device; merge it and save the model, or leave spread")
        offload = tempfile.TemporaryDirectory(prefix="psd_utils-")
        layout = {"device_map": "auto", "max_memory": SPREAD_MEMORY, "offload_folder": offload.name}
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=torch.float32 if source.adapter_folder else device.dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported below, by name
                **layout,
            )
        except Exception as error:  # each architecture fails in its own way
            raise PsdError(f"{label} cannot be loaded: {_brief(error)}") from error
    model, info = loaded
    _check_loading(label, model, info)
    if source.adapter_folder:
        model = _merge_adapter(model, source, device.dtype)
    if device.spread:
        model.psd_offload = offload  # what lies on disk goes with the model
        _LOG.info("%s lies on %s", label, ", ".join(sorted({str(d) for d in model.hf_device_map.values()})))
    else:
        model = model.to(device.device)
    model = model.eval()
    stored = getattr(AutoConfig.from_pretrained(source.folder), "dtype", None)
    split = _split_at_head(label, model, str(stored).removeprefix("torch."))
    try:
        _check_reproduction(label, model, split)
    except PsdError:
        raise
    except Exception as error:  # each architecture fails in its own way
        what = f"{label} ({type(model).__name__})"
        raise PsdError(f"{what} fails in {device.dtype_name}, so it is not scored: {_brief(error)}") from error
    return model, split


def _check_headers(label: str, folder: Path) -> None:
    """Check that the headers of safetensors files are whole and describe the bytes that follow them."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise PsdError(f"{label}: {path.name} is damaged ({error}); fetch or save it again") from error


def _check_loading(label: str, model: Any, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise PsdError(
            f"{label}: the weights have no {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}; "
            "they would be random numbers, so nothing is scored"
        )
    mismatched = sorted(info.get("mismatched_keys") or ())
    if mismatched:
        found = [f"{name} is {tuple(found)}, expected {tuple(expected)}" for name, found, expected in mismatched[:5]]
        raise PsdError(f"{label}: weights of another shape than the configuration says: {'; '.join(found)}")
    unexpected = sorted(info.get("unexpected_keys", ()))
    if unexpected:
        _LOG.warning("%s: weights that the architecture does not use: %s", label, ", ".join(unexpected[:5]))


def _merge_adapter(model: Any, source: Source, dtype: torch.dtype) -> Any:
    """Return the float32 `model` with the adapter merged into it, in `dtype`; it predicts what the adapter did."""
    from peft import PeftModel

    what = f"adapter {source.member.adapter} does not fit {source.member.model}"
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        # an adapter on one of the two must not be merged into the other
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = PeftModel.from_pretrained(model, str(source.adapter_folder)).eval()
            # a second time for its list of keys, which from_pretrained keeps to itself
            keys = adapted.load_adapter(str(source.adapter_folder), "default")
            before = _probe(adapted)
            merged = adapted.merge_and_unload()
        except Exception as error:  # each kind of adapter fails in its own way
            raise PsdError(f"{what}: {_brief(error)}") from error
    strangers = sorted([*keys.missing_keys, *keys.unexpected_keys])
    if strangers:
        raise PsdError(
            f"{what}: only one of the two has {', '.join(strangers[:3])}{' …' if len(strangers) > 3 else ''}; "
            "is this the base that the adapter was trained on?"
        )
    difference = _relative_difference(before, _probe(merged))
    if not difference <= 1e-4:
        raise PsdError(f"{what}: merging it changes the logits (relative difference {difference:.2g})")
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    return merged.to(dtype)


@torch.inference_mode()
def _probe(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return a model's own logits, float32 [tokens, rows], on a few tokens."""
    ids = _probe_ids(model) if ids is None else ids
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()


def _probe_ids(model: Any) -> torch.Tensor:
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    device = embedding._hf_hook.execution_device if weight.is_meta else weight.device
    return torch.arange(8, device=device)[None, :] % weight.shape[0]


def _stored(module: Any, name: str) -> torch.Tensor:
    """Return a parameter of a module, from where accelerate keeps it if that is not in the module."""
    value: torch.Tensor = getattr(module, name)
    if not value.is_meta:
        return value.detach()
    hook = module._hf_hook
    stored: torch.Tensor = hook.weights_map[name]
    return stored.to(hook.execution_device)


def _relative_difference(logits: torch.Tensor, ours: torch.Tensor) -> float:
    """Return the largest difference over the largest logit; where both are NaN they agree."""
    logits, ours = logits.nan_to_num(), ours.nan_to_num()
    return float((logits - ours).abs().max() / logits.abs().max().clamp(min=1.0))


def _split_at_head(label: str, model: Any, stored_dtype: str) -> LoadedModel:
    head = model.get_output_embeddings()
    backbone = model.base_model
    if head is None or not isinstance(head, torch.nn.Linear) or backbone is model:
        raise PsdError(f"{label} ({type(model).__name__}): no linear output head could be found, so it is not scored")
    config = model.config.get_text_config()
    weight = _stored(head, "weight")
    bias = None if head.bias is None else _stored(head, "bias")
    embedding = model.get_input_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / float(config.logits_scaling)  # Granite divides
    elif getattr(config, "logit_scale", None) is not None:
        scale = float(config.logit_scale)  # Cohere multiplies
    softcap = getattr(config, "final_logit_softcapping", None)
    readout = Readout(bias=bias, scale=scale, softcap=None if softcap is None else float(softcap))
    if head.weight.is_meta:
        tied = head.weight is embedding.weight or torch.equal(weight, _stored(embedding, "weight").to(weight))
    else:
        tied = embedding.weight.data_ptr() == weight.data_ptr()
    return LoadedModel(backbone, weight, readout, tied, stored_dtype)


@torch.inference_mode()
def _check_reproduction(label: str, model: Any, loaded: LoadedModel) -> None:
    """Compare readout(states @ headᵀ) with the model's own logits on a few tokens, which must not see later ones."""
    ids = _probe_ids(model)
    own = _probe(model)
    states = loaded.states(ids, torch.ones_like(ids))[0]
    ours = loaded.readout.logits((states @ loaded.head.T).float())
    what = f"{label} ({type(model).__name__})"
    if own.shape != ours.shape:
        raise PsdError(f"{what}: logits of shape {tuple(own.shape)}, ours {tuple(ours.shape)}")
    # half precision rounds the model's own logits; float32 must agree closely
    tolerance = 1e-4 if loaded.head.dtype == torch.float32 else 3e-2
    difference = max(_relative_difference(own, ours), _readout_difference(model, loaded) * tolerance / 1e-4)
    if not difference <= tolerance:
        raise PsdError(
            f"{what}: its logits are not head · final state (relative difference {difference:.2g}); this output layer "
            "cannot be reproduced, so it is not scored"
        )
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    if not _relative_difference(own[:-1], _probe(model, other)[:-1]) <= tolerance:
        raise PsdError(f"{what}: a prediction changes with the tokens that follow it; only causal models are scored")


def _readout_difference(model: Any, loaded: LoadedModel) -> float:
    """Return the largest relative difference between the readout and the model's own, in float32, on random states.

    In half precision a model's own logits are too coarse to show, say, a soft-capping that is not known here. So the
    model reads out states that are put in place of its own, small and large ones, with the first rows of its head.
    """
    own_head = model.get_output_embeddings()
    rows = slice(0, 1024)
    head = torch.nn.Linear(loaded.head.shape[1], loaded.head[rows].shape[0], bias=loaded.readout.bias is not None)
    head.weight = torch.nn.Parameter(loaded.head[rows].float(), requires_grad=False)
    if loaded.readout.bias is not None:
        head.bias = torch.nn.Parameter(loaded.readout.bias[rows].float(), requires_grad=False)
    ids = _probe_ids(model)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(ids.shape[1], loaded.head.shape[1], generator=generator).to(head.weight)
    unit = random / (random @ head.weight.T).abs().max().clamp(min=1e-30)
    difference = 0.0
    for size in (1.0, 100.0):
        states = unit * size
        model.set_output_embeddings(head)
        try:
            with _states_put_in(loaded.backbone, head, states):
                own = _probe(model)
        finally:
            model.set_output_embeddings(own_head)
        ours = replace(loaded.readout, bias=head.bias).logits(states @ head.weight.T)
        if own.shape != ours.shape:
            return math.inf
        difference = max(difference, float((own - ours).abs().max() / own.abs().max().clamp(min=1e-30)))
    return difference


@contextmanager
def _states_put_in(backbone: torch.nn.Module, head: torch.nn.Module, states: torch.Tensor) -> Iterator[None]:
    """Give the output layer these states in place of the backbone's own."""
    reached = False

    def after_backbone(_module: Any, _inputs: Any, output: Any) -> Any:
        nonlocal reached
        reached, output.last_hidden_state = True, states[None]
        return output

    def before_head(_module: Any, inputs: Any) -> Any:
        # some models call only a part of what transformers names their backbone
        return inputs if reached else (states[None],)

    hooks = [backbone.register_forward_hook(after_backbone), head.register_forward_pre_hook(before_head)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' own loading bars and reports, which this package replaces by errors."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
