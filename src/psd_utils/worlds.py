"""Known-answer worlds: small artificial pairs whose recoverable share is known from theory or an independent fit.

Each is written to disk as two captures and goes through the code of real pairs: statistics, fit, selection, exact
losses, bootstrap. Vocabulary 64, width 32, states N(0, I), head weights of sd 0.5 (DESIGN §7).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .capture import Capture, capture_key, open_capture, plan_shards, write_corpus, write_manifest
from .corpus import Corpus
from .errors import PsdError, nearest
from .files import write_tensors
from .kernels import Readout, corrected_losses

HEAD_SD = 0.5
NOISE_SD = 0.25
PRIOR_SD = 0.6
HIDDEN_NOISE_SD = 0.5
PLANTED_TEMPERATURE = 1.5
LOW_RANK = 2
N_SPECIAL = 8
SPECIAL_RISE = 2.0
# e^0.6 + e^−1.726 = 2, so that specials change places without gaining mass as a group, were they equally likely
SPECIAL_SWAP = (0.6, -1.726)


@dataclass(frozen=True)
class Sizes:
    """Tokens of each split, and of a document."""

    fit: int = 20_000
    select: int = 2_000
    eval: int = 20_000
    document: int = 100
    vocabulary: int = 64
    width: int = 32


@dataclass(frozen=True)
class Layer:
    """A model as a world needs it: final states [tokens, width], head [vocabulary, width], the head's own bias."""

    hidden: np.ndarray
    head: np.ndarray
    bias: np.ndarray

    def logits(self) -> np.ndarray:
        """Return the logits [tokens, vocabulary], float64."""
        z = self.hidden.astype(np.float64) @ self.head.T.astype(np.float64)
        return np.asarray(z + self.bias)


@dataclass(frozen=True)
class World:
    """An artificial pair: base and derived layers over one corpus; `special` ids stay out of the correction's set."""

    name: str
    seed: int
    base: Layer
    derived: Layer
    corpus: Corpus
    special: np.ndarray


def _planted_bias(base: Layer, draw: np.random.Generator) -> Layer:
    return replace(base, bias=_normal(draw, base.bias.shape))


def _doubled_logits(base: Layer, draw: np.random.Generator) -> Layer:
    return replace(base, head=2 * base.head)


def _head_noise(base: Layer, draw: np.random.Generator) -> Layer:
    return replace(base, head=base.head + NOISE_SD * _normal(draw, base.head.shape))


def _planted_both(base: Layer, draw: np.random.Generator) -> Layer:
    head = np.float32(PLANTED_TEMPERATURE) * base.head
    return replace(base, head=head, bias=_normal(draw, base.bias.shape))


def _hidden_noise(base: Layer, draw: np.random.Generator) -> Layer:
    return replace(base, hidden=base.hidden + HIDDEN_NOISE_SD * _normal(draw, base.hidden.shape))


def _low_rank(base: Layer, draw: np.random.Generator) -> Layer:
    """A change of rank 2 whose entries have the sd of the head noise."""
    rows, width = base.head.shape
    change = _normal(draw, (rows, LOW_RANK)) @ _normal(draw, (LOW_RANK, width)) / np.float32(LOW_RANK**0.5)
    return replace(base, head=base.head + NOISE_SD * change)


def _no_change(base: Layer, draw: np.random.Generator) -> Layer:
    return base


def _special_swap(base: Layer, draw: np.random.Generator) -> Layer:
    bias = base.bias.copy()
    bias[:N_SPECIAL:2], bias[1:N_SPECIAL:2] = SPECIAL_SWAP
    return replace(base, bias=bias)


def _special_rise(base: Layer, draw: np.random.Generator) -> Layer:
    bias = base.bias.copy()
    bias[:N_SPECIAL] = SPECIAL_RISE
    return replace(base, bias=bias)


