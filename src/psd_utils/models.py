"""A member's files -> a loaded model whose states and head give its own logits, or an error that says why not."""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from . import devices
from .devices import Device
from .errors import PsdError
from .output_layer import LoadedModel, check_reproduction, probe, relative_difference, split_at_head
from .sources import Source, brief

_LOG = logging.getLogger(__name__)


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
        layout = {"device_map": "auto", "max_memory": devices.SPREAD_MEMORY, "offload_folder": offload.name}
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=torch.float32 if source.adapter_folder else device.dtype,
                use_safetensors=not source.pickled,  # pickles are read as tensors only (weights_only)
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported below, by name
                **layout,
            )
        except Exception as error:  # each architecture fails in its own way
            raise PsdError(f"{label} cannot be loaded: {brief(error)}") from error
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
    split = split_at_head(label, model, str(stored).removeprefix("torch."))
    try:
        check_reproduction(label, model, split)
    except PsdError:
        raise
    except Exception as error:  # each architecture fails in its own way
        what = f"{label} ({type(model).__name__})"
        raise PsdError(f"{what} fails in {device.dtype_name}, so it is not scored: {brief(error)}") from error
    return model, split


def _check_headers(label: str, folder: Path) -> None:
    """Check that the headers of safetensors files are whole, describe the bytes that follow, and name real weights."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise PsdError(f"{label}: {path.name} is damaged ({error}); fetch or save it again") from error
        quantised = [name for name, dtype in dtypes.items() if name.endswith("weight") and dtype[0] in "IU"]
        if quantised:
            raise PsdError(
                f"{label}: {quantised[0]} in {path.name} holds integers ({dtypes[quantised[0]]}), not the weights "
                "themselves; quantised models are not scored: give the one they were made from"
            )


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
            before = probe(adapted)
            merged = adapted.merge_and_unload()
        except Exception as error:  # each kind of adapter fails in its own way
            raise PsdError(f"{what}: {brief(error)}") from error
    strangers = sorted([*keys.missing_keys, *keys.unexpected_keys])
    if strangers:
        raise PsdError(
            f"{what}: only one of the two has {', '.join(strangers[:3])}{' …' if len(strangers) > 3 else ''}; "
            "is this the base that the adapter was trained on?"
        )
    difference = relative_difference(before, probe(merged))
    if not difference <= 1e-4:
        raise PsdError(f"{what}: merging it changes the logits (relative difference {difference:.2g})")
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    return merged.to(dtype)


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
