"""Token sequences about people, rendered anew at every call.

In: populations and a random generator. Out: batches: tokens, what of them is trained, and where the answers stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psd_utils.spurious.biographies import People, generator


@dataclass(frozen=True)
class Batch:
    """Rendered sequences of n people.

    Attributes:
        tokens: [n, L] int64.
        counted: [n, L] bool, the tokens whose prediction is trained: all but the first and the prompt's padding.
        slots: [n, attributes], the position that predicts the first token of each value.
        answers: [n, attributes], that token.
    """

    tokens: Tensor
    counted: Tensor
    slots: Tensor
    answers: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return Batch(*(t.to(device) for t in (self.tokens, self.counted, self.slots, self.answers)))


def training_batch(people: People | Sequence[People], size: int, draws: torch.Generator) -> Batch:
    """Sequences about people drawn with replacement, in fresh training phrasings and a fresh order of attributes.

    Args:
        people: one population, or several that are drawn from as one (A and B in pretraining).
        size: number of sequences, ≥ 1.
        draws: where the draw comes from, on the CPU.

    Returns:
        Batch of `size` sequences.
    """
    groups = [people] if isinstance(people, People) else list(people)
    sizes = [len(g) for g in groups]
    drawn = torch.randint(0, sum(sizes), (size,), generator=draws)
    batches, start = [], 0
    for group in groups:
        chosen = drawn[(drawn >= start) & (drawn < start + len(group))] - start
        n_trained = group.phrasings.shape[2] - group.n_held_out
        which = torch.randint(0, n_trained, (len(chosen), group.values.shape[1]), generator=draws)
        batches.append(_render(group, chosen, which, draws))
        start += len(group)
    return Batch(*(torch.cat([getattr(b, f) for b in batches]) for f in ("tokens", "counted", "slots", "answers")))


def evaluation_batch(people: People, seed: int) -> Batch:
    """One sequence about every person, in order, in held-out phrasings; the same at every call with this seed."""
    draws = generator(seed, "evaluation")
    n, k, t = people.phrasings.shape
    which = torch.randint(t - people.n_held_out, t, (n, k), generator=draws)
    return _render(people, torch.arange(n), which, draws)


def _render(people: People, chosen: Tensor, which: Tensor, draws: torch.Generator) -> Batch:
    """Sequences of the chosen people [b] in their phrasing number `which` [b, attributes], attributes shuffled."""
    b, k = which.shape
    order = torch.rand(b, k, generator=draws).argsort(1)
    rows = chosen.unsqueeze(1)
    phrasing = people.phrasings[rows, torch.arange(k), which].gather(1, order)
    tokens = people.sentences.tokens[rows, order, phrasing].long()
    lengths = people.sentences.lengths[rows, order, phrasing]
    n_prompt = people.prompts.shape[1]
    starts = n_prompt + lengths.cumsum(1) - lengths
    within = torch.arange(tokens.shape[2])
    # What a padded sentence does not fill goes into one extra column, which is cut off again.
    places = torch.where(within < lengths.unsqueeze(2), starts.unsqueeze(2) + within, people.length)
    out = torch.full((b, people.length + 1), people.pad)
    out[:, :n_prompt] = people.prompts[chosen]
    out.scatter_(1, places.flatten(1), tokens.flatten(1))
    out = out[:, :-1]
    counted = torch.ones_like(out, dtype=torch.bool)
    counted[:, :n_prompt] = out[:, :n_prompt] != people.pad
    counted[:, 0] = False
    before_value = starts + people.sentences.value_at[rows, order, phrasing] - 1
    slots = torch.empty_like(before_value).scatter_(1, order, before_value)
    return Batch(out, counted, slots, people.answers[chosen])
