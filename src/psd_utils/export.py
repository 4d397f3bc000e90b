"""A Correction for generation and serving: a LogitsProcessor, a server's logit_bias, or weights of a saved model.

Servers and transformers' `sequence_bias` add a bias before they divide by the temperature, so what they are given is
T·b with temperature T, which is the corrected z/T + b.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from .corpus import tokenizer_sha256
from .correction import Correction, check_ids
from .devices import choose_device
from .errors import PsdError
from .files import write_json
from .models import load_causal_model
from .output_layer import LoadedModel
from .pairs import Member
from .sources import Source, load_config, load_tokenizer, locate

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes: the range of a logit_bias value and of a temperature, and how many entries.

    Values and temperatures are those of the OpenAI interface, which other servers follow (some cut values silently).
    No reference states a number of entries; servers differ, and 1,024 is a cautious default.
    """

    lowest: float = -100.0
    highest: float = 100.0
    highest_temperature: float = 2.0
    max_entries: int = 1024


@dataclass(frozen=True)
class Baked:
    """A saved model with a correction in it: what lies in its weights, what only in generation_config.json."""

    folder: Path
    in_weights: tuple[str, ...]
    in_generation_config: tuple[str, ...]
    notes: tuple[str, ...]


def check_tokenizer(correction: Correction, tokenizer: Any, base: Any | None = None) -> None:
    """Check that the ids of a correction mean the same tokens to `tokenizer`.

    A derived model's tokenizer may differ from the base's in its special tokens; with the `base` tokenizer, to which
    the correction belongs, it is enough that every corrected id is the same token.

    Raises:
        PsdError: the correction belongs to another tokenizer.
    """
    if correction.tokenizer is None and correction.vocabulary in (None, len(tokenizer)):
        check_ids(correction.ids, len(tokenizer))
        _LOG.warning("the correction names no tokenizer, so nothing says that its ids mean these tokens")
        return
    if correction.tokenizer is not None and correction.tokenizer == tokenizer_sha256(tokenizer):
        return
    if base is not None and correction.tokenizer == tokenizer_sha256(base):
        ids = correction.ids.tolist()
        for i, own, other in zip(ids, *(t.convert_ids_to_tokens(ids) for t in (base, tokenizer)), strict=True):
            if own != other:
                raise PsdError(f"id {i} is {own!r} to the correction's tokenizer, {other!r} to this one")
        return
    raise PsdError(
        f"the correction belongs to another tokenizer ({correction.vocabulary} entries, sha256 "
        f"{str(correction.tokenizer)[:12]}; here {len(tokenizer)}, {tokenizer_sha256(tokenizer)[:12]}): its ids would "
        "mean other tokens. Where this one differs only in special tokens, give the base's tokenizer too"
    )


class CorrectionProcessor(LogitsProcessor):
    """Turns the scores of transformers' `generate` into z/T + b: `generate(..., logits_processor=[processor])`."""

    def __init__(self, correction: Correction, tokenizer: Any, base: Any | None = None) -> None:
        check_tokenizer(correction, tokenizer, base)
        self.correction = correction
        self._bias = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return corrected scores [batch, vocabulary]; `input_ids` are not looked at."""
        if self._bias.shape != scores.shape[-1:] or self._bias.device != scores.device:
            self._bias = self.correction.apply(torch.zeros_like(scores[0]))
        return scores / self.correction.temperature + self._bias


def logit_bias(
    correction: Correction, tokenizer: Any, base: Any | None = None, limits: ServerLimits | None = None
) -> dict[str, Any]:
    """Return the fields of a request to an OpenAI-style server: `temperature` T and `logit_bias`, T·b by id as text.

    Raises:
        PsdError: another tokenizer, or a value, temperature or number of entries beyond the server's limits.
    """
    limits = limits or ServerLimits()
    check_tokenizer(correction, tokenizer, base)
    entries = _scaled_bias(correction)
    if len(entries) > limits.max_entries:
        raise PsdError(
            f"the correction has {len(entries)} biased ids, the server takes {limits.max_entries}: fit it with "
            f"top_k={limits.max_entries}, or raise max_entries in ServerLimits if your server takes more"
        )
    for i, value in entries.items():
        if not limits.lowest <= value <= limits.highest:
            raise PsdError(
                f"the bias of id {i} times the temperature is {value:.4g}, outside the server's {limits.lowest:g} to "
                f"{limits.highest:g}: a server that cuts it would compute another model"
            )
    if correction.temperature > limits.highest_temperature:
        raise PsdError(
            f"temperature {correction.temperature:.4g} is above the server's highest, {limits.highest_temperature:g}"
        )
    return {"temperature": correction.temperature, "logit_bias": {str(i): value for i, value in entries.items()}}


def generation_settings(correction: Correction, tokenizer: Any, base: Any | None = None) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` that sample from z/T + b, without the weights being changed.

    The filters that generate applies by default (`top_k=50`) are switched off. For greedy decoding give
    `sequence_bias` alone: the largest of z + T·b is the largest of z/T + b.
    """
    check_tokenizer(correction, tokenizer, base)
    settings = {"do_sample": True, "temperature": correction.temperature, "top_k": 0, "top_p": 1.0}
    return settings | _sequence_bias(correction, correction.temperature)


