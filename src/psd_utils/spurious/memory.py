"""The minimal associative memory: keys with a shared part, two linear maps, a normalised readout.

In: settings and seeds. Out: the facts of every seed and the model's states, logits and accuracies.

All seeds are one batch: the first axis of every tensor is the seed (S). Everything is float64 on the CPU, and
every random number comes from a generator of its own seed, so that a seed's facts, weights and batches do not
depend on which other seeds share the batch.

Source: Palit et al., "When Forgetting is not Catastrophic: On the Mechanics of Spurious Forgetting" (2026),
the minimal associative memory. Populations have the paper's names: A (old facts with answers in region X),
B (old facts in region Y), B′ (new facts in Y) and C (new facts in both regions).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Normalisation = Literal["rms", "none", "relu"]
NewAnswers = Literal["Y", "all"]

# One stream of random numbers for each purpose, so that changing one leaves the others as they were.
STREAMS = {
    "shared_key": 0,
    "A": 1,
    "B": 2,
    "new": 3,
    "weights": 4,
    "pretraining": 5,
    "fine_tuning": 6,
    "replayed_facts": 7,
    "replay": 8,
    "offset": 9,
    "random_control": 10,
}


@dataclass(frozen=True)
class MemorySettings:
    """The associative memory's sizes and ingredients; the defaults are the paper's base model.

    Attributes:
        dimension: d, width of keys and states.
        n_values: |V|, number of answers; the first half is region X, the second region Y. Even.
        n_old: number of facts in A, and in B.
        n_new: number of new facts (B′ or C).
        alpha: α, expected cosine between any two keys, at least 0 and below 1.
        normalisation: "rms" √d·h/‖h‖ (the model), "none" h, "relu" max(h, 0).
        new_answers: "Y", the new facts are B′; "all", they are the control C.
        batch_size: facts per SGD step, drawn with replacement.
        readout_rate: factor on the readout's learning rate during fine-tuning; 0 freezes U.
        project_shared: take the shared row out of every update of W during fine-tuning.
    """

    dimension: int = 128
    n_values: int = 32
    n_old: int = 128
    n_new: int = 128
    alpha: float = 0.5
    normalisation: Normalisation = "rms"
    new_answers: NewAnswers = "Y"
    batch_size: int = 32
    readout_rate: float = 1.0
    project_shared: bool = False

    def __post_init__(self) -> None:
        for name in ("dimension", "n_old", "n_new", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least 1.")
        if self.n_values < 4 or self.n_values % 2:
            raise ValueError(f"n_values is {self.n_values}; expected an even number of at least 4 (two regions).")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; expected the mean cosine of two keys, at least 0 and below 1.")
        if self.readout_rate < 0:
            raise ValueError(f"readout_rate is {self.readout_rate}; expected a factor of at least 0.")
        for name, allowed in (
            ("normalisation", get_args(Normalisation)),
            ("new_answers", get_args(NewAnswers)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")

    @property
    def n_values_x(self) -> int:
        """The number of answers in region X; values from here on belong to Y."""
        return self.n_values // 2

    @property
    def before_fine_tuning(self) -> "MemorySettings":
        """The same settings with all that only fine-tuning reads set to its default: equal ones share
        pretraining.
        """
        base = MemorySettings()
        return replace(
            self,
            n_new=base.n_new,
            new_answers=base.new_answers,
            readout_rate=base.readout_rate,
            project_shared=base.project_shared,
        )


BASE = MemorySettings()
"""The paper's base model."""


@dataclass(frozen=True)
class Facts:
    """Facts of every seed: keys [S, n, d] and answers [S, n] (value numbers)."""

    keys: Tensor
    answers: Tensor

    def __add__(self, other: "Facts") -> "Facts":
        return Facts(torch.cat([self.keys, other.keys], 1), torch.cat([self.answers, other.answers], 1))

    def select(self, members: Tensor) -> "Facts":
        """The facts of some seeds only; members are positions on the first axis."""
        return Facts(self.keys[members], self.answers[members])


@dataclass(frozen=True)
class World:
    """All facts of all seeds.

    Attributes:
        settings: what they were drawn with.
        seeds: the seeds, in the order of the first axis.
        shared_key: μ, [S, d], unit vectors.
        A: old facts with answers in X.
        B: old facts with answers in Y.
        new: the new facts: B′ (answers in Y) or C (in both regions).
    """

    settings: MemorySettings
    seeds: tuple[int, ...]
    shared_key: Tensor
    A: Facts
    B: Facts
    new: Facts

    @property
    def n_seeds(self) -> int:
        """How many seeds (S)."""
        return len(self.seeds)

    def select(self, members: Tensor) -> "World":
        """The world of some seeds only; members are positions on the first axis."""
        return World(
            self.settings,
            tuple(self.seeds[i] for i in members.tolist()),
            self.shared_key[members],
            self.A.select(members),
            self.B.select(members),
            self.new.select(members),
        )


