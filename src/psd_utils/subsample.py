"""What the sliders of a pair need, on disk: statistics of a fixed subsample of a study's text, and no model.

<results>/<pair>/explorer/
    base.safetensors, derived.safetensors, damaged-0.safetensors    exact losses under the study's corrections; surfaces
    base-set.safetensors, …     head statistics of the ids most frequent in `fit`, from which smaller sets are refitted
    text.safetensors            token ids and documents; texts of all tokens; written last

20,000 tokens of `eval` are shown; 10,000 of `fit` serve the refits alone. That is about 130 MB.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from .capture import Capture, TextStates, open_capture
from .controls import damage_seed, with_head_noise
from .correction import Correction
from .devices import choose_device
from .errors import PsdError
from .files import read_tensors, write_tensors
from .head import OutputModel, top_k_ids
from .kernels import HeadStatistics, corrected_losses, head_statistics
from .paths import captures_dir
from .sources import load_tokenizer, locate
from .study import Study
from .surface import BETAS, Surface

_LOG = logging.getLogger(__name__)

FORMAT = 1
TOKENS = {"eval": 20_000, "fit": 10_000}
MOST_IDS = 256
"""Ids whose logits are kept for refits."""

MEMBERS = ("base", "derived", "damaged-0")
_TILE = 2**20  # logits at a time: what a CPU's caches hold


@dataclass(frozen=True)
class SampledModel:
    """A member on the N sampled tokens of `eval`: by kind, `losses` float32 [N], exact, nats, and `surfaces`."""

    losses: Mapping[str, torch.Tensor]
    surfaces: Mapping[str, Surface]

    def surface(self, kind: str) -> Surface:
        """Return the surface of a kind; one without a bias has that of `none`."""
        return self.surfaces.get(kind, self.surfaces["none"])


@dataclass(frozen=True, eq=False)
class Subsample:
    """The stored subsample of a study.

    `targets` int64 [N] and `offsets` int64 [D + 1] are the shown tokens of `eval` and their documents, `keys` the
    documents' names; `fit_targets` the tokens for refits. `set_ids` int64 [K] are the ids that can be refitted, the
    most frequent first; `counts` int64 [vocabulary], how often each id is a target in the whole of `fit`; `texts` the
    decoded tokens; `members` those that are stored.
    """

    folder: Path
    identity: Mapping[str, Any]
    members: tuple[str, ...]
    keys: tuple[str, ...]
    texts: tuple[str, ...]
    targets: torch.Tensor
    offsets: torch.Tensor
    fit_targets: torch.Tensor
    set_ids: torch.Tensor
    counts: torch.Tensor

    @cached_property
    def models(self) -> Mapping[str, SampledModel]:
        """The members' losses and surfaces."""
        return {member: self._model(member) for member in self.members}

    def _model(self, member: str) -> SampledModel:
        tensors = _read(self.folder / f"{member}.safetensors", self.identity)[0]
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, column = name.partition(".")
            parts.setdefault(kind, {})[column] = tensor
        losses = {kind: columns.pop("exact_loss") for kind, columns in parts.items()}
        return SampledModel(losses, {kind: Surface(**columns) for kind, columns in parts.items() if columns})

    @lru_cache(maxsize=8)  # noqa: B019 - one subsample lives as long as its widget
    def set_statistics(self, member: str, split: str) -> HeadStatistics:
        """Return the head statistics of `set_ids` on the sampled tokens of `eval` or `fit`."""
        tensors = _read(self.folder / f"{member}-set.safetensors", self.identity)[0]
        columns: dict[str, Any] = {
            name.removeprefix(f"{split}."): tensor for name, tensor in tensors.items() if name.startswith(f"{split}.")
        }
        columns["set_logits"] = columns["set_logits"].float()
        return HeadStatistics(ids=self.set_ids, betas=BETAS, vocabulary=len(self.counts), **columns)


