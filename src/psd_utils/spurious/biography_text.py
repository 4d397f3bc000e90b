"""Biographies in English: six attributes with real value lists, 25 phrasings each, in BPE tokens.

In: the word lists in data/spurious/biographies. Out: a language for biographies.make_biographies.

Every sentence holds the full name and the value. A byte-level BPE is trained on the lists themselves; birth years are
tokens of their own. A value stays in its list only if no value before it begins with the same token, so that the first
token names the answer. Regions X and Y are halves of every list, permuted with one seed, separately for the two city
attributes. Source: Palit et al. (2026), data of the transformer; the words are this repository's own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from psd_utils.spurious.acceptance import data_folder
from psd_utils.spurious.biography_language import Sentences

ATTRIBUTES = {
    "birth_year": "birth_year",
    "birth_city": "city",
    "university": "university",
    "major": "major",
    "company": "company",
    "work_city": "city",
}
"""Attribute -> list of its values."""
YEARS = range(1800, 2021)
PAD, BOS = "<pad>", "<bos>"
REGION_SEED = 7


@dataclass(frozen=True)
class Words:
    """The word lists.

    Attributes:
        names: first, middle and last names.
        values: list -> its values.
        phrasings: attribute -> its sentences, with {name} and {value}.
    """

    names: tuple[tuple[str, ...], ...]
    values: dict[str, tuple[str, ...]]
    phrasings: dict[str, tuple[str, ...]]


def load_words(folder: Path | None = None) -> Words:
    """Read names.yaml, values.yaml and phrasings.yaml; None stands for the repository's own.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: an attribute without phrasings, a phrasing without {name} or {value}, or a word that is there twice.
    """
    folder = folder or data_folder() / "biographies"
    names, values, phrasings = (
        yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in ("names", "values", "phrasings")
    )
    pools = tuple(tuple(names[part].split()) for part in ("first", "middle", "last"))
    lists = {name: tuple(v.strip() for v in text.split(",")) for name, text in values.items()}
    lists["birth_year"] = tuple(str(year) for year in YEARS)
    for where, words in [*zip(("first", "middle", "last"), pools, strict=True), *lists.items()]:
        twice = {word for word in words if words.count(word) > 1}
        if twice:
            raise ValueError(f"{where} holds {sorted(twice)[:3]} more than once. Leave each word in once.")
    for attribute in ATTRIBUTES:
        said = phrasings.get(attribute, [])
        wrong = [p for p in said if p.count("{name}") != 1 or p.count("{value}") != 1]
        if wrong or len(said) < 2:
            found = wrong[0] if wrong else f"{len(said)} phrasings"
            raise ValueError(f"{attribute}: {found!r}; expected at least two, each with {{name}} and {{value}} once.")
    return Words(pools, lists, {name: tuple(phrasings[name]) for name in ATTRIBUTES})


def train_tokenizer(words: Words, n_tokens: int = 2141) -> Tokenizer:
    """A byte-level BPE of at most n_tokens, trained on the lists; PAD is 0, BOS is 1, every birth year one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    years = [AddedToken(f" {year}", normalized=False) for year in words.values["birth_year"]]
    # Values and names a few times each, phrasings for their words: what is said often gets tokens of its own.
    other = [f" {v}" for name, values in words.values.items() if name != "birth_year" for v in values]
    people = [f" {n}" for pool in words.names for n in pool]
    said = [re.sub(r" ?\{\w+\}", "", f" {p}") for phrasings in words.phrasings.values() for p in phrasings]
    alphabet = sorted({letter for text in (*other, *people, *said) for letter in text})
    letters = [
        token for token, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("".join(alphabet))
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens - len(years),
        special_tokens=[PAD, BOS],
        initial_alphabet=sorted(set("".join(letters))),
        show_progress=False,
    )
    tokenizer.train_from_iterator(4 * other + 2 * people + said, trainer)
    tokenizer.add_tokens(years)
    return tokenizer


