"""Model × corpus -> Capture: one forward pass over every document, resumable shard by shard."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from .batching import batches
from .capture import (
    SHARD_TOKENS,
    Capture,
    Shard,
    capture_key,
    open_capture,
    plan_shards,
    shard_is_complete,
    write_corpus,
    write_manifest,
)
from .corpus import (
    LONGEST_CUT,
    Corpus,
    check_golden_ids,
    check_same_ids,
    load_corpus,
    prefix_token,
    special_ids,
    tokenizer_sha256,
)
from .devices import Device
from .errors import PsdError
from .files import write_tensors
from .kernels import corrected_losses
from .models import load_model
from .output_layer import LoadedModel
from .pairs import ModelFacts, Pair, resolve_text
from .sources import Source, check_facts, load_config, load_tokenizer, locate, longest_context, widths_of
from .storage import check_room, scoring_needs

_LOG = logging.getLogger(__name__)
_BATCH_TOKENS = {"cpu": 1024, "cuda": 32_768}


@dataclass(frozen=True)
class Crew:
    """The processes that score one capture together; by default, this one alone.

    The leader holds the capture's lock and writes what is not a shard; `deal` gives each process its own shards, and
    `wait` returns when every process has called it.
    """

    leader: bool = True
    deal: Callable[[list[Shard]], list[Shard]] = list
    wait: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class ScoringTask:
    """What both members of a pair read, and where their files lie.

    `notes` are sentences for the summary, such as a derived model without a tokenizer of its own.
    """

    base: Source
    derived: Source
    corpus: Corpus
    tokenizer: Any
    tokenizer_hash: str
    special: torch.Tensor
    notes: tuple[str, ...]

    @property
    def tokenizer_length(self) -> int:
        """The number of ids the base's tokenizer knows; head rows beyond it are padding."""
        return len(self.tokenizer)

    def source(self, role: str) -> Source:
        """Return the files of "base" or "derived"."""
        return self.base if role == "base" else self.derived


def prepare(pair: Pair, text: str | None, n_tokens: int) -> ScoringTask:
    """Locate both members, tokenize the text with the base's tokenizer and check that both would read the same ids.

    Raises:
        PsdError: files, text or tokenizers that cannot be used; each says which and why.
    """
    source = resolve_text(pair, text)
    base, derived = locate(pair.base), locate(pair.derived)
    tokenizer = load_tokenizer(base)
    if tokenizer is None:
        raise PsdError(f"the base {pair.base.label} has no tokenizer files (tokenizer.json)")
    configs = [load_config(s) for s in (base, derived)]
    contexts = [c for c in map(longest_context, configs) if c is not None]
    check_golden_ids(f"tokenizer of {pair.base.label}", pair.family, tokenizer)
    # prefix and document fit the shorter context together, as 1 + 2,047 tokens fit 2,048
    cut = min([LONGEST_CUT, *(c - 1 for c in contexts)])
    prefix = prefix_token(tokenizer)
    found = ModelFacts(tokenizer_length=len(tokenizer), prefix_id=prefix)
    check_facts(f"tokenizer of {pair.base.label}", pair.facts, found)
    check_facts(f"configuration of {pair.base.label}", pair.facts, widths_of(configs[0]))
    rows = [getattr(config, "vocab_size", None) for config in configs]
    for member, n in zip((pair.base, pair.derived), rows, strict=True):
        if n is not None:
            _check_rows(member.label, n, len(tokenizer))
    notes = []
    if None not in rows and rows[0] != rows[1]:
        notes.append(f"the base's head has {rows[0]} rows, the derived model's {rows[1]}: each keeps its own softmax")
    corpus = load_corpus(source, tokenizer, n_tokens=n_tokens, cut=cut, prefix_id=prefix)
    derived_tokenizer = load_tokenizer(derived)
    if derived_tokenizer is None:
        notes.append(f"{pair.derived.label} has no tokenizer of its own: the base's was used")
    else:
        check_same_ids(corpus, source, tokenizer, derived_tokenizer)
    special = special_ids(tokenizer)
    return ScoringTask(base, derived, corpus, tokenizer, tokenizer_sha256(tokenizer), special, tuple(notes))


