"""Tokenizer and text -> a table of tokens: what each is as text, of which class, and how often it is a target."""

from typing import Any

import pandas as pd
import torch

CLASSES = (
    "word, capitalised",
    "word, lower case",
    "inside a word",
    "number",
    "punctuation",
    "line break",
    "space",
    "part of a character",
    "special",
)
"""The classes of tokens, in the order in which they are shown."""

_WORD_STARTS = ("Ġ", "▁")  # how byte-level and sentencepiece vocabularies write a leading space


def token_table(tokenizer: Any, targets: torch.Tensor, special: torch.Tensor) -> pd.DataFrame:
    """Return a row per id of the tokenizer, in order of ids: `id, token, token_class, count`.

    `token` is the decoded text in quotes, `token_class` one of `CLASSES`, `count` how often the id occurs among
    `targets` (int64, any shape).
    """
    length = len(tokenizer)
    ids = list(range(length))
    raw = tokenizer.convert_ids_to_tokens(ids)
    texts = [tokenizer.decode([i]) for i in ids]
    classes = [token_class(text, starts_word(own)) for text, own in zip(texts, raw, strict=True)]
    for i in special[special < length].tolist():
        classes[i] = "special"
    counts = torch.bincount(targets.reshape(-1), minlength=length)[:length].tolist()
    shown = [repr(text) for text in texts]
    return pd.DataFrame({"id": ids, "token": shown, "token_class": classes, "count": counts})


def starts_word(raw: str | None) -> bool:
    """Return whether a vocabulary's own way of writing a token says that a space stands before it."""
    return raw is not None and raw.startswith(_WORD_STARTS)


def token_class(text: str, after_space: bool) -> str:
    """Return which of `CLASSES` a decoded token belongs to (never "special", which its text does not tell).

    `after_space` says that the token begins with a space, which a decoded text may have lost.
    """
    stripped = text.strip()
    if not stripped:
        return "line break" if "\n" in text or "\r" in text else "space"
    if "\ufffd" in stripped:
        return "part of a character"
    if any(c.isdigit() for c in stripped):
        return "number"
    if not any(c.isalpha() for c in stripped):
        return "punctuation"
    if stripped[0].isupper():
        return "word, capitalised"
    return "word, lower case" if after_space or text[0].isspace() else "inside a word"