class TextLanguage:
    """English sentences in BPE tokens; a Language of biography_language."""

    def __init__(self, words: Words | None = None, n_tokens: int = 2141, n_phrasings: int = 25) -> None:
        self.words = words or load_words()
        fewest = min(len(p) for p in self.words.phrasings.values())
        if not 1 <= n_phrasings <= fewest:
            raise ValueError(f"n_phrasings is {n_phrasings}; expected 1 … {fewest}, as many as are written.")
        self.tokenizer = train_tokenizer(self.words, n_tokens)
        self.n_tokens, self.pad, self.n_phrasings = self.tokenizer.get_vocab_size(), 0, n_phrasings
        self.pools = tuple(len(pool) for pool in self.words.names)
        kept = {name: self._distinct(values) for name, values in self.words.values.items()}
        self.values = tuple(kept[name] for name in ATTRIBUTES.values())
        """For each attribute, the values that were kept."""
        self.first_tokens = tuple(torch.tensor([self._encode(v)[0] for v in values]) for values in self.values)
        draws = np.random.default_rng(REGION_SEED)
        self.in_x = tuple(self._half(len(values), draws) for values in self.values)
        self._pieces = [[_cut(p) for p in self.words.phrasings[attribute][:n_phrasings]] for attribute in ATTRIBUTES]

    def name(self, numbers: Sequence[int]) -> str:
        """A full name."""
        return " ".join(pool[int(i)] for pool, i in zip(self.words.names, numbers, strict=True))

    def prompts(self, names: Tensor) -> Tensor:
        """BOS and the name, padded to the longest name that the pools allow, [n, P]."""
        longest = sum(max(len(self._encode(word)) for word in pool) for pool in self.words.names)
        out = torch.full((len(names), 1 + longest), self.pad)
        for row, numbers in zip(out, names.tolist(), strict=True):
            tokens = [1, *self._encode(self.name(numbers))]
            row[: len(tokens)] = torch.tensor(tokens)
        return out

    def sentences(self, names: Tensor, values: Tensor) -> Sentences:
        """All sentences about these people. Pieces are encoded alone: every one begins at a space or at punctuation,
        where the tokenizer cuts anyway, so the tokens are those of the whole sentence.
        """
        said: list[list[int]] = []
        value_at: list[int] = []
        for person, owned in zip(names.tolist(), values.tolist(), strict=True):
            name = self._encode(self.name(person))
            for k, v in enumerate(owned):
                value = self._encode(self.values[k][v])
                for pieces in self._pieces[k]:
                    tokens: list[int] = []
                    for piece in pieces:
                        if piece == "{value}":
                            value_at.append(len(tokens))
                        tokens += {"{name}": name, "{value}": value}.get(piece) or self._encode_piece(piece)
                    said.append(tokens)
        longest = max(len(tokens) for tokens in said)
        padded = np.full((len(said), longest), self.pad, np.int32)
        for row, tokens in zip(padded, said, strict=True):
            row[: len(tokens)] = tokens
        shape = (len(names), len(self.values), self.n_phrasings)
        lengths = torch.tensor([len(tokens) for tokens in said])
        return Sentences(
            torch.from_numpy(padded).view(*shape, longest), lengths.view(shape), torch.tensor(value_at).view(shape)
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._encode_piece(f" {text}")

    @lru_cache(maxsize=20_000)  # noqa: B019 (a language lives as long as its study)
    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(piece, add_special_tokens=False).ids)

    def _distinct(self, values: Sequence[str]) -> tuple[str, ...]:
        """The values whose first token no earlier one begins with."""
        seen: set[int] = set()
        kept = []
        for value in values:
            first = self._encode(value)[0]
            if first not in seen:
                seen.add(first)
                kept.append(value)
        return tuple(kept)

    @staticmethod
    def _half(n: int, draws: np.random.Generator) -> Tensor:
        in_x = torch.zeros(n, dtype=torch.bool)
        in_x[torch.from_numpy(draws.permutation(n)[: n // 2])] = True
        return in_x


def _cut(phrasing: str) -> tuple[str, ...]:
    """A phrasing in pieces; name and value take the space before them along."""
    parts = re.split(r" (\{name\}|\{value\})", f" {phrasing}")
    return tuple(part for part in parts if part)
