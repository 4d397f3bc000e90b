"""How people become tokens: what a language offers, and the small study's one-token-a-word language.

In: name and value numbers. Out: prompts, and every sentence that can be said about a person.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

N_PARTS = 3
"""Parts of a name: first, middle, last."""


@dataclass(frozen=True)
class Sentences:
    """Every sentence that can be said about n people: attribute × phrasing.

    Attributes:
        tokens: [n, attributes, phrasings, longest] int32, padded at the end.
        lengths: [n, attributes, phrasings], tokens of each.
        value_at: [n, attributes, phrasings], where in the sentence the value's first token stands.
    """

    tokens: Tensor
    lengths: Tensor
    value_at: Tensor


class Language(Protocol):
    """How people become tokens."""

    n_tokens: int
    """Size of the vocabulary."""
    pad: int
    """The token that fills what is left of a sequence."""
    pools: tuple[int, ...]
    """How many first, middle and last names there are."""
    n_phrasings: int
    """Phrasings of each attribute."""
    first_tokens: tuple[Tensor, ...]
    """For each attribute, [values]: the first token of every value; no two are alike."""
    in_x: tuple[Tensor, ...]
    """For each attribute, [values] bool: whether a value belongs to region X (else Y)."""

    def prompts(self, names: Tensor) -> Tensor:
        """What every sequence of a person begins with, [n, P], from name numbers [n, 3]."""
        ...

    def sentences(self, names: Tensor, values: Tensor) -> Sentences:
        """All sentences about people with these names [n, 3] and values [n, attributes]."""
        ...


def describe_language(language: Language) -> list[object]:
    """Return what tells one language from another: its kind and its sizes."""
    return [type(language).__name__, language.n_tokens, list(language.pools), language.n_phrasings]


class TokenLanguage:
    """One token a word: BOS, three names, then for each attribute two phrasing words, the value, STOP.

    Tokens: PAD 0 (never used), BOS 1, STOP 2, the name pools, the phrasing words, the values. `words` names them all.
    """

    pad, bos, stop = 0, 1, 2

    def __init__(self, name_pool: int = 160, n_attributes: int = 2, n_values: int = 32, n_phrasings: int = 5) -> None:
        if n_values < 4 or n_values % 2:
            raise ValueError(f"n_values is {n_values}; expected an even number of at least 4 (two regions).")
        for name, given in (("name_pool", name_pool), ("n_attributes", n_attributes), ("n_phrasings", n_phrasings)):
            if given < 1:
                raise ValueError(f"{name} is {given}; expected a whole number of at least 1.")
        self.pools, self.n_phrasings = (name_pool,) * N_PARTS, n_phrasings
        self._names = 3
        self._phrases = self._names + N_PARTS * name_pool
        values = self._phrases + 2 * n_attributes * n_phrasings
        self.first_tokens = tuple(values + n_values * k + torch.arange(n_values) for k in range(n_attributes))
        self.in_x = (torch.arange(n_values) < n_values // 2,) * n_attributes
        self.n_tokens = values + n_values * n_attributes
        self.words = (
            *("<pad>", "<bos>", "<stop>"),
            *(f"{part}_{i}" for part in ("first", "middle", "last") for i in range(name_pool)),
            *(f"attribute_{k}_phrasing_{t}_{w}" for k in range(n_attributes) for t in range(n_phrasings) for w in "ab"),
            *(f"attribute_{k}_value_{v}" for k in range(n_attributes) for v in range(n_values)),
        )

    def prompts(self, names: Tensor) -> Tensor:
        """BOS and the three names, [n, 4]."""
        parts = names + self._names + self.pools[0] * torch.arange(N_PARTS)
        return torch.cat([torch.full((len(names), 1), self.bos), parts], 1)

    def sentences(self, names: Tensor, values: Tensor) -> Sentences:
        """Two phrasing words, the value, STOP: four tokens each."""
        n, k, t = len(names), len(self.first_tokens), self.n_phrasings
        tokens = torch.empty(n, k, t, 4, dtype=torch.int32)
        tokens[..., :2] = (self._phrases + torch.arange(2 * k * t)).view(k, t, 2)
        tokens[..., 2] = (self.first_tokens[0][0] + len(self.in_x[0]) * torch.arange(k) + values).unsqueeze(2)
        tokens[..., 3] = self.stop
        return Sentences(tokens, torch.full((n, k, t), 4), torch.full((n, k, t), 2))
