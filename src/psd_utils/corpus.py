"""Documents -> token ids, splits and a manifest: JSON lines, one document a line with a `text` field."""

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
import zstandard
from tqdm.auto import tqdm

from .errors import PsdError
from .files import read_json, sha256_of_json
from .paths import project_root

SPLITS = ("fit", "select", "eval")
LONGEST_CUT = 2047
# of the budget, in twentieths: FIT is its first half, of which the leading 90 % is `fit` and the rest `select`
_SPLIT_ENDS = (9, 10, 20)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


# one for each thing on which split rules differ: spaces, digits, contractions, case, scripts, emoji, code, line ends
GOLDEN_STRINGS = (
    "a",
    "The quick brown fox jumps over the lazy dog.",
    " leading and trailing ",
    "two  spaces,   three,    four",
    "line one\nline two\n\nline four\n",
    "\ttab\tseparated\r\nwindows line",
    "1234567890 12,345.67 3.14159e-10",
    "year 1999, 2026; room 007",
    "I'm, you're, she'll, they'd, we've, it's, can't, O'Brien",
    "I'M YOU'RE DON'T",
    "camelCase snake_case SCREAMING_CASE kebab-case",
    "naïve café Ångström Œuvre ß ﬁ",
    "Ελληνικά, русский, עברית, العربية",
    "中文没有空格。日本語のテキスト、한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤷🏽 ∑∫√∞≈ €£¥",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment",
    '<p class="x">&amp;</p> <|endoftext|> <s> [INST]',
    "https://example.org/a?b=c&d=%20e#f user@example.org",
    '!!! ??? ... --- *** ((())) "quoted" ‘curly’ “curly”',
    "pneumonoultramicroscopicsilicovolcanoconiosis aaaaaaaaaaaaaaaaaaaaaaaa",
)


@dataclass(frozen=True)
class Document:
    """One line of a text file: `key` is file:line:sha256[:12]."""

    key: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The tokens to score. Document d is `tokens[offsets[d]:offsets[d + 1]]`, int64; `keys[d]` names it.

    `split_ends` are the documents at which fit, select and eval end. `n_empty` documents had no tokens, `n_cut`
    were longer than `cut` tokens.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    keys: tuple[str, ...]
    split_ends: tuple[int, int, int]
    prefix_id: int
    cut: int
    n_empty: int
    n_cut: int

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each document, int64 [documents]."""
        return self.offsets.diff()

    def documents(self, split: str) -> range:
        """Return the documents of a split, in file order."""
        if split not in SPLITS:
            raise PsdError(f"no split {split!r}: {', '.join(SPLITS)}")
        i = SPLITS.index(split)
        return range(0 if i == 0 else self.split_ends[i - 1], self.split_ends[i])

    def split_of(self, document: int) -> str:
        """Return the split of a document."""
        return next(split for split, end in zip(SPLITS, self.split_ends, strict=True) if document < end)

    @property
    def manifest(self) -> dict[str, Any]:
        """What was scored: sizes, cut, prefix, splits, and a sha256 over ids and document keys."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        digest.update(self.offsets.numpy().tobytes())
        return {
            "n_documents": len(self.keys),
            "n_tokens": int(self.tokens.numel()),
            "n_empty": self.n_empty,
            "n_cut": self.n_cut,
            "cut": self.cut,
            "prefix_id": self.prefix_id,
            "split_ends": list(self.split_ends),
            "sha256": sha256_of_json([digest.hexdigest(), list(self.keys), list(self.split_ends)]),
        }


