"""Capture -> output model -> head statistics and exact losses, split by split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .capture import Capture, TextStates
from .corpus import SPLITS
from .correction import Correction
from .errors import PsdError
from .kernels import HeadStatistics, Readout, corrected_losses, head_statistics


@dataclass(frozen=True)
class OutputModel:
    """A model as its output layer sees it: the states of each split, the head, and the readout.

    A damaged model is the same thing with another head (or other states), so nothing is run forward again.
    """

    splits: Mapping[str, TextStates]
    head: torch.Tensor
    readout: Readout

    @classmethod
    def of(cls, capture: Capture, device: torch.device, mask_padding: bool = False) -> "OutputModel":
        """Return the output model of a capture, its head on `device`.

        `mask_padding` takes the head rows beyond the tokenizer's length out of the softmax; by default they stay,
        since that is the model's loss.
        """
        weight, readout = capture.head()
        bias = None if readout.bias is None else readout.bias.to(device)
        masked = None
        if mask_padding:
            masked = torch.arange(weight.shape[0], device=device) >= capture.manifest["tokenizer_length"]
        states = {split: capture.states(split) for split in SPLITS}
        return cls(states, weight.to(device), replace(readout, bias=bias, masked=masked))

    def with_head(self, head: torch.Tensor) -> "OutputModel":
        """Return the model with another head."""
        return replace(self, head=head)

    def statistics(self, split: str, ids: torch.Tensor, betas: torch.Tensor | None = None) -> HeadStatistics:
        """Return the head statistics of a split."""
        states = self.splits[split]
        return head_statistics(states.hidden, self.head, states.targets, ids, betas, readout=self.readout)

    def losses(self, split: str, corrections: Sequence[Correction | None]) -> torch.Tensor:
        """Return exact losses on a split, nats, [corrections, tokens]."""
        states = self.splits[split]
        return corrected_losses(states.hidden, self.head, states.targets, corrections, readout=self.readout)

    def mean_loss(self, split: str, correction: Correction | None = None) -> float:
        """Return the exact mean loss on a split, nats per token."""
        return float(self.losses(split, [correction])[0].double().mean())


def top_k_ids(targets: torch.Tensor, top_k: int, special: torch.Tensor, tokenizer_length: int) -> torch.Tensor:
    """Return the ids of a correction, ascending: those that occur most often as targets, at most `top_k`.

    Ties go to the smaller id; each occurs at least once; special ids and padded head rows are excluded (DESIGN §2).

    Raises:
        PsdError: `top_k` is below 1, or no id is left.
    """
    if top_k < 1:
        raise PsdError(f"top_k must be at least 1, found {top_k}")
    counts = torch.bincount(targets, minlength=tokenizer_length)[:tokenizer_length]
    counts[special[special < tokenizer_length]] = 0
    order = torch.sort(counts, descending=True, stable=True).indices[:top_k]
    chosen = order[counts[order] > 0]
    if chosen.numel() == 0:
        raise PsdError("no token of the fitted text is left for the correction: all are special or padded")
    return chosen.sort().values


def real_ids(special: torch.Tensor, tokenizer_length: int) -> torch.Tensor:
    """Return every non-special real id, ascending: the set of `bias_all`."""
    keep = torch.ones(tokenizer_length, dtype=torch.bool)
    keep[special[special < tokenizer_length]] = False
    return keep.nonzero()[:, 0]
