"""Settings, tokenizer, models and losses that training and checking share."""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_text import PROSE, Corpus, Document, build_corpus, smoke_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()

SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
PAD, BOS, EOS, USER, ASSISTANT = range(5)
Row = tuple[list[int], list[int]]  # ids, labels (-100: no loss)


@dataclass(frozen=True)
class Recipe:
    """How one model is made from another. ``mix``: source -> share of the training tokens."""

    name: str
    start: str
    kind: str  # pretrain, sft or dpo
    lr: float
    steps: int
    batch: int  # sequences (pairs for dpo) in a step
    mix: tuple[tuple[str, float], ...] = ()
    beta: float = 0.1


@dataclass(frozen=True)
class Settings:
    """Everything that decides the weights, next to the texts."""

    seed: int = 20261
    threads: int = 2
    vocabulary: int = 4096
    hidden: int = 128
    layers: int = 3
    feed_forward: int = 384
    heads: int = 4
    kv_heads: int = 2
    context: int = 512
    base_lr: float = 4e-3
    base_steps: int = 3000
    base_batch: int = 4
    warmup: int = 100
    decay_from: float = 0.75  # the stable phase ends here; `anneal` is saved at this step
    base_mix: tuple[tuple[str, float], ...] = (
        ("prose", 0.78),
        ("docs", 0.14),
        ("math", 0.04),
        ("code", 0.04),
    )
    instruction_rows: int = 14_000
    heldout_rows: int = 320
    tokenizer_chars: int = 16_000_000
    recipes: tuple[Recipe, ...] = (
        Recipe("math", "base", "pretrain", 1e-3, 605, 4, (("math", 0.92), ("prose", 0.08))),
        Recipe("code", "base", "pretrain", 1e-3, 605, 4, (("code", 0.92), ("prose", 0.08))),
        Recipe("math_light", "base", "pretrain", 5e-4, 160, 4, (("math", 1.0),)),
        Recipe("instruct", "base", "sft", 1e-3, 340, 24),
        Recipe("dpo", "instruct", "dpo", 5e-5, 150, 16),
    )


SMOKE = replace(
    Settings(), vocabulary=400, hidden=32, layers=1, feed_forward=64, heads=2, kv_heads=1,
    context=256, threads=1, base_steps=24, warmup=4, instruction_rows=160, heldout_rows=12,
    tokenizer_chars=60_000,
    recipes=tuple(replace(r, steps=3, batch=min(r.batch, 4)) for r in Settings().recipes),
)  # fmt: skip


class Run:
    """A run: settings, folders, corpus, tokenizer and the growing report."""

    def __init__(self, settings: Settings, out: Path, sources: Path | None) -> None:
        self.settings, self.out, self.sources = settings, out, sources
        out.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = {"stages": {}}
        if (out / "report.json").exists():
            self.report = json.loads((out / "report.json").read_text("utf-8"))
        self.corpus: Corpus = build_corpus(sources, settings.seed) if sources else smoke_corpus(settings.seed)
        self._tokens: dict[str, list[list[int]]] = {}

    def save_report(self) -> None:
        """Write report.json."""
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1) + "\n", "utf-8")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, trained when first needed."""
        path = self.out / "tokenizer" / "tokenizer.json"
        if not path.exists():
            train_tokenizer(self, path.parent)
        return Tokenizer.from_file(str(path))

    def documents(self, part: str, source: str) -> list[Document]:
        """Training or held-out documents of a source, or of all ``prose`` together."""
        texts = self.corpus.train if part == "train" else self.corpus.heldout
        sources = [s for s in PROSE if s in texts] if source == "prose" else [source]
        return [d for s in sources for d in texts[s]]

    def tokens(self, source: str) -> list[list[int]]:
        """Training documents as ids between <bos> and <eos>."""
        if source not in self._tokens:
            texts = [d.text for d in self.documents("train", source)]
            found = self.tokenizer.encode_batch(texts, add_special_tokens=False)
            self._tokens[source] = [[BOS, *e.ids, EOS] for e in found]
        return self._tokens[source]

    def log(self, *words: object) -> None:
        """Print at once."""
        print(time.strftime("%H:%M:%S"), *words, flush=True)


def train_tokenizer(run: Run, folder: Path) -> None:
    """Byte-level BPE on training text, saved so that transformers 4.57 and 5 both load it."""
    settings, rng = run.settings, random.Random(run.settings.seed)
    texts: list[str] = []
    for source, share in settings.base_mix:
        documents, room = run.documents("train", source), share * settings.tokenizer_chars
        rng.shuffle(documents)
        for document in documents:
            if room <= 0:
                break
            texts.append(document.text)
            room -= len(document.text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=settings.vocabulary, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    ))  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": settings.context,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<user>", "<assistant>"],
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (folder / "tokenizer.json").write_text(compact + "\n", "utf-8")


def conversation(tokenizer: Tokenizer, prompt: str, response: str, limit: int) -> Row:
    """<bos><user>prompt<assistant>response<eos>, with labels on the response and <eos> only."""
    head = [BOS, USER, *tokenizer.encode(prompt).ids, ASSISTANT]
    tail = [*tokenizer.encode(response).ids, EOS]
    return (head + tail)[:limit], ([-100] * len(head) + tail)[:limit]


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels. Attention is causal, so what is padded never reaches a label."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([r + [PAD] * (longest - len(r)) for r, _ in rows])
    labels = torch.tensor([r + [-100] * (longest - len(r)) for _, r in rows])
    return ids, labels


def load(run: Run, name: str) -> LlamaForCausalLM:
    """A saved model in float32."""
    return AutoModelForCausalLM.from_pretrained(run.out / name, dtype=torch.float32)


def save(run: Run, model: LlamaForCausalLM, name: str) -> None:
    """bfloat16 weights, configuration and tokenizer; complete or not there."""
    partial, state = run.out / f".{name}", model.state_dict()
    shutil.rmtree(partial, ignore_errors=True)
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(state)
    half.config.dtype = torch.bfloat16
    half.save_pretrained(partial)
    model.config.dtype = torch.float32
    _ = run.tokenizer
    shutil.copytree(run.out / "tokenizer", partial, dirs_exist_ok=True)
    (partial / "model.safetensors").chmod(0o644)
    partial.rename(run.out / name)


def mean_loss(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Nats per labelled token."""
    logits = model(input_ids=ids).logits[:, :-1]
    return cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1), ignore_index=-100)


def log_likelihood(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed log-probability of the labelled tokens of each sequence."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    flat, targets = logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    return -cross_entropy(flat, targets, ignore_index=-100, reduction="none").view(len(ids), -1).sum(1)