def bake(
    correction: Correction,
    member: Member | str,
    folder: str | Path,
    *,
    base: Member | str | None = None,
    weights_only: bool = False,
) -> Baked:
    """Save a copy of `member` in `folder` whose own logits are corrected, as far as its architecture can hold that.

    The temperature goes into an untied copy of the head (with soft-capping, into head and cap). The bias goes into the
    head's own where the architecture has one. Elsewhere a saved bias would be dropped silently on loading, so it goes
    into generation_config.json as `sequence_bias`, which only transformers' `generate` reads; `weights_only` refuses
    instead. What was saved is loaded again and compared before it is reported.

    Raises:
        PsdError: another tokenizer, a folder that is not empty, or an architecture that cannot hold the correction.
    """
    target = Path(folder).expanduser()
    if target.exists() and any(target.iterdir()):
        raise PsdError(f"{target} is not empty; give a new folder")
    source = locate(Member(member) if isinstance(member, str) else member)
    base_source = None if base is None else locate(Member(base) if isinstance(base, str) else base)
    base_tokenizer = None if base_source is None else load_tokenizer(base_source)
    tokenizer = load_tokenizer(source) or base_tokenizer
    if tokenizer is None:
        raise PsdError(f"{source.member.label} has no tokenizer to check the correction against; give its base too")
    check_tokenizer(correction, tokenizer, base_tokenizer)
    model, split = load_causal_model(source, choose_device("cpu", _stored_dtype(source)))
    expected = _corrected_logits(model, correction)
    label, kind = source.member.label, f"{type(model).__name__}"
    notes = [] if correction.beta == 1.0 else _scale_head(model, split, correction.beta)
    biased = bool((correction.bias != 0).any())
    obstacle = _obstacle_to_bias(kind, split) if biased else None
    in_weights = [] if correction.beta == 1.0 else ["temperature"]
    if biased and obstacle is None:
        _add_to_bias(model, split, correction)
        in_weights.append("bias")
    elif obstacle is not None:
        if weights_only:
            raise PsdError(f"{label}: {obstacle}; without weights_only the bias goes into generation_config.json")
        notes.append(f"{obstacle}: it is in generation_config.json as sequence_bias, which only generate() reads")
        # the logits are divided by T in the weights already
        model.generation_config.sequence_bias = _sequence_bias(correction, 1.0)["sequence_bias"]
        expected = expected - correction.apply(torch.zeros_like(expected))
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _check_saved(target, expected, kind)
    for note in notes:
        _LOG.info("%s: %s", label, note)
    outside = () if obstacle is None else ("bias",)
    said = {
        "of": label,
        "temperature": correction.temperature,
        "in_weights": in_weights,
        "in_generation_config": outside,
    }
    write_json(target / "correction.json", said | {"notes": notes})
    return Baked(target, tuple(in_weights), outside, tuple(notes))


def _stored_dtype(source: Source) -> str:
    return str(getattr(load_config(source), "dtype", None) or "float32").removeprefix("torch.")


def _scale_head(model: Any, split: LoadedModel, beta: float) -> list[str]:
    """Multiply the logits by β in an untied copy of the head; return what there is to say about it."""
    head, config, notes = model.get_output_embeddings(), model.config.get_text_config(), []
    if split.tied:
        notes.append("the head was tied to the embedding and is a matrix of its own now")
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
    if split.head.dtype != torch.float32:
        notes.append(f"the scaled head is rounded to {str(split.head.dtype).removeprefix('torch.')}")
    head.weight = _parameter(split.head.double() * beta, like=split.head)
    if head.bias is not None:
        head.bias = _parameter(head.bias.detach().double() * beta, like=head.bias)
    if split.readout.softcap is not None:
        config.final_logit_softcapping = split.readout.softcap * beta
        notes.append(f"the cap of the logits went from {split.readout.softcap:g} to {split.readout.softcap * beta:g}")
    return notes


def _obstacle_to_bias(kind: str, split: LoadedModel) -> str | None:
    """Return why the architecture's head cannot hold a bias, or None."""
    if split.readout.bias is None:
        return f"the head of {kind} has no bias, and a saved one would be dropped silently on loading"
    if split.readout.softcap is not None:
        return f"{kind} caps its logits after the bias of its head, so that cannot hold the correction's bias"
    return None


def _add_to_bias(model: Any, split: LoadedModel, correction: Correction) -> None:
    head = model.get_output_embeddings()
    added = correction.bias.double() / split.readout.scale
    head.bias = _parameter(head.bias.detach().double().index_add(0, correction.ids, added), like=head.bias)


def _parameter(values: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.to(like.dtype), requires_grad=False)


def _scaled_bias(correction: Correction) -> dict[int, float]:
    """Return T·b by id, zeros left out."""
    values = (correction.bias.double() * correction.temperature).tolist()
    return {i: value for i, value in zip(correction.ids.tolist(), values, strict=True) if value != 0}


def _sequence_bias(correction: Correction, factor: float) -> dict[str, Any]:
    values = (correction.bias.double() * factor).tolist()
    entries = [[[i], v] for i, v in zip(correction.ids.tolist(), values, strict=True) if v != 0]
    return {"sequence_bias": entries} if entries else {}


@torch.inference_mode()
def _corrected_logits(model: Any, correction: Correction) -> torch.Tensor:
    """Return the logits of a few tokens, float64 [tokens, rows], corrected."""
    ids = torch.arange(16)[None] * 7 % model.get_input_embeddings().weight.shape[0]
    return correction.apply(model(input_ids=ids).logits[0].double())


def _check_saved(folder: Path, expected: torch.Tensor, kind: str) -> None:
    """Load what was saved as anybody would, and compare its logits."""
    source = locate(Member(str(folder)))
    dtype = _stored_dtype(source)
    model, _ = load_causal_model(source, choose_device("cpu", dtype))
    found = _corrected_logits(model, Correction.identity())
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= (1e-4 if dtype == "float32" else 3e-2):
        raise PsdError(
            f"{kind}: the model saved in {folder} does not give the corrected logits when it is loaded (relative "
            f"difference {difference:.2g}); do not use it"
        )
