"""A fixed output-layer correction: one bias per token of a set, and one temperature."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import PsdError
from .files import read_tensors, write_tensors

KINDS = ("none", "temperature", "prior_ratio", "bias", "bias_temperature", "bias_all")
"""The kinds of correction, each a row of every result (DESIGN §2)."""

FITTED_BIAS_KINDS = ("bias", "bias_temperature", "bias_all")
"""The kinds whose bias is fitted, and therefore penalised."""


def check_ids(ids: torch.Tensor, n_rows: int | None = None) -> None:
    """Check that `ids` are distinct token ids, in any order.

    Raises:
        PsdError: naming the first id that is duplicated, negative, or not below `n_rows`.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32):
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise PsdError(f"token ids must be a one-dimensional int64 or int32 tensor, found {found}")
    if ids.numel() == 0:
        return
    if int(ids.min()) < 0:
        raise PsdError(f"token id {int(ids.min())} is negative; ids run from 0")
    if n_rows is not None and int(ids.max()) >= n_rows:
        raise PsdError(f"token id {int(ids.max())} is beyond the head, which has {n_rows} rows (0 to {n_rows - 1})")
    unique, counts = torch.unique(ids, return_counts=True)
    if unique.numel() != ids.numel():
        raise PsdError(f"token id {int(unique[counts > 1][0])} occurs more than once in the set of ids")


@dataclass(frozen=True)
class Correction:
    """Logits z become z / temperature + bias, with the bias zero outside `ids`.

    `ids` is int64 [K] in any order, `bias` is [K] in that order (logits, so nats), `temperature` is 1/β.
    `vocabulary` is the tokenizer length the ids belong to, `tokenizer` a hash of its content; both may be None.
    """

    ids: torch.Tensor
    bias: torch.Tensor
    temperature: float = 1.0
    vocabulary: int | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_ids(self.ids, self.vocabulary)
        if self.bias.shape != self.ids.shape:
            raise PsdError(f"{self.ids.numel()} ids but a bias of shape {tuple(self.bias.shape)}")
        if not self.bias.dtype.is_floating_point or bool(torch.isnan(self.bias).any()):
            raise PsdError("a correction's bias must be floating point and without NaN")
        if bool(torch.isposinf(self.bias).any()):
            raise PsdError("a correction's bias must not be +inf (−inf removes a token)")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise PsdError(f"temperature must be positive and finite, found {self.temperature}")

    @classmethod
    def identity(cls) -> "Correction":
        """Return the correction that changes nothing."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0))

    @property
    def beta(self) -> float:
        """The inverse temperature β = 1/T."""
        return 1.0 / self.temperature

    @property
    def is_identity(self) -> bool:
        """Whether the correction changes no logit."""
        return self.temperature == 1.0 and not bool((self.bias != 0).any())

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the corrected logits, same shape [..., vocabulary] and dtype as `logits`; the input is unchanged.

        Raises:
            PsdError: an id is beyond the last dimension of `logits`.
        """
        check_ids(self.ids, logits.shape[-1])
        corrected = logits / self.temperature
        bias = self.bias.to(logits)
        return corrected.index_add(-1, self.ids.to(logits.device), bias.expand(*logits.shape[:-1], -1))

    def save(self, path: str | Path, **note: Any) -> None:
        """Write the correction as safetensors (`ids`, `bias`, float64 `temperature`), with `note` in the header."""
        note |= {"vocabulary": self.vocabulary, "tokenizer": self.tokenizer}
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        tensors = {"ids": self.ids, "bias": self.bias, "temperature": temperature}
        write_tensors(Path(path), tensors, note)

    @classmethod
    def load(cls, path: str | Path) -> "Correction":
        """Return the correction saved at `path`.

        Raises:
            PsdError: the file is missing, damaged, or not a correction.
        """
        tensors, note = read_tensors(Path(path))
        if set(tensors) != {"ids", "bias", "temperature"}:
            raise PsdError(f"{path} is not a saved correction: it holds {sorted(tensors)}")
        return cls(
            ids=tensors["ids"],
            bias=tensors["bias"],
            temperature=float(tensors["temperature"]),
            vocabulary=note.get("vocabulary"),
            tokenizer=note.get("tokenizer"),
        )
