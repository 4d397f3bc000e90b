"""Hidden knowledge or erosion: a stated rule from measured numbers to a sentence.

In: tidy tables of the checkpoints. Out: a Verdict for each checkpoint, with the numbers it rests on. Pure functions.

The rule. Recall is that of the answers' first tokens.

1. *Neither* if there are fewer than `least_facts` old facts, if the base knows less than `least_known` of them, or if
   the loss of recall is below `least_loss` or below two standard errors: there is nothing to explain.
2. *Collapse that is still hidden knowledge* if at least `hidden_share` of the loss comes back when what the facts
   share is taken away, in one of two ways. On the states: the mean change of the *other* facts is subtracted (one
   mean, or one per relation). On the weights: the leading directions of each update are removed, where the model so
   edited is compared with the trained one *at equal new-fact recall*, and with its random control.
3. *Erosion* otherwise: the facts differ from their old states each in its own way.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from psd_utils.spurious.decomposition import ALL

HIDDEN = "collapse that is still hidden knowledge"
EROSION = "erosion"
NEITHER = "neither"


@dataclass(frozen=True)
class Rule:
    """Thresholds of the verdict, all shares of facts or of the loss.

    Attributes:
        least_facts: number of old facts below which nothing is said.
        least_known: recall of the base below which nothing is said.
        least_loss: loss of recall below which nothing has happened.
        hidden_share: share of the loss that must come back.
        widest_bracket: two checkpoints whose new-fact recall differs by more are too far apart to compare between.
    """

    least_facts: int = 15
    least_known: float = 0.5
    least_loss: float = 0.1
    hidden_share: float = 0.5
    widest_bracket: float = 0.25


RULE = Rule()


@dataclass(frozen=True)
class Verdict:
    """One of HIDDEN, EROSION and NEITHER, why, and the numbers it rests on."""

    name: str
    sentence: str
    evidence: Mapping[str, Any]


def equal_recall(curves: pd.DataFrame, rule: Rule = RULE) -> pd.DataFrame:
    """Each edited checkpoint beside the trained model at the same new-fact recall: a rewind gains nothing here.

    The trained model's old-fact recall is interpolated along its path over checkpoints, where its new-fact recall is
    that of the edited one; of several such places the one nearest in steps.

    Args:
        curves: checkpoint, step, edit, old, new (recall, 0–1), with the base as step 0 of the edit "trained".
        rule: for the widest bracket.

    Returns:
        checkpoint, step, edit, new, old, old_trained (NaN where the trained model never has that recall), new_below
        and new_above (at the two checkpoints interpolated between), coarse (these are too far apart), gain (old −
        old_trained).
    """
    path = curves[curves["edit"] == "trained"].sort_values("step")
    rows = []
    for row in curves[curves["edit"] != "trained"].to_dict("records"):
        at, low, high = _nearest_crossing(path, float(row["new"]), float(row["step"]))
        kept = {name: row[name] for name in ("checkpoint", "step", "edit", "new", "old")}
        coarse = not high - low <= rule.widest_bracket
        rows.append(
            kept | {"old_trained": at, "new_below": low, "new_above": high, "coarse": coarse, "gain": row["old"] - at}
        )
    columns = ["checkpoint", "step", "edit", "new", "old", "old_trained", "new_below", "new_above", "coarse", "gain"]
    return pd.DataFrame(rows, columns=columns)


def _nearest_crossing(path: pd.DataFrame, level: float, step: float) -> tuple[float, float, float]:
    """The old-fact recall where the path has this new-fact recall, and the new-fact recall on either side."""
    points = path[["step", "new", "old"]].to_numpy(float)
    found = (math.inf, math.nan, math.nan, math.nan)
    for (s0, n0, o0), (s1, n1, o1) in itertools.pairwise(points):
        if not min(n0, n1) <= level <= max(n0, n1):
            continue
        # on a level stretch every place has the recall: the one nearest in steps
        weight = (level - n0) / (n1 - n0) if n1 != n0 else min(max((step - s0) / (s1 - s0), 0.0), 1.0)
        away = abs(s0 + weight * (s1 - s0) - step)
        if away < found[0]:
            found = (away, o0 + weight * (o1 - o0), min(n0, n1), max(n0, n1))
    return found[1:]


def gather(
    facts: pd.DataFrame, shift: pd.DataFrame, equal: pd.DataFrame, checkpoint: str, base: str, rule: Rule = RULE
) -> dict[str, Any]:
    """The numbers that the rule needs, for one checkpoint.

    Args:
        facts: per-fact results: checkpoint, edit, set, fact, exact, first, choice.
        shift: from `decompose`, with checkpoint and set.
        equal: from `equal_recall`.
        checkpoint: which one.
        base: the label of the base.
        rule: for the least loss at which an edit is compared.

    Returns:
        facts (number), known, now, loss and its standard error (paired over facts), choice_known and choice_now (NaN
        without rivals), new_now, removed_one and removed_relation (recall with δ taken away), edit, edit_gain,
        control_gain and edit_loss (of the best edit that may be compared; NaN where none may).
    """
    trained = facts[facts["edit"] == "trained"]
    old = trained[trained["set"] == "old"].set_index(["checkpoint", "fact"])
    before, after = old.loc[base], old.loc[checkpoint]
    change = before["first"].astype(float) - after["first"].astype(float)
    n = len(change)
    new = trained[(trained["set"] == "new") & (trained["checkpoint"] == checkpoint)]
    whole = shift[(shift["checkpoint"] == checkpoint) & (shift["set"] == "old") & (shift["relation"] == ALL)]
    removed = whole.set_index("means")["common_removed"]
    known = float(before["first"].mean())
    found = {
        "facts": n,
        "known": known,
        "now": float(after["first"].mean()),
        "loss": float(change.mean()),
        "loss_se": float(np.sqrt(((change - change.mean()) ** 2).sum()) / n),
        "choice_known": float(before["choice"].mean()),
        "choice_now": float(after["choice"].mean()),
        "new_now": float(new["first"].mean()),
        "removed_one": float(removed["one"]),
        "removed_relation": float(removed["relation"]),
    }
    return found | _best_edit(equal[equal["checkpoint"] == checkpoint], known, rule)


def _best_edit(equal: pd.DataFrame, known: float, rule: Rule) -> dict[str, Any]:
    """The removal that brings most back, among those that may be compared, each with its random control."""
    best: dict[str, Any] = {"edit": None, "edit_gain": math.nan, "control_gain": math.nan, "edit_loss": math.nan}
    usable = {row["edit"]: row for row in equal.to_dict("records") if not row["coarse"]}
    for name, row in usable.items():
        kind, rank = name.rsplit("_", 1)
        loss = known - row["old_trained"]
        control = usable.get(f"random_{rank}")
        if kind != "remove" or control is None or not loss >= rule.least_loss:
            continue
        found = {"edit": name, "edit_gain": row["gain"], "control_gain": control["gain"], "edit_loss": loss}
        if best["edit"] is None or _edit_share(found) > _edit_share(best):
            best = found
    return best


def _edit_share(evidence: Mapping[str, Any]) -> float:
    gain: float = evidence["edit_gain"] - max(evidence["control_gain"], 0.0)
    return gain / float(evidence["edit_loss"])


def judge(evidence: Mapping[str, Any], rule: Rule = RULE) -> Verdict:
    """The verdict of the rule above on one checkpoint's numbers, in words."""
    known, now, loss, error = (evidence[name] for name in ("known", "now", "loss", "loss_se"))
    numbers = f"first-token recall of {evidence['facts']} old facts is {known:.2f} in the base and {now:.2f} here"
    found = dict(evidence) | {"rule": asdict(rule), "hidden_share": None}
    if evidence["facts"] < rule.least_facts:
        why = f"that is too few for a verdict (at least {rule.least_facts} are needed)"
        return Verdict(NEITHER, f"{NEITHER}: {numbers}; {why}.", found)
    if known < rule.least_known:
        why = f"the base knows too few of them to lose any (at least {rule.least_known:g} is needed)"
        return Verdict(NEITHER, f"{NEITHER}: {numbers}; {why}.", found)
    if loss < rule.least_loss or loss < 2 * error:
        why = f"a loss of {loss:.2f} ± {error:.2f} is below {rule.least_loss:g} or two standard errors"
        return Verdict(NEITHER, f"{NEITHER}: {numbers}; {why}.", found)
    shares = hidden_shares(evidence)
    way, share = max(shares.items(), key=lambda item: item[1])
    hidden = f"{min(share, 1):.0%} of the loss comes back when {way}"
    if not share >= rule.hidden_share:
        hidden = f"at most {max(share, 0):.0%} of the loss comes back, when {way}"
    name = HIDDEN if share >= rule.hidden_share else EROSION
    if math.isfinite(evidence["choice_now"]):
        chosen = f"{evidence['choice_now']:.2f} (base {evidence['choice_known']:.2f})"
        hidden += f"; among the candidate answers alone the right one wins for {chosen}"
    return Verdict(name, f"{name}: {numbers}; {hidden}.", found | {"hidden_share": share})


def hidden_shares(evidence: Mapping[str, Any]) -> dict[str, float]:
    """Way in words -> share of the loss that comes back that way; ways that could not be measured are left out."""
    loss = evidence["loss"]
    shares = {
        f"the mean change of the other facts{which} is subtracted from each state": (evidence[name] - evidence["now"])
        / loss
        for name, which in (("removed_one", ""), ("removed_relation", " of its relation"))
    }
    if evidence["edit"]:
        rank = str(evidence["edit"]).rsplit("_", 1)[1]
        way = f"the top {rank} direction(s) of every update are removed, at equal new-fact recall, beyond the control"
        shares[way] = _edit_share(evidence)
    return shares


def rebound(steps: np.ndarray, recall: np.ndarray) -> tuple[int, float]:
    """(step, rise): the place from which recall later rises most, and by how much; a rise of 0 if it never does."""
    rises = np.maximum.accumulate(recall[::-1])[::-1] - recall
    low = int(np.argmax(rises))
    return int(steps[low]), float(rises[low])
