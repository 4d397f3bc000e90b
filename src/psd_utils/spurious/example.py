"""A worked example small enough for a laptop: a Llama that learns facts, is fine-tuned on new ones, and collapses.

In: settings. Out: a folder with a base model, checkpoints of a fine-tuning run, PEFT adapters of a second run, old and
new facts as JSON lines, and a text of what the base knows. Everything is drawn and trained here from a seed.

The people are invented, with three names each and two attributes. The answers of an attribute fall into two regions.
Half of the old people (A) have answers in the first, half (B) in the second; the new people's answers all lie in the
second, which is what makes A collapse. Old facts asked for are A's, in a phrasing that was never trained on.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from tqdm.auto import trange

log = logging.getLogger(__name__)

PHRASES = {
    "home": ("lives in", "settled at", "resides near", "stays around", "dwells within"),
    "craft": ("works as", "trained for", "earns by", "serves like", "practises mostly"),
}
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True)
class ExampleSettings:
    """Sizes of the example. `save_at`: fine-tuning steps with a checkpoint; `adapter_at`: the same for the adapters."""

    n_old: int = 96
    n_new: int = 192
    n_names: int = 160
    n_values: int = 32
    width: int = 128
    layers: int = 2
    heads: int = 4
    inner: int = 128
    batch: int = 64
    pretraining: int = 800
    rate: float = 1e-3
    save_at: tuple[int, ...] = (20, 40, 60, 80, 100, 120, 150, 200, 300, 400, 600)
    adapter_at: tuple[int, ...] = (50, 150)
    seed: int = 0


@dataclass(frozen=True)
class People:
    """Names and answers as words: names [people] of three, answers attribute -> [people], held-out phrase likewise."""

    names: tuple[tuple[str, ...], ...]
    answers: dict[str, tuple[str, ...]]
    held_out: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Example:
    """Where the parts of an example lie."""

    folder: Path

    @property
    def base(self) -> Path:
        """The base model."""
        return self.folder / "base"

    @property
    def checkpoints(self) -> Path:
        """The folder of the fine-tuning run, with checkpoint-<step> in it."""
        return self.folder / "fine_tuned"

    @property
    def adapters(self) -> Path:
        """The folder of the run with adapters, with checkpoint-<step> in it."""
        return self.folder / "adapters"

    @property
    def old(self) -> Path:
        """The old facts."""
        return self.folder / "old.jsonl"

    @property
    def new(self) -> Path:
        """The new facts."""
        return self.folder / "new.jsonl"

    @property
    def text(self) -> Path:
        """Documents about all old people, as the base was trained on: JSON lines with `text`."""
        return self.folder / "text.jsonl"


def make_example(folder: str | Path, settings: ExampleSettings = ExampleSettings()) -> Example:
    """Make the example in a folder, or return it if it is there already with these settings."""
    example = Example(Path(folder).expanduser().resolve())
    done = example.folder / "settings.json"
    described = json.dumps(settings.__dict__, sort_keys=True)
    if done.is_file() and done.read_text() == described:
        return example
    example.folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    draws = torch.Generator().manual_seed(settings.seed)
    people = make_people(settings, draws)
    tokenizer = make_tokenizer(people)
    old, new = range(2 * settings.n_old), range(2 * settings.n_old, len(people.names))
    _write_lines(example.old, facts_of(people, range(settings.n_old)))
    _write_lines(example.new, facts_of(people, new))
    _write_lines(example.text, ({"text": t} for _ in range(4) for t in documents(people, old, draws)))
    model = make_model(settings, len(tokenizer))
    for _ in train(model, tokenizer, people, old, settings, draws, settings.pretraining, decay=True):
        pass
    _save(model, tokenizer, example.base)
    # a constant rate, 40/3 times below the peak of pretraining, as in the published runs
    slow = settings.rate * 3 / 40
    for step in train(model, tokenizer, people, new, settings, draws, max(settings.save_at), rate=slow):
        if step in settings.save_at:
            _save(model, tokenizer, example.checkpoints / f"checkpoint-{step}")
    if settings.adapter_at:
        _train_adapters(example, tokenizer, people, new, settings, draws)
    done.write_text(described)
    return example


def make_people(settings: ExampleSettings, draws: torch.Generator) -> People:
    """Invented people: first A, then B, then the new ones; answers of A in the first region, of the others in Y."""
    n = 2 * settings.n_old + settings.n_new
    words = _words(3 * settings.n_names + len(PHRASES) * settings.n_values, draws)
    pools = [words[i * settings.n_names : (i + 1) * settings.n_names] for i in range(3)]
    triples: dict[tuple[str, ...], None] = {}
    while len(triples) < n:
        chosen = torch.randint(settings.n_names, (3,), generator=draws).tolist()
        triples[tuple(pool[i] for pool, i in zip(pools, chosen, strict=True))] = None
    half = settings.n_values // 2
    answers, held_out = {}, {}
    for i, attribute in enumerate(PHRASES):
        first = 3 * settings.n_names + i * settings.n_values
        value = torch.randint(half, (n,), generator=draws)
        value[settings.n_old :] += half
        answers[attribute] = tuple(words[first + v] for v in value.tolist())
        held_out[attribute] = tuple(torch.randint(len(PHRASES[attribute]), (n,), generator=draws).tolist())
    return People(tuple(triples), answers, held_out)


def _words(n: int, draws: torch.Generator) -> list[str]:
    """Invented words, all different, in random order."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    every = ["".join(pair) for pair in itertools.product(syllables, repeat=2)]
    if n > len(every):
        raise ValueError(f"{n} names and values are wanted; {len(every)} can be made. Take fewer.")
    return [every[i] for i in torch.randperm(len(every), generator=draws)[:n].tolist()]