def read_documents(path: str | Path) -> Iterator[Document]:
    """Yield the documents of a JSON-lines file: plain, gzip or zstd (.zst, .zstd), local or hf://.

    Blank lines are no documents. Half of a surrogate pair, which no tokenizer takes, is read as U+FFFD.

    Raises:
        PsdError: the file is missing, cut off, not JSON lines, or a line has no `text`; it names file and line.
    """
    path = str(path)
    name = path.rsplit("/", 1)[-1]
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PsdError(
                f"{path}, line {number}: not a JSON object ({error}); is the file cut off, or compressed without the "
                "suffix that says so?"
            ) from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = f"a {type(row).__name__}"
            if isinstance(row, dict):
                found = f"`text` of type {type(text).__name__}" if "text" in row else f"the keys {sorted(row)}"
            raise PsdError(f"{path}, line {number}: expected an object with a `text` string, found {found}")
        text = _LONE_SURROGATE.sub("\ufffd", text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        yield Document(f"{name}:{number}:{digest[:12]}", text)
    if number == 0:
        raise PsdError(f"{path} is empty: expected one JSON object with a `text` field a line")


def _lines(path: str) -> Iterator[bytes]:
    read = 0
    try:
        # fsspec would take "::" and other marks in a local name for its own
        with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as raw:
            for line in _decompressed(path, raw):
                read += 1
                yield line
    except FileNotFoundError as error:
        raise PsdError(f"no text at {path}") from error
    except IsADirectoryError as error:
        raise PsdError(f"{path} is a folder; give a JSON-lines file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise PsdError(f"{path} is cut off or not what its suffix says, after line {read}: {error}") from error
    except Exception as error:  # what a remote file system raises depends on the protocol
        raise PsdError(f"{path} could not be read, after line {read}: {error}") from error


def _decompressed(path: str, raw: BinaryIO) -> Iterator[bytes]:
    if path.endswith((".zst", ".zstd")):
        yield from io.BufferedReader(_ZstdFrames(raw), 1 << 20)
    elif path.endswith(".gz"):
        with gzip.open(raw) as lines:
            yield from lines
    else:
        yield from raw


class _ZstdFrames(io.RawIOBase):
    """Every zstd frame of a file, one after another; a frame that ends early is an error, not an end of file.

    zstandard's own stream reader ends silently where a file is cut in mid-frame.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: Any = None
        self._pending = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._pending or self._raw.read(1 << 18)
            self._pending = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._output = self._frame.decompress(data)
            if self._frame.eof:
                self._pending, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def load_corpus(
    source: str | Path, tokenizer: Any, *, n_tokens: int, cut: int = LONGEST_CUT, prefix_id: int | None = None
) -> Corpus:
    """Return the corpus of the first documents of a text that hold `n_tokens` tokens, or all it holds.

    Whole documents in file order, each cut to its first `cut` tokens, tokenized without added special tokens. The
    budget is `n_tokens` or what the text holds, whichever is less; `split_ends` says how it is shared out.

    Raises:
        PsdError: the text is unusable, or has too few documents for three splits.
    """
    if prefix_id is None:
        prefix_id = prefix_token(tokenizer)
    pieces: list[torch.Tensor] = []
    keys: list[str] = []
    total, n_empty, n_cut = 0, 0, 0
    with tqdm(total=n_tokens, unit="token", desc="tokenize", leave=False) as progress:
        for document in read_documents(source):
            ids = encode(tokenizer, document.text)
            if not ids:
                n_empty += 1
                continue
            n_cut += len(ids) > cut
            pieces.append(torch.tensor(ids[:cut], dtype=torch.int64))
            keys.append(document.key)
            total += len(pieces[-1])
            progress.update(len(pieces[-1]))
            if total >= n_tokens:
                break
    if not keys:
        raise PsdError(f"{source} holds no document with any token ({n_empty} empty ones)")
    lengths = [len(p) for p in pieces]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ends = split_ends(lengths, n_tokens)
    counts = [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
    if min(counts) < 1:
        found = ", ".join(f"{split} {count}" for split, count in zip(SPLITS, counts, strict=True))
        raise PsdError(
            f"{source}: {len(keys)} documents with {total} tokens do not make three splits (documents: {found}); "
            "give a text with more documents, or raise n_tokens"
        )
    return Corpus(torch.cat(pieces), offsets, tuple(keys), ends, prefix_id, cut, n_empty, n_cut)


def split_ends(lengths: Sequence[int], n_tokens: int) -> tuple[int, int, int]:
    """Return the documents at which fit, select and eval end, for documents of these lengths in file order.

    Of the budget, min(n_tokens, Σ lengths), a document is in `fit` if it starts in the first 45 %, in `select` if it
    starts up to 50 %, in `eval` if it starts before its end. Integers, so that no rounding moves a document.
    """
    starts = [0, *accumulate(lengths)][:-1]
    budget = min(n_tokens, sum(lengths))
    fit, select, end = (sum(20 * start < share * budget for start in starts) for share in _SPLIT_ENDS)
    return fit, select, end


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without added special tokens and without warnings about its length."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def prefix_token(tokenizer: Any) -> int:
    """Return the id that precedes every document: BOS, else EOS.

    Raises:
        PsdError: the tokenizer has neither.
    """
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    raise PsdError(
        "the base tokenizer has neither a BOS nor an EOS token, and every document is read after one token: "
        "set bos_token in its tokenizer_config.json"
    )


def golden_file(family: str) -> Path:
    """Return where the golden ids of a tokenizer family lie, data/golden/<family>.json."""
    name = re.sub("[^a-z0-9.]+", "-", family.lower()).strip("-.")
    return project_root() / "data" / "golden" / f"{name}.json"


def golden_ids(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the golden strings with the ids that a tokenizer gives them."""
    return [{"text": text, "ids": encode(tokenizer, text)} for text in GOLDEN_STRINGS]


def check_golden_ids(label: str, family: str, tokenizer: Any) -> None:
    """Check a tokenizer against the ids recorded for its family; a family without a record passes.

    A library that splits text by another rule changes the ids, and so every loss, without any error.

    Raises:
        PsdError: naming the first string that gets other ids, with both.
    """
    path = golden_file(family)
    if not family or not path.is_file():
        return
    for row in read_json(path)["strings"]:
        found = encode(tokenizer, row["text"])
        if found != row["ids"]:
            raise PsdError(
                f"{label}: {row['text']!r} gets the ids {found}, {path} says {row['ids']}; the tokenizer, or the "
                "library that reads it, splits text differently from when this family was recorded"
            )


def special_ids(tokenizer: Any) -> torch.Tensor:
    """Return the special token ids, int64 ascending: all_special_ids and added tokens flagged special."""
    added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return torch.tensor(sorted(set(tokenizer.all_special_ids) | added), dtype=torch.int64)


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return a hash of everything in a tokenizer that decides which ids a text gets, and which are special."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else sorted(tokenizer.get_vocab().items())
    if isinstance(rules, dict):
        # saved truncation and padding settings are the caller's, not the tokenizer's
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    return sha256_of_json([rules, special_ids(tokenizer).tolist(), tokenizer.bos_token_id, tokenizer.eos_token_id])


def check_same_ids(corpus: Corpus, source: str | Path, base: Any, derived: Any) -> None:
    """Check that both members' tokenizers give the corpus the same ids.

    Raises:
        PsdError: naming the first document that differs, with both id sequences where they part.
    """
    if tokenizer_sha256(base) == tokenizer_sha256(derived):
        return
    known = {key: d for d, key in enumerate(corpus.keys)}
    for document in read_documents(source):
        if document.key not in known:
            continue
        d = known.pop(document.key)
        expected = corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]].tolist()
        found = encode(derived, document.text)[: corpus.cut]
        if found != expected:
            at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
            at = min(len(expected), len(found)) if at is None else at
            raise PsdError(
                f"the members' tokenizers split {document.key} differently from token {at}: the base gives "
                f"{expected[at : at + 5]}, the derived model {found[at : at + 5]}; both must read identical ids"
            )
        if not known:
            break
