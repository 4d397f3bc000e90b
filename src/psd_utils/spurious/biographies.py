"""Synthetic biographies: people with three-part names whose attributes are facts to be learned.

In: settings and a seed. Out: populations of people, and all that can be said about them; biography_batches renders it.

Populations have the paper's names: A (old facts, answers in region X), B (old facts, answers in region Y), the new
people (B′: answers in Y; C: in both regions) and the never-trained people (answers in X). Names are disjoint.
A *language* turns people into tokens: `TokenLanguage` (one token a word, the small study) or biography_text's
`TextLanguage` (English sentences in BPE tokens, the full study). Everything else is the same code for both.

Source: Palit et al., "When Forgetting is not Catastrophic: On the Mechanics of Spurious Forgetting" (2026),
transformer trained on synthetic biographies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from psd_utils.spurious.biography_language import N_PARTS, Language, Sentences, TokenLanguage

NewAnswers = Literal["Y", "all", "X"]
CueKind = Literal["value", "region"]

# One stream of random numbers for each purpose, so that changing one leaves the others as they were.
STREAMS = {
    "names": 0,
    "values": 1,
    "phrasings": 2,
    "cue": 3,
    "evaluation": 4,
    "weights": 5,
    "pretraining": 6,
    "fine_tuning": 7,
    "surgery": 8,
}


@dataclass(frozen=True)
class BiographySettings:
    """Who is told what; the defaults are the small study's configuration h.

    Attributes:
        n_old: people in A, and in B.
        n_new: new people.
        n_never: never-trained people.
        n_held_out: phrasings of each fact that training never shows and evaluation uses.
        new_answers: region of the new answers: "Y" (B′), "all" (the control C) or "X" (A's own).
        cue: share of the new facts whose answer a part of the name gives away, 0–1: part k tells attribute k.
        cue_kind: what that part tells: the "value" itself, or only its "region".
    """

    n_old: int = 96
    n_new: int = 192
    n_never: int = 64
    n_held_out: int = 1
    new_answers: NewAnswers = "Y"
    cue: float = 0.0
    cue_kind: CueKind = "value"

    def __post_init__(self) -> None:
        for name in ("n_old", "n_new", "n_never", "n_held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least 1.")
        for name, allowed in (("new_answers", get_args(NewAnswers)), ("cue_kind", get_args(CueKind))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")
        if not 0 <= self.cue <= 1:
            raise ValueError(f"cue is {self.cue}; expected a share from 0 (names tell nothing) to 1.")

    @property
    def before_fine_tuning(self) -> "BiographySettings":
        """The same with all that only the new people read set to its default: equal ones share pretraining."""
        base = BiographySettings()
        return replace(self, n_new=base.n_new, new_answers=base.new_answers, cue=base.cue, cue_kind=base.cue_kind)


SMALL = BiographySettings()
"""The small study, configuration h of the specification."""

FULL = BiographySettings(n_old=2000, n_new=500, n_never=500, n_held_out=5)
"""The published study; use it with biography_text.TextLanguage."""


@dataclass(frozen=True)
class People:
    """One population and all that can be said about it.

    Attributes:
        names: [n, 3], numbers in the name pools.
        values: [n, attributes], numbers in the value lists.
        answers: [n, attributes], the first token of each value: what has to be predicted.
        in_x: [n, attributes] bool, whether the answer lies in region X (else Y).
        phrasings: [n, attributes, phrasings], each fact's phrasings in random order: the last n_held_out are for
            evaluation.
        prompts: [n, P], what each sequence begins with.
        sentences: every sentence about them.
        n_held_out: see BiographySettings.
        length: tokens of a sequence, the same for all populations of a world.
        pad: the padding token.
    """

    names: Tensor
    values: Tensor
    answers: Tensor
    in_x: Tensor
    phrasings: Tensor
    prompts: Tensor
    sentences: Sentences
    n_held_out: int
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Biographies:
    """All people of one seed, and the language that is spoken of them."""

    settings: BiographySettings
    seed: int
    language: Language
    A: People
    B: People
    new: People
    never: People

    @property
    def populations(self) -> dict[str, People]:
        """The four populations by name: A, B, new, never."""
        return {"A": self.A, "B": self.B, "new": self.new, "never": self.never}


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A random generator that depends only on the seed, on what it is for (a key of STREAMS) and on further numbers."""
    state = np.random.SeedSequence([int(seed), STREAMS[purpose], *(int(n) for n in numbers)]).generate_state(
        2, np.uint32
    )
    return torch.Generator().manual_seed(int(state[0]) << 31 | int(state[1]) >> 1)


def make_biographies(
    settings: BiographySettings = SMALL, seed: int = 0, language: Language | None = None
) -> Biographies:
    """Draw the people of a seed; None stands for the small study's TokenLanguage.

    A, B and the never-trained people do not depend on what is set for the new ones, and the new people of B′ and C
    have the same names. Values are uniform over the population's region, independently for each fact.

    Raises:
        ValueError: a negative seed, more people than names, or settings that do not fit the language.
    """
    language = language or TokenLanguage()
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected a whole number ≥ 0.")
    if settings.n_held_out >= language.n_phrasings:
        raise ValueError(
            f"n_held_out is {settings.n_held_out} of {language.n_phrasings} phrasings; at least one must be trained."
        )
    if settings.cue > 0 and len(language.in_x) >= N_PARTS:
        raise ValueError(
            f"cue is {settings.cue} with {len(language.in_x)} attributes; part k of the name tells attribute k and the "
            f"last name tells nothing, so at most {N_PARTS - 1} attributes can be given away."
        )
    sizes = {"A": settings.n_old, "B": settings.n_old, "never": settings.n_never, "new": settings.n_new}
    regions = {"A": "X", "B": "Y", "never": "X", "new": settings.new_answers}
    draws = {stream: [generator(seed, stream, i) for i in range(len(sizes))] for stream in ("names", "values")}
    phrasing_draws = [generator(seed, "phrasings", i) for i in range(len(sizes))]
    taken: set[tuple[int, ...]] = set()
    parts = {}
    for i, (name, n) in enumerate(sizes.items()):
        values = torch.stack([_values(x, regions[name], n, draws["values"][i]) for x in language.in_x], 1)
        allowed = _cue(settings, language, values, seed) if name == "new" else None
        names = _names(language.pools, n, taken, draws["names"][i], allowed)
        parts[name] = (names, values, _orders(n, language, phrasing_draws[i]))
    spoken = {name: language.sentences(names, values) for name, (names, values, _) in parts.items()}
    prompts = {name: language.prompts(names) for name, (names, _, _) in parts.items()}
    # One length for all populations, long enough for everyone's longest phrasings.
    longest = max(int(s.lengths.amax(2).sum(1).max()) for s in spoken.values())
    length = next(iter(prompts.values())).shape[1] + longest
    people = {}
    for name, (names, values, phrasings) in parts.items():
        answers = torch.stack([t[values[:, k]] for k, t in enumerate(language.first_tokens)], 1)
        own = torch.stack([x[values[:, k]] for k, x in enumerate(language.in_x)], 1)
        people[name] = People(
            names,
            values,
            answers,
            own,
            phrasings,
            prompts[name],
            spoken[name],
            settings.n_held_out,
            length,
            language.pad,
        )
    return Biographies(settings, seed, language, people["A"], people["B"], people["new"], people["never"])


def _values(in_x: Tensor, region: str, n: int, draws: torch.Generator) -> Tensor:
    allowed = {"X": in_x, "Y": ~in_x, "all": torch.ones_like(in_x)}[region].nonzero().flatten()
    return allowed[torch.randint(0, len(allowed), (n,), generator=draws)]


def _orders(n: int, language: Language, draws: torch.Generator) -> Tensor:
    return torch.rand(n, len(language.in_x), language.n_phrasings, generator=draws).argsort(2)


def _names(
    pools: Sequence[int], n: int, taken: set[tuple[int, ...]], draws: torch.Generator, allowed: list[Tensor] | None
) -> Tensor:
    """n triples that nobody has yet, [n, 3]; allowed[part] is [n, pool] bool, the names a person may have."""
    masks = allowed or [torch.ones(n, pool, dtype=torch.bool) for pool in pools]
    if n + len(taken) > 0.5 * int(np.prod([int(pool) for pool in pools])):
        raise ValueError(
            f"{n + len(taken)} people need more unlike names than pools of {tuple(pools)} give. Use larger name pools."
        )
    names = torch.full((n, len(pools)), -1)
    todo = list(range(n))
    for _ in range(1000):
        drawn = torch.stack([m[todo].double().multinomial(1, generator=draws).flatten() for m in masks], 1)
        for i, triple in zip(todo, drawn.tolist(), strict=True):
            if tuple(triple) not in taken:
                taken.add(tuple(triple))
                names[i] = torch.tensor(triple)
        todo = [i for i in todo if names[i, 0] < 0]
        if not todo:
            return names
    raise ValueError(
        f"{len(todo)} people got no name of their own: what their names tell leaves too few. Lower the cue."
    )


def _cue(settings: BiographySettings, language: Language, values: Tensor, seed: int) -> list[Tensor] | None:
    """Which names each new person may have, one [n, pool] bool for each part; None if names tell nothing."""
    if settings.cue == 0:
        return None
    draws, n = generator(seed, "cue"), len(values)
    masks = []
    for part, pool in enumerate(language.pools):
        mask = torch.ones(n, pool, dtype=torch.bool)
        if part < values.shape[1]:
            told, n_told = values[:, part], len(language.in_x[part])
            if settings.cue_kind == "region":
                told, n_told = language.in_x[part][told].long(), 2
            if pool < n_told:
                raise ValueError(f"{pool} names cannot tell {n_told} values apart. Use larger name pools.")
            tells = torch.randperm(pool, generator=draws) % n_told
            given = torch.rand(n, generator=draws) < settings.cue
            mask[given] = tells.unsqueeze(0) == told[given].unsqueeze(1)
        masks.append(mask)
    return masks
