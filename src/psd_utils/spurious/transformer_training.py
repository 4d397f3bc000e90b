"""Pretraining and injection of the transformer, resumable after a kill.

In: biographies, settings and a seed. Out: a model that knows A and B; then the same model step by step while it learns
the new people.

Every batch depends on the seed and the step alone, so a resumed run goes on with the batches it would have had. Weights
and the optimiser's moments are float32 throughout. Source: Palit et al. (2026), training hyper-parameters.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from psd_utils.spurious.biographies import Biographies, People, generator
from psd_utils.spurious.biography_batches import training_batch
from psd_utils.spurious.biography_language import describe_language
from psd_utils.spurious.transformer import Decoder, TransformerSettings, freeze, make_decoder, next_token_loss


@dataclass(frozen=True)
class TrainingSettings:
    """How the model is trained; the defaults are the small study's configuration h.

    Attributes:
        batch_size: sequences a step, in pretraining and injection.
        pretraining_steps: length of pretraining.
        peak_rate: learning rate of pretraining, falling along a cosine to `final_rate`, without warm-up.
        final_rate: where it ends.
        rate_ratio: peak_rate / constant rate of the injection.
        weight_decay: AdamW's, on all parameters.
        betas: AdamW's.
        clip: largest norm of the gradient.
        save_every: steps between two checkpoints of pretraining, where a folder is given.
    """

    batch_size: int = 64
    pretraining_steps: int = 1250
    peak_rate: float = 1e-3
    final_rate: float = 1e-7
    rate_ratio: float = 40 / 3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    save_every: int = 250

    @property
    def injection_rate(self) -> float:
        """The constant learning rate of the injection."""
        return self.peak_rate / self.rate_ratio


SMALL_TRAINING = TrainingSettings()
"""Configuration h."""

FULL_TRAINING = TrainingSettings(batch_size=256, pretraining_steps=16_000, peak_rate=5e-4, save_every=1000)
"""The published study, for one GPU."""


@dataclass(frozen=True)
class Injection:
    """What is changed in one injection.

    Attributes:
        n_steps: its length.
        rate: multiplies the constant learning rate (the dose).
        batch_size: sequences a step; 0 for the training settings' own.
        frozen: groups of transformer.GROUPS that stay as they were.
        on: whose sequences are trained on: "new", or "A" (rehearsal, in which nothing can be forgotten).
    """

    n_steps: int = 600
    rate: float = 1.0
    batch_size: int = 0
    frozen: tuple[str, ...] = ()
    on: str = "new"


DEFAULT = Injection()
"""The published protocol at the small study's length."""


