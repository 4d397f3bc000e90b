"""What is measured of the transformer at a step: recall, ranks, the common and the individual part of the change.

In: a pretrained model, the same model later, and the people. Out: one dictionary of numbers for each step.

Everything is read at the position that predicts the first token of a value, in held-out phrasings that stay the same
along a run, and for each attribute separately: pooling attributes loses a good part of the common shift.
Source: Palit et al. (2026), metrics, shift decomposition and counterfactual readouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psd_utils.spurious.biographies import Biographies
from psd_utils.spurious.biography_batches import Batch, evaluation_batch
from psd_utils.spurious.shift import common_only, individual_only, split_change
from psd_utils.spurious.transformer import Decoder

CHUNK = 256
"""People that are read at a time."""


@dataclass(frozen=True)
class Questions:
    """The fixed evaluation of a world.

    Attributes:
        batches: population -> its sequences in held-out phrasings.
        first_tokens: for each attribute, the first token of every value, [values].
        in_x: for each attribute, [values] bool.
    """

    batches: dict[str, Batch]
    first_tokens: tuple[Tensor, ...]
    in_x: tuple[Tensor, ...]

    @property
    def n_attributes(self) -> int:
        """How many attributes."""
        return len(self.in_x)


@dataclass(frozen=True)
class Reading:
    """What a model says of one population.

    Attributes:
        states: [attributes, n, width], what the head reads.
        logits: [attributes, n, tokens].
        answers: [attributes, n].
    """

    states: Tensor
    logits: Tensor
    answers: Tensor


def make_questions(world: Biographies, device: torch.device | str = "cpu") -> Questions:
    """The evaluation of a world, on the device."""
    language = world.language
    batches = {name: evaluation_batch(people, world.seed).to(device) for name, people in world.populations.items()}
    return Questions(
        batches, tuple(t.to(device) for t in language.first_tokens), tuple(x.to(device) for x in language.in_x)
    )


@torch.no_grad()
def read(model: Decoder, batch: Batch) -> Reading:
    """States and logits at the slots of a batch, attributes first."""
    states = []
    for tokens, slots in zip(batch.tokens.split(CHUNK), batch.slots.split(CHUNK), strict=True):
        every = model.states(tokens[:, : int(slots.max()) + 1])
        states.append(every.gather(1, slots.unsqueeze(2).expand(-1, -1, every.shape[2])))
    stacked = torch.cat(states).transpose(0, 1).contiguous()
    return Reading(stacked, model.head(stacked), batch.answers.T)


def recall(logits: Tensor, answers: Tensor) -> Tensor:
    """Share of facts whose answer has the largest logit of the whole vocabulary, [attributes], 0–1."""
    return (logits.argmax(-1) == answers).double().mean(-1)


def own_region_ranks(logits: Tensor, answers: Tensor, questions: Questions, region_x: bool = True) -> Tensor:
    """Rank of the answer among the first tokens of its own region's values, [attributes, n], 1 is best.

    Suppression of a whole region leaves it as it is; erosion does not.
    """
    ranks = []
    for z, answer, tokens, in_x in zip(logits, answers, questions.first_tokens, questions.in_x, strict=True):
        own = z[:, tokens[in_x == region_x]]
        ranks.append(1 + (own > z.gather(1, answer.unsqueeze(1))).sum(1))
    return torch.stack(ranks).double()


def region_directions(model: Decoder, questions: Questions) -> Tensor:
    """w: for each attribute the unit vector from X to Y in the head, [attributes, width]."""
    rows = []
    for tokens, in_x in zip(questions.first_tokens, questions.in_x, strict=True):
        w = model.head.weight[tokens[~in_x]].mean(0) - model.head.weight[tokens[in_x]].mean(0)
        rows.append(w / torch.linalg.vector_norm(w))
    return torch.stack(rows).detach()


class Observer:
    """Measures a model against how it was before the injection."""

    def __init__(self, world: Biographies, start: Decoder) -> None:
        self.start = start
        self.questions = make_questions(world, next(start.parameters()).device)
        self.before = read(start, self.questions.batches["A"])
        self.directions = region_directions(start, self.questions)

    def recalls(self, model: Decoder, populations: Sequence[str] = ("A", "new")) -> dict[str, float]:
        """recall_NAME of some populations: means over attributes."""
        return {f"recall_{p}": float(_recall_of(model, self.questions.batches[p]).mean()) for p in populations}

    @torch.no_grad()
    def measure(self, model: Decoder) -> dict[str, float]:
        """All quantities of a step.

        Returns:
            recall_A, _B, _new, _never (held-out phrasings) and recall_A_k, recall_new_k for each attribute;
            probability_A; rank_A (own region, mean, 1 is best) and own_region_A (share at rank 1); answers_Y (share of
            A's answers that are values of region Y);
            shift, shift_k (‖δ‖ of the states), drift (root mean square ‖ε_a‖), content, content_k (⟨δ, w⟩);
            recall_ and rank_ of common_only, common_removed and bias_reset; logit_shift (‖c‖) and its parts
            logit_shift_representation and logit_shift_readout; recall_representation (states of now, head of before)
            and recall_readout (the other way round).
        """
        now, before = read(model, self.questions.batches["A"]), self.before
        others = {p: _recall_of(model, self.questions.batches[p]) for p in ("B", "new", "never")}
        own = recall(now.logits, now.answers)
        row = {"recall_A": float(own.mean())}
        row |= {f"recall_{p}": float(values.mean()) for p, values in others.items()}
        row |= {f"recall_A_{k}": float(v) for k, v in enumerate(own)}
        row |= {f"recall_new_{k}": float(v) for k, v in enumerate(others["new"])}
        right = now.logits.log_softmax(-1).gather(2, now.answers.unsqueeze(2)).exp()
        row["probability_A"] = float(right.mean())
        row["own_region_A"] = float((own_region_ranks(now.logits, now.answers, self.questions) == 1).double().mean())
        row["answers_Y"] = float(self._answers_y(now))
        return row | self._split(model, now, before)

    def _answers_y(self, now: Reading) -> Tensor:
        said = now.logits.argmax(-1)
        parts = zip(said, self.questions.first_tokens, self.questions.in_x, strict=True)
        return torch.stack([torch.isin(s, tokens[~in_x]).double().mean() for s, tokens, in_x in parts]).mean()

    def _split(self, model: Decoder, now: Reading, before: Reading) -> dict[str, float]:
        states, logits = split_change(before.states, now.states), split_change(before.logits, now.logits)
        sizes = torch.linalg.vector_norm(states.common, dim=-1).flatten()
        contents = (states.common.squeeze(1) * self.directions).sum(-1)
        row = {"shift": float(sizes.mean()), "content": float(contents.mean())}
        row |= {f"shift_{k}": float(v) for k, v in enumerate(sizes)}
        row |= {f"content_{k}": float(v) for k, v in enumerate(contents)}
        row["drift"] = float(states.individual.square().sum(-1).mean(-1).sqrt().mean())
        head, old_head = model.head, self.start.head
        spliced = {
            "representation": old_head(now.states),
            "readout": head(before.states),
            "common_only": common_only(before.logits, logits),
            "common_removed": individual_only(before.logits, logits),
            "bias_reset": now.logits - head.bias + old_head.bias,
        }
        ranks = {name: own_region_ranks(z, now.answers, self.questions) for name, z in spliced.items()}
        row |= {f"recall_{name}": float(recall(z, now.answers).mean()) for name, z in spliced.items()}
        row["rank_A"] = float(own_region_ranks(now.logits, now.answers, self.questions).mean())
        row |= {f"rank_{name}": float(ranks[name].mean()) for name in ("common_only", "common_removed", "bias_reset")}
        row["logit_shift"] = _mean_length(logits.common)
        for name in ("representation", "readout"):
            row[f"logit_shift_{name}"] = _mean_length(split_change(before.logits, spliced[name]).common)
        return row


def _recall_of(model: Decoder, batch: Batch) -> Tensor:
    reading = read(model, batch)
    return recall(reading.logits, reading.answers)


def _mean_length(common: Tensor) -> float:
    return float(torch.linalg.vector_norm(common, dim=-1).mean())
