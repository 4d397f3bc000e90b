"""What a model says to a set of prompts, and the states it says it from.

In: a causal model of transformers and Prompts. Out: Recall, one entry per fact. The model is only read: no
gradients, no random draws, and it is left in the mode it came in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psd_utils.spurious.prompts import Prompts


@dataclass(frozen=True)
class Recall:
    """How a model answers n facts, under teacher forcing: every token is predicted from the right ones before it.

    Attributes:
        exact: [n] bool, all tokens of the answer have the largest logit at their place. This is what greedy
            generation would write.
        first: [n] bool, the same for the answer's first token alone.
        choice: [n] float64, 1 or 0: the first token beats those of the rival answers; NaN where there are none.
        log_prob: [n] float64, log-probability of the answer, nats, summed over its tokens.
        tokens: [n] int64, tokens of the answer.
        states: [n, width] float32 on the CPU, what the output head reads to predict the answer's first token.
    """

    exact: np.ndarray
    first: np.ndarray
    choice: np.ndarray
    log_prob: np.ndarray
    tokens: np.ndarray
    states: Tensor

    @property
    def log_prob_per_token(self) -> float:
        """Mean log-probability of the answers, nats per token: sum over tokens by number of tokens."""
        return float(self.log_prob.sum() / self.tokens.sum())


def output_head(model: Any) -> Any:
    """The module that turns final states into logits.

    Raises:
        ValueError: a model without one.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head. Give a causal language model.")
    return head


@torch.no_grad()
def measure_recall(model: Any, prompts: Prompts, batch_size: int = 32) -> Recall:
    """Ask a model for the answers of all facts.

    Numbers are as fine as the model's own logits: use float32 where differences between checkpoints are small.

    Args:
        model: a causal language model of transformers, on any device.
        prompts: ids of the model's own tokenizer.
        batch_size: prompts read at once.

    Raises:
        ValueError: ids beyond the model's embedding, or predictions that are not finite.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(max(p + a) for p, a in zip(prompts.prompt_ids, prompts.answer_ids, strict=True))
    if largest >= rows:
        raise ValueError(
            f"Token {largest} of the {prompts.name} facts is beyond the model's {rows} embeddings. "
            "Use the tokenizer that the model was trained with."
        )
    # prompts of like length together, in an order that no checkpoint changes
    order = sorted(range(len(prompts)), key=lambda i: len(prompts.prompt_ids[i]) + len(prompts.answer_ids[i]))
    found: dict[int, tuple[bool, bool, float, float, Tensor]] = {}
    with _evaluating(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            found |= dict(zip(chosen, _ask(model, prompts, chosen), strict=True))
    exact, first, choice, log_prob, states = zip(*(found[i] for i in range(len(prompts))), strict=True)
    return Recall(
        exact=np.array(exact),
        first=np.array(first),
        choice=np.array(choice),
        log_prob=np.array(log_prob),
        tokens=np.array([len(a) for a in prompts.answer_ids]),
        states=torch.stack(states),
    )


def _ask(model: Any, prompts: Prompts, chosen: list[int]) -> Iterator[tuple[bool, bool, float, float, Tensor]]:
    """For each chosen fact: exact, first, choice, log-probability, state."""
    device = model.get_input_embeddings().weight.device
    texts = [prompts.prompt_ids[i] + prompts.answer_ids[i][:-1] for i in chosen]
    width = max(len(t) for t in texts)
    # padded on the right: a causal model's predictions do not see what follows
    ids = torch.tensor([list(t) + [t[-1]] * (width - len(t)) for t in texts], device=device)
    mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device=device)
    lengths = [len(prompts.answer_ids[i]) for i in chosen]
    row = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(lengths))
    begins = [len(prompts.prompt_ids[i]) - 1 for i in chosen]
    column = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
    with _only_at(output_head(model), row, column) as seen:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].float()
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"The model predicts NaN or infinity for {prompts.facts[chosen[0]].prompt!r} or a fact read with it. "
            "Its weights are broken, or too large for the dtype: check the checkpoint, or use float32."
        )
    log_probs = torch.log_softmax(logits, -1)
    end = 0
    for place, i in enumerate(chosen):
        begin, end = end, end + lengths[place]
        answer = torch.tensor(prompts.answer_ids[i], device=logits.device)
        right = logits[begin:end].argmax(-1) == answer
        own = log_probs[begin:end].gather(1, answer[:, None]).double().sum()
        rivals = logits[begin, list(prompts.rivals[i])] if prompts.rivals[i] else None
        choice = float("nan") if rivals is None else float(logits[begin, answer[0]] > rivals.max())
        yield bool(right.all()), bool(right[0]), choice, float(own), seen[0][begin].float().cpu()


def readout(model: Any, states: Tensor) -> Tensor:
    """What the output head makes of states, [items, rows]: the model's logits up to scaling and soft-capping.

    Both keep the order of the logits, so the largest one is the model's.
    """
    head = output_head(model)
    with torch.no_grad():
        logits: Tensor = head(states.to(device=head.weight.device, dtype=head.weight.dtype))
    return logits.float().cpu()


@contextmanager
def _only_at(head: Any, row: Tensor, column: Tensor) -> Iterator[list[Tensor]]:
    """Let the head see only these places of a batch, as one sequence; yields what it saw, [places, width].

    So a vocabulary of 150,000 costs memory for the answers' tokens alone.
    """
    seen: list[Tensor] = []

    def keep(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states = inputs[0][row.to(inputs[0].device), column.to(inputs[0].device)]
        seen.append(states)
        return (states[None],)

    handle = head.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is in the mode it was in, whichever that was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