def load_subsample(study: Study) -> Subsample:
    """Return the stored subsample of a study; it is made from the study's captures where it is missing or outdated.

    Raises:
        PsdError: a stored file is damaged, or nothing is stored and the captures are gone.
    """
    folder = study.path / "explorer"
    identity = {"format": FORMAT, "study": study.summary["settings_sha256"]}
    text = folder / "text.safetensors"
    if not text.is_file() or _note(text).get("identity") != identity:
        _make(study, folder, identity)
    tensors, note = _read(text, identity)
    members, keys, texts = (tuple(note[name]) for name in ("members", "keys", "texts"))
    return Subsample(folder, identity, members, keys, texts, **tensors)


def sampled_documents(lengths: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return documents drawn without replacement, ascending, and how many of their tokens are used, int64 [D] both.

    Whole documents, as many as the budget holds; where it holds not even the first drawn, that one is cut.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    drawn = lengths[order].cumsum(0)
    chosen = order[drawn <= budget].sort().values
    if not chosen.numel():
        return order[:1], torch.tensor([budget])
    return chosen, lengths[chosen]


def sampled_states(states: TextStates, budget: int) -> TextStates:
    """Return a split with only the sampled documents, within `budget` tokens."""
    documents, used = sampled_documents(states.lengths, budget)
    starts = states.lengths.cumsum(0) - states.lengths
    rows = torch.cat([torch.arange(s, s + n) for s, n in zip(starts[documents].tolist(), used.tolist(), strict=True)])
    keys = tuple(states.keys[d] for d in documents.tolist())
    return TextStates(states.hidden[rows], states.targets[rows], used, keys)


def _make(study: Study, folder: Path, identity: Mapping[str, Any]) -> None:
    """Write all files of a subsample, that of the text last."""
    captures = {role: _capture(study, role) for role in ("base", "derived")}
    _LOG.info("making the explorer's statistics in %s", folder)
    tokenizer = study.summary["tokenizer"]
    special, length = torch.tensor(tokenizer["special"], dtype=torch.int64), int(tokenizer["length"])
    targets = captures["base"].states("fit").targets
    counts = targets.bincount(minlength=length)
    ids = top_k_ids(targets, MOST_IDS, special, length)
    ids = ids[counts[ids].argsort(descending=True, stable=True)]
    members = [m for m in MEMBERS if m in study.summary["fits"]]
    for member in members:
        model = _sampled_model(study, captures, member, length)
        corrections = {kind: c for (label, kind), c in study.corrections.items() if label == member}
        write_tensors(folder / f"{member}.safetensors", _surfaces(model, corrections), {"identity": identity})
        write_tensors(folder / f"{member}-set.safetensors", _set_statistics(model, ids), {"identity": identity})
    shown, fitted = model.splits["eval"], model.splits["fit"]
    tensors = {
        "targets": shown.targets,
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), shown.lengths.cumsum(0)]),
        "fit_targets": fitted.targets,
        "set_ids": ids,
        "counts": counts,
    }
    reader = load_tokenizer(locate(study.pair.base, weights=False))
    texts = [reader.decode([i]) if reader else f"<{i}>" for i in range(length)]
    note = {"identity": identity, "members": members, "keys": list(shown.keys), "texts": texts}
    write_tensors(folder / "text.safetensors", tensors, note)


def _capture(study: Study, role: str) -> Capture:
    key = study.summary["settings"]["captures"][role]
    capture = study.captures.get(role) or open_capture(captures_dir() / key)
    if capture is None:
        raise PsdError(
            f"{study.pair.name}: the explorer's statistics are not stored in {study.path / 'explorer'}, and the "
            f"capture {captures_dir() / key} to make them from is gone: run 02_fit for the pair again"
        )
    return capture