@dataclass(frozen=True)
class Weights:
    """The model of every seed: W [S, d, d] writes states, U [S, d, |V|] reads answers."""

    W: Tensor
    U: Tensor

    def clone(self) -> "Weights":
        """A copy that shares no memory."""
        return Weights(self.W.clone(), self.U.clone())

    def select(self, members: Tensor) -> "Weights":
        """Copies for some seeds only; members are positions on the first axis."""
        return Weights(self.W[members], self.U[members])


def generator(seed: int, stream: str) -> torch.Generator:
    """A random generator that depends only on the seed and on what it is for (a key of STREAMS)."""
    state = np.random.SeedSequence([int(seed), STREAMS[stream]]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 31 | int(state[1]) >> 1)


def make_world(settings: MemorySettings, seeds: Sequence[int]) -> World:
    """Draw keys and answers of A, B and the new facts for every seed.

    Keys are k_i = √α μ + √(1−α) e_i with μ and e_i random unit vectors (paper: toy model, keys); answers are
    uniform over the population's region.

    Raises:
        ValueError: no seeds, or a negative one.
    """
    seeds = tuple(int(s) for s in seeds)
    if not seeds or min(seeds) < 0:
        raise ValueError(f"seeds are {seeds}; expected at least one whole number ≥ 0, such as range(10).")
    half, everything = settings.n_values_x, settings.n_values
    regions = {"A": (0, half), "B": (half, everything), "new": (half, everything)}
    if settings.new_answers == "all":
        regions["new"] = (0, everything)
    sizes = {"A": settings.n_old, "B": settings.n_old, "new": settings.n_new}

    shared = torch.stack([_unit_rows(1, settings.dimension, generator(s, "shared_key"))[0] for s in seeds])
    facts = {}
    for name, (low, high) in regions.items():
        own, answers = [], []
        for seed in seeds:
            draws = generator(seed, name)
            own.append(_unit_rows(sizes[name], settings.dimension, draws))
            answers.append(torch.randint(low, high, (sizes[name],), generator=draws))
        a = settings.alpha
        keys = math.sqrt(a) * shared[:, None] + math.sqrt(1 - a) * torch.stack(own)
        facts[name] = Facts(keys, torch.stack(answers))
    return World(settings, seeds, shared, facts["A"], facts["B"], facts["new"])


def initial_weights(settings: MemorySettings, seeds: Sequence[int]) -> Weights:
    """Random weights before any training, entries iid N(0, 1/d): W [S, d, d] and U [S, d, |V|]."""
    d, v = settings.dimension, settings.n_values
    ws, us = [], []
    for seed in seeds:
        draws = generator(seed, "weights")
        ws.append(torch.randn(d, d, generator=draws, dtype=torch.float64) / math.sqrt(d))
        us.append(torch.randn(d, v, generator=draws, dtype=torch.float64) / math.sqrt(d))
    return Weights(torch.stack(ws), torch.stack(us))


def normalise(h: Tensor, normalisation: Normalisation) -> Tensor:
    """φ(h), the state that the readout reads, [..., d]: √d·h/‖h‖, h, or max(h, 0)."""
    if normalisation == "rms":
        return h * (math.sqrt(h.shape[-1]) / torch.linalg.vector_norm(h, dim=-1, keepdim=True))
    return h.clamp_min(0) if normalisation == "relu" else h


def raw_states(keys: Tensor, weights: Weights) -> Tensor:
    """h = k W, [S, n, d]."""
    return torch.bmm(keys, weights.W)


def readout_states(keys: Tensor, weights: Weights, normalisation: Normalisation) -> Tensor:
    """φ(k W), [S, n, d]."""
    return normalise(raw_states(keys, weights), normalisation)


def logits(keys: Tensor, weights: Weights, normalisation: Normalisation) -> Tensor:
    """z = φ(k W) U, [S, n, |V|]."""
    return torch.bmm(readout_states(keys, weights, normalisation), weights.U)


def accuracy(z: Tensor, answers: Tensor) -> Tensor:
    """Share of facts whose largest logit is the right answer, [S], from logits [S, n, |V|]."""
    return (z.argmax(-1) == answers).double().mean(-1)


def fact_accuracy(facts: Facts, weights: Weights, normalisation: Normalisation) -> Tensor:
    """Accuracy of the model on some facts, [S], 0–1."""
    return accuracy(logits(facts.keys, weights, normalisation), facts.answers)


def region_direction(readout: Tensor) -> Tensor:
    """w, the unit vector from region X to region Y in the readout, [S, d], from U [S, d, |V|]."""
    half = readout.shape[-1] // 2
    w = readout[..., half:].mean(-1) - readout[..., :half].mean(-1)
    return w / torch.linalg.vector_norm(w, dim=-1, keepdim=True)


def _unit_rows(n: int, d: int, draws: torch.Generator) -> Tensor:
    rows = torch.randn(n, d, generator=draws, dtype=torch.float64)
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
