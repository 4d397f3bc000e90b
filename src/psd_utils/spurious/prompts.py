"""Facts as prompts with answers: read from JSON lines, checked, and turned into tokens.

In: a file with one fact a line, a tokenizer. Out: Prompts, the ids that a model is asked to complete.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

KEYS = ("prompt", "answer", "relation", "candidates")


@dataclass(frozen=True)
class Fact:
    """A prompt, the answer it should get, and optionally its relation and other answers of the same kind."""

    prompt: str
    answer: str
    relation: str | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompts:
    """A set of facts as tokens of one tokenizer.

    Attributes:
        name: what the set is called in tables: old or new.
        facts: the facts themselves, in file order.
        prompt_ids: the ids of each prompt, with what the tokenizer puts before a text.
        answer_ids: the ids of each answer.
        rivals: for each fact the first ids of the other candidate answers, without its own first id.
        relations: names of the groups, sorted; one nameless group where no relations are given.
        groups: [facts] int64, each fact's place in `relations`.
    """

    name: str
    facts: tuple[Fact, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    answer_ids: tuple[tuple[int, ...], ...]
    rivals: tuple[tuple[int, ...], ...]
    relations: tuple[str, ...]
    groups: Tensor

    def __len__(self) -> int:
        return len(self.facts)


def read_facts(path: str | Path) -> tuple[Fact, ...]:
    """The facts of a JSON-lines file: objects with `prompt`, `answer`, optionally `relation` and `candidates`.

    Raises:
        ValueError: no such file, no facts in it, or a line that is not a fact; the message names file and line.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would cut texts at U+2028 and others
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a text of facts: {error}. Give JSON lines in UTF-8.") from error
    facts: list[Fact] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fact = _parse(line, f"{path}, line {number}")
        if fact.prompt in seen:
            raise ValueError(
                f"{path}, line {number}: the prompt {fact.prompt!r} stands in line {seen[fact.prompt]} already. "
                "Give every fact once, with one answer."
            )
        seen[fact.prompt] = number
        facts.append(fact)
    if not facts:
        raise ValueError(f'{path} holds no facts. Give one object a line: {{"prompt": …, "answer": …}}.')
    _check_relations(facts, path)
    return tuple(facts)


def _parse(line: str, where: str) -> Fact:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
    except RecursionError as error:
        raise ValueError(f"{where}: brackets within brackets, too deep to be read.") from error
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half a surrogate pair (\\ud800 to \\udfff alone), which is no text.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with prompt and answer, found {type(value).__name__}.")
    unknown = sorted(set(value) - set(KEYS))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}. Known: {', '.join(KEYS)}.")
    for key in ("prompt", "answer"):
        if not isinstance(value.get(key), str) or not value[key].strip():
            raise ValueError(f"{where}: {key} must be text with at least one letter, found {value.get(key)!r}.")
    relation = value.get("relation")
    if relation is not None and (not isinstance(relation, str) or not relation.strip()):
        raise ValueError(f"{where}: relation must be text or left out, found {relation!r}.")
    candidates = value.get("candidates") or []
    if not isinstance(candidates, list) or not all(isinstance(c, str) and c.strip() for c in candidates):
        raise ValueError(f"{where}: candidates must be a list of texts, found {candidates!r}.")
    return Fact(value["prompt"], value["answer"], relation, tuple(candidates))


def _check_relations(facts: Sequence[Fact], path: Path) -> None:
    without = [f for f in facts if f.relation is None]
    if without and len(without) < len(facts):
        raise ValueError(
            f"{path}: {len(facts) - len(without)} facts have a relation and {len(without)} have none, the first of "
            f"them {without[0].prompt!r}. Give a relation to all facts of a file, or to none."
        )


def check_disjoint(old: Sequence[Fact], new: Sequence[Fact]) -> None:
    """Check that no prompt is in both sets, and say so where only one of them has relations.

    Raises:
        ValueError: a prompt that is both old and new.
    """
    both = {f.prompt for f in old} & {f.prompt for f in new}
    if both:
        raise ValueError(
            f"{len(both)} prompts are among the old and the new facts, such as {min(both)!r}. "
            "Old facts must not be trained on; take them out of one of the two sets."
        )
    have = [facts[0].relation is not None for facts in (old, new)]
    if have[0] != have[1]:
        lacking = "new" if have[0] else "old"
        log.warning("The %s facts have no relations: one mean stands for all of them.", lacking)


