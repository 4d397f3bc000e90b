"""A scored model on disk: final hidden states, per-token losses, the head and the corpus, with a manifest.

data/captures/<key>/
    head.safetensors            weight [rows, width]; bias [rows] where the head has one
    corpus.safetensors          tokens, offsets; keys and splits in the header
    hidden-00000.safetensors …  hidden [tokens, width], nll float32 [tokens]: a shard of documents of one split
    manifest.json               written last: what was scored, and the sha256 of every file
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .corpus import SPLITS, Corpus
from .errors import PsdError
from .files import read_json, read_tensors, sha256_of_file, sha256_of_json, write_json, write_tensors
from .kernels import Readout

FORMAT = 2
SHARD_TOKENS = 16_384


@dataclass(frozen=True)
class Shard:
    """A run of whole documents of one split, scored and stored together."""

    index: int
    documents: range

    @property
    def file(self) -> str:
        """The shard's file name."""
        return f"hidden-{self.index:05d}.safetensors"


def plan_shards(corpus: Corpus, shard_tokens: int = SHARD_TOKENS) -> list[Shard]:
    """Return the shards of a corpus: documents in order, about `shard_tokens` tokens each, never across splits."""
    shards: list[Shard] = []
    lengths = corpus.lengths.tolist()
    for split in SPLITS:
        start, size = corpus.documents(split).start, 0
        for d in corpus.documents(split):
            size += lengths[d]
            if size >= shard_tokens or d + 1 == corpus.documents(split).stop:
                shards.append(Shard(len(shards), range(start, d + 1)))
                start, size = d + 1, 0
    return shards


@dataclass(frozen=True)
class TextStates:
    """One split as an output layer sees it: `hidden` [N, width], `targets` int64 [N], `lengths` int64 [documents]."""

    hidden: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor
    keys: tuple[str, ...]

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return sums over each document, float64 [..., documents], of values [..., N]."""
        index = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        sums = torch.zeros(*values.shape[:-1], len(self.lengths), dtype=torch.float64)
        return sums.index_add_(-1, index, values.double().cpu())


@dataclass(frozen=True)
class Capture:
    """A complete capture. `manifest` holds what was scored, `corpus` its tokens."""

    folder: Path
    manifest: dict[str, Any]
    corpus: Corpus

    @property
    def key(self) -> str:
        """The folder's name: a hash of everything that can change a number."""
        return self.folder.name

    def head(self) -> tuple[torch.Tensor, Readout]:
        """Return the output head [rows, width] and what lies between product and logits."""
        tensors, _ = _read(self.folder / "head.safetensors")
        settings = self.manifest["readout"]
        return tensors["weight"], Readout(
            bias=tensors.get("bias"), scale=settings["scale"], softcap=settings["softcap"]
        )

    def states(self, split: str) -> TextStates:
        """Return hidden states and targets of a split, in document order."""
        documents = self.corpus.documents(split)
        shards = [s for s in plan_shards(self.corpus, self.manifest["shard_tokens"]) if s.documents[0] in documents]
        hidden = torch.cat([read_shard(self.folder, s)["hidden"] for s in shards])
        start, stop = int(self.corpus.offsets[documents.start]), int(self.corpus.offsets[documents.stop])
        return TextStates(
            hidden,
            self.corpus.tokens[start:stop],
            self.corpus.lengths[documents.start : documents.stop],
            self.corpus.keys[documents.start : documents.stop],
        )

    def nll(self) -> torch.Tensor:
        """Return the uncorrected loss of every token of the corpus, nats, float32."""
        shards = plan_shards(self.corpus, self.manifest["shard_tokens"])
        return torch.cat([read_shard(self.folder, s)["nll"] for s in shards])


def capture_key(identity: dict[str, Any]) -> str:
    """Return the folder name for what was scored: 24 hex digits of a hash over it and the format."""
    return sha256_of_json({"format": FORMAT, **identity})[:24]


def open_capture(folder: Path) -> Capture | None:
    """Return the complete capture in `folder`, or None if it is absent or unfinished.

    Raises:
        PsdError: the manifest is of another format, or a file it names is missing or has another size.
    """
    if not (folder / "manifest.json").is_file():
        return None
    manifest = read_json(folder / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise PsdError(f"{folder} has capture format {manifest.get('format')}, this version reads {FORMAT}")
    digest = manifest.pop("manifest_sha256", None)
    if digest != sha256_of_json(manifest):
        raise PsdError(f"{folder / 'manifest.json'} is damaged; delete it and score again: nothing whole is made anew")
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["bytes"]:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            raise PsdError(
                f"capture {folder}: {name} is damaged ({found}, the manifest says {facts['bytes']} bytes); "
                "delete that file and manifest.json, and score again: only that part is made anew"
            )
    return Capture(folder, manifest, read_corpus(folder / "corpus.safetensors"))


def verify(capture: Capture) -> list[str]:
    """Return the names of files whose bytes no longer hash to what the manifest says."""
    return [
        name
        for name, facts in capture.manifest["files"].items()
        if not (capture.folder / name).is_file() or sha256_of_file(capture.folder / name) != facts["sha256"]
    ]


def write_manifest(folder: Path, identity: dict[str, Any], facts: dict[str, Any], corpus: Corpus, shards: int) -> None:
    """Hash every file and write manifest.json, which makes the capture complete."""
    names = ["corpus.safetensors", "head.safetensors", *(Shard(i, range(0)).file for i in range(shards))]
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of_file(folder / name)} for name in names}
    manifest = {"format": FORMAT, "identity": identity, **facts, "corpus": corpus.manifest, "files": files}
    write_json(folder / "manifest.json", manifest | {"manifest_sha256": sha256_of_json(manifest)})


def write_corpus(path: Path, corpus: Corpus) -> None:
    """Write a corpus: ids and offsets as tensors, the rest in the header."""
    note = {
        "keys": list(corpus.keys),
        "split_ends": list(corpus.split_ends),
        "prefix_id": corpus.prefix_id,
        "cut": corpus.cut,
        "n_empty": corpus.n_empty,
        "n_cut": corpus.n_cut,
    }
    write_tensors(path, {"tokens": corpus.tokens, "offsets": corpus.offsets}, note)


def read_corpus(path: Path) -> Corpus:
    """Return the corpus written at `path`."""
    tensors, note = _read(path)
    a, b, c = note.pop("split_ends")
    keys = tuple(note.pop("keys"))
    return Corpus(tensors["tokens"], tensors["offsets"], keys, (a, b, c), **note)


def read_shard(folder: Path, shard: Shard) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard: `hidden` and `nll`.

    Raises:
        PsdError: the file is damaged; it names the file.
    """
    return _read(folder / shard.file)[0]


def shard_is_complete(folder: Path, shard: Shard, n_tokens: int, width: int) -> bool:
    """Return whether a shard of an unfinished capture is there, undamaged and of the right shape."""
    try:
        tensors, _ = read_tensors(folder / shard.file)
    except PsdError:
        return False
    return list(tensors["hidden"].shape) == [n_tokens, width]


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        return read_tensors(path)
    except PsdError as error:
        raise PsdError(
            f"{error}; delete manifest.json beside it and score again: only what is damaged is made anew"
        ) from error