def _check_rows(label: str, rows: int, tokenizer_length: int) -> None:
    if rows < tokenizer_length:
        raise PsdError(
            f"{label}: the head has {rows} rows, too few for the {tokenizer_length} ids of the base's tokenizer"
        )


def capture_identity(task: ScoringTask, role: str, device: Device) -> dict[str, Any]:
    """Return everything that can change a number of a member's capture; `capture_key` hashes it."""
    corpus = task.corpus
    return {
        "model": task.source(role).identity,
        "dtype": device.dtype_name,
        "tokenizer": task.tokenizer_hash,
        "corpus": corpus.manifest["sha256"],
        "cut": corpus.cut,
        "prefix_id": corpus.prefix_id,
        "shard_tokens": SHARD_TOKENS,
    }


def score_member(
    task: ScoringTask,
    role: str,
    device: Device,
    folder: Path,
    facts: ModelFacts | None = None,
    crew: Crew | None = None,
) -> Capture:
    """Return the capture of the "base" or "derived" member, scoring what `folder` (of captures) does not hold yet.

    A killed run resumes at its last whole shard and ends with the same bytes. Two runs on one capture take turns, by
    a lock that the operating system releases when a process dies; the processes of one `crew` share the work.

    Raises:
        PsdError: the model cannot be loaded or reproduced, its head is too short, or a state is not finite.
    """
    source, identity = task.source(role), capture_identity(task, role, device)
    crew = crew or Crew()
    key = capture_key(identity)
    target = folder / key
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / key) if crew.leader else nullcontext():
        if crew.leader and open_capture(target) is None:
            _make_room(task, source, device, target)
        crew.wait()  # the leader has the lock, and nothing is written before all have seen what is there
        done = open_capture(target)
        crew.wait()
        if done is not None:
            _LOG.info("%s: capture %s is there", source.member.label, target)
            return done
        _score(task, source, device, target, identity, facts or ModelFacts(), crew)
        crew.wait()
    done = open_capture(target)
    if done is None:
        raise PsdError(f"capture {target} vanished while it was being written")
    return done