def _sampled_model(study: Study, captures: Mapping[str, Capture], member: str, length: int) -> OutputModel:
    """Return a member with only the sampled states; a damaged one is rebuilt from its seed and noise."""
    settings = study.summary["settings"]
    capture = captures["derived" if member == "derived" else "base"]
    model = OutputModel.of(capture, choose_device("auto", None).device, settings["mask_padding"])
    model = replace(model, splits={s: sampled_states(model.splits[s], n) for s, n in TOKENS.items()})
    if member.startswith("damaged"):
        seed = damage_seed(settings["seed"], int(member.rsplit("-", 1)[1]))
        model = with_head_noise(model, study.summary["fits"][member]["none"]["noise_sd"], seed, length)
    return model


def _surfaces(model: OutputModel, corrections: Mapping[str, Correction]) -> dict[str, torch.Tensor]:
    """Return by kind the exact losses, and for `none` and the kinds with a bias the surfaces, as named tensors."""
    states = model.splits["eval"]
    losses = corrected_losses(
        states.hidden, model.head, states.targets, list(corrections.values()), readout=model.readout
    )
    named = {f"{kind}.exact_loss": loss.float().cpu() for kind, loss in zip(corrections, losses, strict=True)}
    with_bias = {kind: c for kind, c in corrections.items() if c.ids.numel()}
    for group in _same_ids({"none": Correction.identity(), **with_bias}):
        for kind, surface in _surfaces_of(model, states, group).items():
            named |= {f"{kind}.{f.name}": getattr(surface, f.name) for f in fields(surface)}
    return named


def _same_ids(corrections: Mapping[str, Correction]) -> list[dict[str, Correction]]:
    """Return the corrections grouped by their set, so that one pass over the head serves a group."""
    groups: list[dict[str, Correction]] = []
    for kind, correction in corrections.items():
        for group in groups:
            if torch.equal(next(iter(group.values())).ids, correction.ids):
                group[kind] = correction
                break
        else:
            groups.append({kind: correction})
    return groups


def _surfaces_of(model: OutputModel, states: TextStates, group: Mapping[str, Correction]) -> dict[str, Surface]:
    ids = next(iter(group.values())).ids
    pieces: dict[str, list[Surface]] = {kind: [] for kind in group}
    step = max(64, _TILE // max(1, ids.numel()))
    for start in range(0, len(states.targets), step):
        chunk = slice(start, start + step)
        targets = states.targets[chunk]
        found = _on_cpu(head_statistics(states.hidden[chunk], model.head, targets, ids, BETAS, readout=model.readout))
        for kind, correction in group.items():
            pieces[kind].append(Surface.of(found, targets, correction.bias))
    return {kind: Surface.joined(own) for kind, own in pieces.items()}


def _set_statistics(model: OutputModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the head statistics of both splits as named tensors, the set's logits in half precision.

    Rounding to half precision moves a logit by a two-thousandth of itself, and mean losses by less than 1e-5 nats.
    """
    named: dict[str, torch.Tensor] = {}
    for split in TOKENS:
        states = model.splits[split]
        found = _on_cpu(head_statistics(states.hidden, model.head, states.targets, ids, BETAS, readout=model.readout))
        named |= {f"{split}.{name}": getattr(found, name) for name in found.PER_TOKEN}
        named[f"{split}.set_logits"] = found.set_logits.half()
    return named


def _on_cpu(statistics: HeadStatistics) -> HeadStatistics:
    changes: dict[str, Any] = {name: getattr(statistics, name).cpu() for name in ("ids", *statistics.PER_TOKEN)}
    return replace(statistics, **changes)


def _note(path: Path) -> Mapping[str, Any]:
    return _advised(path)[1]


def _read(path: Path, identity: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, note = _advised(path)
    if note.get("identity") != identity:
        raise PsdError(f"{path} belongs to another run; delete {path.parent} to have it made again")
    return tensors, note


def _advised(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        return read_tensors(path)
    except PsdError as error:
        raise PsdError(f"{error}; delete {path.parent} to have the explorer's statistics made again") from error
