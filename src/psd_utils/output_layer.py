"""A transformers model -> its backbone, head and readout, checked to give the model's own logits."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .errors import PsdError
from .kernels import Readout


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


@torch.inference_mode()
def probe(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
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


def relative_difference(logits: torch.Tensor, ours: torch.Tensor) -> float:
    """Return the largest difference over the largest logit; where both are NaN they agree."""
    logits, ours = logits.nan_to_num(), ours.nan_to_num()
    return float((logits - ours).abs().max() / logits.abs().max().clamp(min=1.0))


def split_at_head(label: str, model: Any, stored_dtype: str) -> LoadedModel:
    """Return a model split at its output layer.

    Raises:
        PsdError: it has no linear head behind a backbone.
    """
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
def check_reproduction(label: str, model: Any, loaded: LoadedModel) -> None:
    """Compare readout(states @ headᵀ) with the model's own logits on a few tokens, which must not see later ones.

    Raises:
        PsdError: they differ, so the output layer is not one that is known here; or the model is not causal.
    """
    ids = _probe_ids(model)
    own = probe(model)
    states = loaded.states(ids, torch.ones_like(ids))[0]
    ours = loaded.readout.logits((states @ loaded.head.T).float())
    what = f"{label} ({type(model).__name__})"
    if own.shape != ours.shape:
        raise PsdError(f"{what}: logits of shape {tuple(own.shape)}, ours {tuple(ours.shape)}")
    # half precision rounds the model's own logits; float32 must agree closely
    tolerance = 1e-4 if loaded.head.dtype == torch.float32 else 3e-2
    difference = max(relative_difference(own, ours), _readout_difference(model, loaded) * tolerance / 1e-4)
    if not difference <= tolerance:
        raise PsdError(
            f"{what}: its logits are not head · final state (relative difference {difference:.2g}); this output layer "
            "cannot be reproduced, so it is not scored"
        )
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    if not relative_difference(own[:-1], probe(model, other)[:-1]) <= tolerance:
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
                own = probe(model)
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