def _make_room(task: ScoringTask, source: Source, device: Device, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.glob(".*.tmp"):
        leftover.unlink()
    needs = scoring_needs(task.corpus, source, device, load_config(source))
    if needs is not None:
        check_room(source.member.label, needs, target, device)


def _score(
    task: ScoringTask,
    source: Source,
    device: Device,
    target: Path,
    identity: dict[str, Any],
    facts: ModelFacts,
    crew: Crew,
) -> None:
    corpus = task.corpus
    shards = plan_shards(corpus, SHARD_TOKENS)
    model = load_model(source, device)
    rows, width = model.head.shape
    label = source.member.label
    check_facts(label, facts, ModelFacts(head_rows=rows, tied=model.tied))
    _check_rows(label, rows, task.tokenizer_length)
    beyond = (corpus.tokens >= rows).nonzero()
    if beyond.numel():
        at = int(beyond[0])
        raise PsdError(
            f"token id {int(corpus.tokens[at])} at {_place(corpus, at)} is beyond the head of {label}, {rows} rows"
        )
    bad = (~_finite_rows(model.head)).nonzero()
    if bad.numel():
        raise PsdError(f"{label}: row {int(bad[0])} of the output head is NaN or infinite; {_advice(device)}")
    if crew.leader:
        write_corpus(target / "corpus.safetensors", corpus)
        head = {"weight": model.head}
        if model.readout.bias is not None:
            head["bias"] = model.readout.bias
        write_tensors(target / "head.safetensors", head)
    tokens = {s.index: int(corpus.offsets[s.documents.stop] - corpus.offsets[s.documents.start]) for s in shards}
    own = crew.deal(shards)
    total = sum(tokens[shard.index] for shard in own)
    with tqdm(total=total, unit="token", desc=f"score {source.member.leaf}") as progress:
        for shard in own:
            n = tokens[shard.index]
            if not shard_is_complete(target, shard, n, width):
                write_tensors(target / shard.file, _score_shard(model, corpus, shard, device))
            progress.update(n)
    crew.wait()  # the manifest names every shard
    if not crew.leader:
        return
    facts_found = {
        "label": label,
        "architecture": type(model.backbone).__name__,
        "readout": {"scale": model.readout.scale, "softcap": model.readout.softcap},
        "tied": model.tied,
        "stored_dtype": model.stored_dtype,
        "tokenizer_length": task.tokenizer_length,
        "shard_tokens": SHARD_TOKENS,
        "device": device.device.type,
    }
    write_manifest(target, identity, facts_found, corpus, len(shards))


def _score_shard(model: LoadedModel, corpus: Corpus, shard: Shard, device: Device) -> dict[str, torch.Tensor]:
    """Return `hidden` [tokens, width] in the compute dtype and `nll` float32 [tokens], in document order."""
    lengths, offsets = corpus.lengths.tolist(), corpus.offsets.tolist()
    first = offsets[shard.documents.start]
    n = offsets[shard.documents.stop] - first
    hidden = torch.empty(n, model.head.shape[1], dtype=model.head.dtype)
    for batch in batches(shard.documents, lengths, _BATCH_TOKENS.get(device.device.type, 32_768)):
        states = batch_states(model, corpus, batch, device.device)
        for row, d in enumerate(batch):
            start = offsets[d] - first
            hidden[start : start + lengths[d]] = states[row, : lengths[d]]
    _check_finite("hidden state", _finite_rows(hidden), corpus, first, device)
    targets = corpus.tokens[first : first + n]
    nll = corrected_losses(hidden, model.head, targets, [None], readout=model.readout)[0].float()
    _check_finite("loss", torch.isfinite(nll), corpus, first, device)
    return {"hidden": hidden, "nll": nll}


def _finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return which rows of a matrix are finite, without a second one of its size."""
    return torch.cat([torch.isfinite(piece).all(dim=1) for piece in values.split(4096)])


def _check_finite(what: str, finite: torch.Tensor, corpus: Corpus, first: int, device: Device) -> None:
    bad = (~finite).nonzero()
    if bad.numel():
        place = _place(corpus, int(bad[0]) + first)
        raise PsdError(f"the {what} at {place} is NaN or infinite; {_advice(device)}")


def _place(corpus: Corpus, at: int) -> str:
    """Return token `at` of the corpus in words: its place in its document, from 0, and the document's key."""
    d = int((corpus.offsets <= at).sum()) - 1
    return f"token {at - int(corpus.offsets[d])} of document {corpus.keys[d]}"


def _advice(device: Device) -> str:
    if device.dtype == torch.float32:
        return "the stored weights may be damaged"
    return f"try dtype float32 (now {device.dtype_name}), unless the stored weights are damaged"


def batch_states(model: LoadedModel, corpus: Corpus, batch: list[int], device: torch.device) -> torch.Tensor:
    """Return final states [documents, longest, width]: row t of a document predicts its token t.

    Each document is preceded by the prefix token and padded on the right, which the mask hides.
    """
    lengths = corpus.lengths[batch]
    longest = int(lengths.max())
    ids = torch.full((len(batch), longest), corpus.prefix_id, dtype=torch.int64)
    for row, d in enumerate(batch):
        start, stop = int(corpus.offsets[d]), int(corpus.offsets[d + 1])
        ids[row, 1 : stop - start] = corpus.tokens[start : stop - 1]
    mask = (torch.arange(longest)[None, :] < lengths[:, None]).long()
    return model.states(ids.to(device), mask.to(device)).cpu()