def encode_facts(
    facts: Sequence[Fact], tokenizer: Any, name: str, joiner: str = " ", longest: int | None = None
) -> Prompts:
    """Turn facts into tokens, so that prompt and answer are cut where the file cuts them.

    The text of a fact is prompt + joiner + answer, without the joiner where a space stands there already. It must
    begin with the tokens of the prompt alone. Candidates not given are the answers of the same relation in the set.

    Args:
        facts: at least one.
        tokenizer: a tokenizer of transformers; what it puts before a text (such as BOS) is kept.
        name: what the set is called, old or new.
        joiner: what stands between prompt and answer; "" for scripts that write without spaces.
        longest: the most tokens the model can read, if known.

    Raises:
        ValueError: no facts, a fact whose answer does not begin at a token, an unknown word, or a fact that is too
            long; the message names the fact.
    """
    if not facts:
        raise ValueError(f"There are no {name} facts. Give at least one.")
    prompts, answers = [], []
    for fact in facts:
        prompt, answer = _cut(fact, fact.answer, tokenizer, joiner)
        if longest is not None and len(prompt) + len(answer) > longest:
            raise ValueError(
                f"{fact.prompt!r} has {len(prompt) + len(answer)} tokens with its answer; the model reads {longest}. "
                "Shorten the prompt."
            )
        prompts.append(prompt)
        answers.append(answer)
    pools: dict[str | None, dict[str, int]] = {}
    for fact, answer in zip(facts, answers, strict=True):
        pools.setdefault(fact.relation, {})[fact.answer] = answer[0]
    rivals = []
    for fact, answer in zip(facts, answers, strict=True):
        if fact.candidates:
            firsts = {_cut(fact, other, tokenizer, joiner)[1][0] for other in fact.candidates}
        else:
            firsts = set(pools[fact.relation].values())
        rivals.append(tuple(sorted(firsts - {answer[0]})))
    _check_first_tokens(name, {f.answer.strip() for f in facts}, {answer[0] for answer in answers}, tokenizer)
    relations = tuple(sorted({fact.relation or "" for fact in facts}))
    groups = torch.tensor([relations.index(fact.relation or "") for fact in facts])
    return Prompts(name, tuple(facts), tuple(prompts), tuple(answers), tuple(rivals), relations, groups)


def _check_first_tokens(name: str, answers: set[str], firsts: set[int], tokenizer: Any) -> None:
    """Recall is that of first tokens, so one that all answers share would hide every loss.

    Raises:
        ValueError: different answers, and a single first token.
    """
    if len(answers) > 1 and len(firsts) == 1:
        raise ValueError(
            f"The {len(answers)} different answers of the {name} facts all begin with the token "
            f"{tokenizer.decode(list(firsts))!r}, so the first token does not tell whether a fact is known. Move what "
            "they share into the prompts, or choose another joiner (space_between: False in 06_checkpoints)."
        )


def _cut(fact: Fact, answer: str, tokenizer: Any, joiner: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of the prompt, with what the tokenizer puts before it, and of the answer."""
    joiner = "" if fact.prompt[-1].isspace() or answer[0].isspace() else joiner
    prompt = list(tokenizer(fact.prompt, add_special_tokens=False)["input_ids"])
    whole = list(tokenizer(fact.prompt + joiner + answer, add_special_tokens=False)["input_ids"])
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise ValueError(
            f"{fact.prompt!r} with the answer {answer!r}: the answer does not begin at a token of its own, so it "
            "cannot be asked for. End the prompt at a word, without a space, or choose another joiner."
        )
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in whole:
        part = "prompt" if unknown in prompt else "answer"
        raise ValueError(
            f"{fact.prompt!r} with the answer {answer!r}: the tokenizer does not know a word of the {part}."
        )
    return tuple(_before(tokenizer, fact.prompt, prompt) + prompt), tuple(whole[len(prompt) :])


def _before(tokenizer: Any, text: str, plain: list[int]) -> list[int]:
    """What the tokenizer itself puts before a text, such as BOS."""
    ids = list(tokenizer(text)["input_ids"])
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []
