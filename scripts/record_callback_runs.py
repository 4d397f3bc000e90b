"""Record what the training callback would see on runs of the small transformer, and what was true there.

    python scripts/record_callback_runs.py data/spurious/callback_runs.csv --seeds 10

A row per condition, seed and step: recall of the old facts, the sizes of both parts of their change, recall with the
common part removed. At some steps also the truth that the rule is judged by: how much comes back to *other* old people
in a brief replay of a few (50 steps on 8 people at the rate of fine-tuning). Finished runs are not made again.
"""

import argparse
import copy
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import torch

from psd_utils.spurious.biographies import People, generator
from psd_utils.spurious.biography_batches import Batch, training_batch
from psd_utils.spurious.biography_language import Sentences
from psd_utils.spurious.decomposition import others_mean
from psd_utils.spurious.shift import split_change
from psd_utils.spurious.transformer import Decoder, next_token_loss
from psd_utils.spurious.transformer_measure import Reading, make_questions, read
from psd_utils.spurious.transformer_runs import CONDITIONS, Study
from psd_utils.spurious.transformer_training import evaluation_steps, inject, make_optimiser, pretrain

REPLAYED, REPLAY_STEPS, LENGTH = 8, 50, 800
TRUTH_AT = (*range(40, 281, 40), 400, 600, 800)


def numbers(model: Decoder, now: Reading, before: Reading) -> dict[str, float]:
    """The columns of a callback's log, for one step; each attribute is a relation."""
    n_attributes, n, width = now.states.shape
    groups = torch.arange(n_attributes).repeat_interleave(n)
    old, new = (r.states.reshape(-1, width).double() for r in (before, now))
    split = split_change(old, new, groups)
    answers = now.answers.reshape(-1)
    removed = model.head((new - others_mean(split)).float()).argmax(-1)
    return {
        "old": float((now.logits.argmax(-1) == now.answers).double().mean()),
        "common": float(split.common_per_item.square().sum(-1).mean().sqrt()),
        "individual": float(split.individual.square().sum(-1).mean().sqrt()),
        "common_removed": float((removed == answers).double().mean()),
    }


def first(people: People, n: int) -> People:
    """The first few people of a population."""
    sentences = replace(people.sentences, **{f.name: getattr(people.sentences, f.name)[:n] for f in fields(Sentences)})
    cut = {name: getattr(people, name)[:n] for name in ("names", "values", "answers", "in_x", "phrasings", "prompts")}
    return replace(people, sentences=sentences, **cut)


def replayed(model: Decoder, study: Study, people: People, questions: Batch, seed: int, step: int) -> float:
    """Recall of the other old people after a brief replay of the first few, on a copy."""
    copied, few, training = copy.deepcopy(model), first(people, REPLAYED), study.training
    optimiser = make_optimiser(copied, training, training.injection_rate)
    for i in range(REPLAY_STEPS):
        batch = training_batch(few, training.batch_size, generator(seed, "evaluation", step, i))
        next_token_loss(copied, batch.tokens, batch.counted).backward()
        torch.nn.utils.clip_grad_norm_(copied.parameters(), training.clip)
        optimiser.step()
        optimiser.zero_grad()
    reading = read(copied, questions)
    right = (reading.logits.argmax(-1) == reading.answers).double()
    return float(right[:, REPLAYED:].mean())


def record(condition: str, seed: int, starts: dict[str, Decoder]) -> pd.DataFrame:
    """One run; `starts` keeps pretrained models that conditions share."""
    study, chosen = Study(n_steps=LENGTH), CONDITIONS[condition]
    world, settings = study.world(chosen, seed), study.model(chosen)
    if str(settings) not in starts:
        starts[str(settings)] = pretrain(world, settings, study.training)
    start = starts[str(settings)]
    questions = make_questions(world).batches
    before = read(start, questions["A"])
    rows = []
    for moment in inject(world, start, evaluation_steps(LENGTH), study.injection(chosen), study.training):
        now, new = read(moment.model, questions["A"]), read(moment.model, questions["new"])
        row = {"condition": condition, "seed": seed, "step": moment.step, **numbers(moment.model, now, before)}
        row["new"] = float((new.logits.argmax(-1) == new.answers).double().mean())
        others = (now.logits.argmax(-1) == now.answers).double()[:, REPLAYED:]
        row["others"] = float(others.mean())
        if moment.step in TRUTH_AT:
            row["others_after_replay"] = replayed(moment.model, study, world.A, questions["A"], seed, moment.step)
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Record what is missing, a run at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--conditions", nargs="+", default=["B_prime", "C", "no_final_norm"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = pd.read_csv(given.path) if given.path.is_file() else pd.DataFrame(columns=["condition", "seed"])
    for seed in range(given.first, given.first + given.seeds):
        starts: dict[str, Decoder] = {}
        for condition in given.conditions:
            if ((table["condition"] == condition) & (table["seed"] == seed)).any():
                continue
            table = pd.concat([table, record(condition, seed, starts)], ignore_index=True)
            part = given.path.with_suffix(".part")
            table.round(5).to_csv(part, index=False)
            part.replace(given.path)
            print(condition, seed, flush=True)


if __name__ == "__main__":
    main()