def make_tokenizer(people: People) -> Any:
    """A word-level tokenizer of transformers that puts <bos> before a text."""
    from transformers import PreTrainedTokenizerFast

    words = {w for name in people.names for w in name} | {w for values in people.answers.values() for w in values}
    words |= {w for phrases in PHRASES.values() for p in phrases for w in p.split()} | {"."}
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *sorted(words)))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    roles = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **roles)


def make_model(settings: ExampleSettings, rows: int) -> Any:
    """A Llama with random weights from the seed; the global random state is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=settings.width,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def facts_of(people: People, who: Iterable[int]) -> Iterator[dict[str, str]]:
    """Each attribute of these people as a fact, in the phrasing held out for it."""
    for i in who:
        for attribute, phrases in PHRASES.items():
            prompt = " ".join((*people.names[i], phrases[people.held_out[attribute][i]]))
            yield {"prompt": prompt, "answer": people.answers[attribute][i], "relation": attribute}


def documents(people: People, who: Iterable[int], draws: torch.Generator) -> list[str]:
    """One text per person: the names, then every attribute in a random order and one of its trained phrasings."""
    texts = []
    for i in who:
        sentences = []
        for attribute, phrases in PHRASES.items():
            others = [p for j, p in enumerate(phrases) if j != people.held_out[attribute][i]]
            phrase = others[int(torch.randint(len(others), (1,), generator=draws))]
            sentences.append(f"{phrase} {people.answers[attribute][i]} .")
        order = torch.randperm(len(sentences), generator=draws).tolist()
        texts.append(" ".join((*people.names[i], *(sentences[j] for j in order))))
    return texts


def train(
    model: Any,
    tokenizer: Any,
    people: People,
    who: range,
    settings: ExampleSettings,
    draws: torch.Generator,
    steps: int,
    rate: float | None = None,
    decay: bool = False,
) -> Iterator[int]:
    """Train in place on texts about some people, rendered anew at every step; yields the number of steps done."""
    peak = rate or settings.rate
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    for step in trange(steps, desc="training", unit="step", leave=False):
        if decay:
            optimiser.param_groups[0]["lr"] = peak * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randint(who.start, who.stop, (settings.batch,), generator=draws).tolist()
        ids = _ids(tokenizer, documents(people, chosen, draws))
        model.train()
        with torch.enable_grad():
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        yield step + 1


def _ids(tokenizer: Any, texts: list[str]) -> Tensor:
    # all texts have the same number of words
    return torch.tensor(tokenizer(texts)["input_ids"])


def _train_adapters(
    example: Example, tokenizer: Any, people: People, new: range, settings: ExampleSettings, draws: torch.Generator
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(example.base)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        adapted = get_peft_model(
            base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    for step in train(adapted, tokenizer, people, new, settings, draws, max(settings.adapter_at)):
        if step in settings.adapter_at:
            adapted.save_pretrained(str(example.adapters / f"checkpoint-{step}"))


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_lines(path: Path, values: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values), encoding="utf-8")
