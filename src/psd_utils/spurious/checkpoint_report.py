"""From what was measured of each checkpoint to recall, the comparison at equal new-fact recall, and the verdicts.

In: the tables of all models. Out: a CheckpointReport, and the same on disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from psd_utils.spurious.checkpoint_files import write_json, write_table
from psd_utils.spurious.decomposition import ALL
from psd_utils.spurious.verdict import Rule, Verdict, equal_recall, gather, judge, rebound


@dataclass(frozen=True)
class CheckpointReport:
    """What was found. All tables begin with checkpoint and step; the base has step 0.

    Attributes:
        facts: edit, set, fact, relation, exact, first, choice, log_prob (nats, summed over tokens), tokens.
        recall: from `recall_table`.
        shift: set and the columns of `decompose`.
        updates: matrix, norm (Frobenius), share_1, … (share of its square in the top 1, … directions).
        equal: from `equal_recall`, with first-token recall.
        verdicts: label -> Verdict, for every checkpoint.
        summary: what summary.json holds.
        path: the folder.
    """

    facts: pd.DataFrame
    recall: pd.DataFrame
    shift: pd.DataFrame
    updates: pd.DataFrame
    equal: pd.DataFrame
    verdicts: Mapping[str, Verdict]
    summary: Mapping[str, Any]
    path: Path


def make_report(
    tables: Mapping[str, pd.DataFrame], labels: Sequence[str], about: Mapping[str, Any], folder: Path, rule: Rule
) -> CheckpointReport:
    """Judge all checkpoints and write the folder.

    Args:
        tables: facts, shift and updates of all models.
        labels: the base, then the checkpoints in order.
        about: what else summary.json says: settings and sources.
        folder: where it is written.
        rule: of the verdict.
    """
    base, *checkpoints = labels
    facts, shift = tables["facts"], tables["shift"]
    recall = recall_table(facts)
    curves = curves_of(recall)
    equal = equal_recall(curves, rule)
    found = {label: judge(gather(facts, shift, equal, label, base, rule), rule) for label in checkpoints}
    path = curves[curves["edit"] == "trained"].sort_values("step")
    low, rise = rebound(path["step"].to_numpy(), path["old"].to_numpy(float))
    last = checkpoints[-1]
    summary = {
        "sentence": f"{last}: {found[last].sentence}",
        "verdict": found[last].name,
        "rebound": {"from_step": low, "rise": rise},
        "verdicts": {
            label: {"verdict": v.name, "sentence": v.sentence, "evidence": dict(v.evidence)}
            for label, v in found.items()
        },
        **about,
    }
    for name, table in {**tables, "recall": recall, "equal_recall": equal}.items():
        write_table(folder / f"{name}.parquet", table)
    write_json(folder / "summary.json", summary)
    return CheckpointReport(facts, recall, shift, tables["updates"], equal, found, summary, folder)


def verdict_table(report: CheckpointReport) -> pd.DataFrame:
    """step, checkpoint, verdict, loss of first-token recall and its standard error, hidden_share (of the loss)."""
    steps = report.recall.drop_duplicates("checkpoint").set_index("checkpoint")["step"]
    names = ("loss", "loss_se", "hidden_share")
    rows = [
        {"step": steps[label], "checkpoint": label, "verdict": v.name} | {name: v.evidence[name] for name in names}
        for label, v in report.verdicts.items()
    ]
    return pd.DataFrame(rows)


def recall_table(facts: pd.DataFrame) -> pd.DataFrame:
    """Recall of each checkpoint, edit, set and relation ((all) for the set).

    Returns:
        checkpoint, step, edit, set, relation, facts, exact, first, choice (shares of facts; NaN without rivals) and
        log_prob_per_token (nats per token, a ratio of sums).
    """
    keys = ["checkpoint", "step", "edit", "set", "relation"]
    given = facts[facts["relation"].notna()]
    grouped = pd.concat([facts.assign(relation=ALL), given], ignore_index=True).groupby(keys, sort=False)
    table = grouped[["exact", "first", "choice"]].mean()
    table.insert(0, "facts", grouped.size())
    table["log_prob_per_token"] = grouped["log_prob"].sum() / grouped["tokens"].sum()
    return table.reset_index()


def curves_of(recall: pd.DataFrame) -> pd.DataFrame:
    """checkpoint, step, edit, old, new: first-token recall of both sets, for `equal_recall` and its picture."""
    whole = recall[recall["relation"] == ALL]
    keys = ["checkpoint", "step", "edit"]
    return whole.pivot_table(index=keys, columns="set", values="first", sort=False).reset_index()