def choose_device(name: str = "auto") -> torch.device:
    """The device to compute on; "auto" takes a CUDA GPU where there is one, else the CPU.

    Raises:
        ValueError: a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"No device {name!r} here ({error}). Use 'auto' or 'cpu'.") from error
    return device


def pretrain(
    world: Biographies,
    model_settings: TransformerSettings,
    training: TrainingSettings = SMALL_TRAINING,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> Decoder:
    """Train on A and B, people drawn uniformly from both.

    Args:
        world: the people; its seed also seeds weights and batches.
        model_settings: the model.
        training: how.
        folder: where checkpoints are kept (pretraining.pt, written atomically); a run found there is resumed, or
            returned if it is finished. None keeps nothing.
        device: where to compute; the batches do not depend on it.
        progress: show a bar.

    Returns:
        The model, on the device.

    Raises:
        ValueError: a checkpoint in the folder that belongs to other settings.
        FloatingPointError: the gradient is no longer finite.
    """
    model = make_decoder(model_settings, generator(world.seed, "weights")).to(device)
    optimiser = make_optimiser(model, training, training.peak_rate)
    known = (world.settings.before_fine_tuning, model_settings, training)
    parts = [world.seed, describe_language(world.language), *(asdict(part) for part in known)]
    key = json.dumps(parts, sort_keys=True)
    path = folder / "pretraining.pt" if folder is not None else None
    done, total = 0, training.pretraining_steps
    if path is not None and path.is_file():
        saved = load_state(path, key)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        done = int(saved["step"])
    for step in tqdm(range(done, total), "pretraining", initial=done, total=total, disable=not progress, leave=False):
        for group in optimiser.param_groups:
            group["lr"] = cosine(step, total, training.peak_rate, training.final_rate)
        draws = generator(world.seed, "pretraining", step)
        _descend(model, optimiser, [world.A, world.B], training.batch_size, draws, training.clip, step)
        if path is not None and ((step + 1) % training.save_every == 0 or step + 1 == total):
            save_state(path, key, Moment(step + 1, model, optimiser).state())
    return model


@dataclass(frozen=True)
class Moment:
    """An injection at one step; the model is live and must not be altered."""

    step: int
    model: Decoder
    optimiser: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """What `inject` can go on from: step, model and optimiser."""
        return {"step": self.step, "model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}


def inject(
    world: Biographies,
    start: Decoder,
    steps: Sequence[int],
    injection: Injection = DEFAULT,
    training: TrainingSettings = SMALL_TRAINING,
    stream: int = 0,
    resume_from: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Iterator[Moment]:
    """Train a copy of the model on the new people, with a fresh optimiser and a constant rate.

    Args:
        world: the people.
        start: the pretrained model; it is left as it is.
        steps: where to stop and look, in ascending order; 0 is before the first step.
        injection: what is changed.
        training: batch size, rate and optimiser.
        stream: which stream of batches, ≥ 0: the published study's injection seeds change this alone.
        resume_from: a Moment's state; the steps up to it are not yielded again.
        progress: show a bar.

    Yields:
        A Moment at every one of the steps.

    Raises:
        ValueError: an unknown population or group, or steps that do not ascend.
        FloatingPointError: the gradient is no longer finite.
    """
    if not steps or list(steps) != sorted(set(steps)) or steps[0] < 0:
        raise ValueError(f"steps are {list(steps)[:6]}; expected ascending whole numbers from 0 on.")
    if injection.on not in world.populations:
        raise ValueError(f"No population {injection.on!r}; expected one of {', '.join(world.populations)}.")
    model = copy.deepcopy(start)
    freeze(model, injection.frozen)
    optimiser = make_optimiser(model, training, training.injection_rate * injection.rate)
    done = -1
    if resume_from is not None:
        model.load_state_dict(resume_from["model"])
        optimiser.load_state_dict(resume_from["optimiser"])
        done = int(resume_from["step"])
    people, size = world.populations[injection.on], injection.batch_size or training.batch_size
    last = steps[-1]
    for step in tqdm(range(max(done, 0), last + 1), "injection", disable=not progress, leave=False):
        if step > done and step in steps:
            yield Moment(step, model, optimiser)
        if step < last:
            draws = generator(world.seed, "fine_tuning", step, stream)
            _descend(model, optimiser, [people], size, draws, training.clip, step)


def make_optimiser(model: Decoder, training: TrainingSettings, rate: float) -> torch.optim.AdamW:
    """AdamW on the parameters that are not frozen, with fresh moments."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(
        trained, lr=rate, betas=training.betas, eps=1e-8, weight_decay=training.weight_decay, fused=True
    )


def cosine(step: int, total: int, peak: float, final: float) -> float:
    """The learning rate of a step on a cosine from peak (step 0) to final (step `total`)."""
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * step / total))


def evaluation_steps(n_steps: int, every: int = 10, dense_until: int = 300, then_every: int = 50) -> tuple[int, ...]:
    """Every 10 steps to 300, then every 50, and the last: the published study's."""
    steps = set(range(0, min(n_steps, dense_until) + 1, every)) | set(range(dense_until, n_steps + 1, then_every))
    return tuple(sorted({s for s in steps if s <= n_steps} | {n_steps}))


def _descend(
    model: Decoder,
    optimiser: torch.optim.Optimizer,
    people: Sequence[People],
    size: int,
    draws: torch.Generator,
    clip: float,
    step: int,
) -> None:
    batch = training_batch(people, size, draws).to(next(model.parameters()).device)
    loss = next_token_loss(model, batch.tokens, batch.counted)
    loss.backward()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    norm: Tensor = torch.nn.utils.clip_grad_norm_(trained, clip)
    if not bool(norm.isfinite()):
        raise FloatingPointError(f"Training diverged at step {step} (loss {loss.item():g}). Use a lower rate.")
    optimiser.step()
    optimiser.zero_grad()


def save_state(path: Path, key: str, state: dict[str, Any]) -> None:
    """Write a state under the key of its settings, by rename, so that a kill leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save({"key": key, **state}, part)
    part.replace(path)


def load_state(path: Path, key: str) -> dict[str, Any]:
    """Read a state of save_state.

    Raises:
        ValueError: it was written under another key.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["key"] != key:
        raise ValueError(f"{path} belongs to a run with other settings. Use another folder, or delete it.")
    return saved