WORLDS: Mapping[str, tuple[str, Callable[[Layer, np.random.Generator], Layer]]] = {
    "planted_bias": ("planted bias, sd 1", _planted_bias),
    "doubled_logits": ("doubled logits", _doubled_logits),
    "planted_both": ("planted temperature 1.5 and bias, sd 1", _planted_both),
    "head_noise": ("noise on the head, sd 0.25", _head_noise),
    "head_noise_prior_shift": ("the same noise, and the data's prior shifted", _head_noise),
    "hidden_noise": ("noise on the hidden states, sd 0.5", _hidden_noise),
    "low_rank_head": ("head change of rank 2", _low_rank),
    "special_swap": ("special tokens change places (outside the set)", _special_swap),
    "special_rise": ("special tokens all raised by 2 (outside the set)", _special_rise),
    "no_change": ("no change at all", _no_change),
}
"""The worlds: a description, and how the derived model comes from the base."""


def make_world(name: str, seed: int, sizes: Sizes | None = None) -> World:
    """Return a world; every draw (head, states, labels, prior, damage) depends on `seed` alone.

    Labels are drawn from the base, or in `head_noise_prior_shift` from softmax(z + c) with c ~ N(0, 0.6²).

    Raises:
        PsdError: there is no such world.
    """
    if name not in WORLDS:
        raise PsdError(f"no world named {name!r}: {nearest(name, list(WORLDS))}")
    sizes = sizes or Sizes()
    draw, draw_prior, draw_damage = (np.random.default_rng([seed, stream]) for stream in range(3))
    n = sizes.fit + sizes.select + sizes.eval
    head = np.float32(HEAD_SD) * _normal(draw, (sizes.vocabulary, sizes.width))
    base = Layer(_normal(draw, (n, sizes.width)), head, np.zeros(sizes.vocabulary, dtype=np.float32))
    z = base.logits()
    if name == "head_noise_prior_shift":
        z += PRIOR_SD * draw_prior.standard_normal(sizes.vocabulary)
    targets = (_softmax(z).cumsum(axis=1) < draw.random(n)[:, None]).sum(axis=1).clip(max=sizes.vocabulary - 1)
    derived = WORLDS[name][1](base, draw_damage)
    special = np.arange(N_SPECIAL) if name.startswith("special_") else np.empty(0, dtype=np.int64)
    return World(name, seed, base, derived, _corpus(f"{name}-{seed}", targets, sizes), special)


def _normal(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


def _softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def _corpus(name: str, targets: np.ndarray, sizes: Sizes) -> Corpus:
    starts: list[int] = []
    ends: list[int] = []
    at = 0
    for tokens in (sizes.fit, sizes.select, sizes.eval):
        starts += range(at, at + tokens, sizes.document)
        at += tokens
        ends.append(len(starts))
    offsets = torch.tensor([*starts, len(targets)])
    pieces = np.split(targets, starts[1:])
    keys = tuple(f"{name}:{i + 1}:{hashlib.sha256(piece.tobytes()).hexdigest()[:12]}" for i, piece in enumerate(pieces))
    fit, select, last = ends
    return Corpus(torch.from_numpy(targets), offsets, keys, (fit, select, last), 0, sizes.document, 0, 0)


def write_capture(world: World, member: str, folder: Path) -> Capture:
    """Write one member ("base" or "derived") of a world as a capture in `folder`; return it, read back from disk.

    Raises:
        PsdError: the folder cannot be written.
    """
    layer = world.base if member == "base" else world.derived
    identity = {"model": f"world:{world.name}:{member}", "seed": world.seed, "dtype": "float32"}
    target = folder / capture_key(identity)
    hidden, head, bias = (torch.from_numpy(a.astype(np.float32)) for a in (layer.hidden, layer.head, layer.bias))
    write_corpus(target / "corpus.safetensors", world.corpus)
    write_tensors(target / "head.safetensors", {"weight": head, "bias": bias})
    shards = plan_shards(world.corpus)
    offsets = world.corpus.offsets.tolist()
    for shard in shards:
        part = slice(offsets[shard.documents.start], offsets[shard.documents.stop])
        nll = corrected_losses(hidden[part], head, world.corpus.tokens[part], [None], readout=Readout(bias=bias))
        write_tensors(target / shard.file, {"hidden": hidden[part], "nll": nll[0].float()})
    facts = {
        "label": f"{world.name} {member}",
        "readout": {"scale": 1.0, "softcap": None},
        "tokenizer_length": head.shape[0],
        "shard_tokens": 16_384,
    }
    write_manifest(target, identity, facts, world.corpus, len(shards))
    capture = open_capture(target)
    assert capture is not None
    return capture
