"""The common and the individual part of what fine-tuning did to the states of some facts, and what each part costs.

In: final states of the same facts before and after. Out: a tidy table, one row per way of taking means and relation.

A fact's own change is left out of the mean that is taken away from it. Otherwise a relation with few facts would be
"restored" by construction: with a single fact, the mean is its own change.
"""

import logging
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from psd_utils.spurious.prompts import Prompts
from psd_utils.spurious.recall import readout
from psd_utils.spurious.shift import Split, split_change

log = logging.getLogger(__name__)

LEAST_PER_RELATION = 15
"""Relations with fewer facts share one mean: the mean of a handful is mostly noise."""
SMALL = "(small relations)"
ALL = "(all)"


def relation_groups(prompts: Prompts, least: int = LEAST_PER_RELATION) -> tuple[Tensor, tuple[str, ...]]:
    """[facts] int64 groups and their names: one per relation with at least `least` facts, one for the others.

    A group of one fact joins the largest one, since it has no mean besides itself.
    """
    counts = torch.bincount(prompts.groups, minlength=len(prompts.relations))
    large = [name for name, n in zip(prompts.relations, counts.tolist(), strict=True) if n >= least]
    names = [name if name in large else SMALL for name in prompts.relations]
    labels = [names[g] for g in prompts.groups.tolist()]
    if labels.count(SMALL) == 1 and large:
        labels = [max(large, key=labels.count) if label == SMALL else label for label in labels]
    kept = tuple(sorted(set(labels)))
    return torch.tensor([kept.index(label) for label in labels]), kept


def others_mean(split: Split) -> Tensor:
    """[items, features], for each item the mean change of the *other* items of its group; zero where there are none."""
    counts = torch.bincount(split.groups)[split.groups].unsqueeze(-1).to(split.common)
    return (counts * split.common_per_item - split.change) / (counts - 1).clamp(min=1)


def decompose(model: Any, before: Tensor, after: Tensor, prompts: Prompts) -> pd.DataFrame:
    """Sizes of the two parts, and first-token recall through the model's own output head with one of them alone.

    Args:
        model: the fine-tuned model, for its head.
        before: [facts, width], states of the base model.
        after: [facts, width], states of the fine-tuned model.
        prompts: the facts.

    Returns:
        means ("one": a single mean over all facts, "relation": one for each), relation ((all) for the set), facts,
        common (‖δ‖; over a set the root mean square over facts), individual (rms ‖ε‖; common² + individual² is the
        mean squared change), common_share (of the squared change, 0–1; NaN without a change), state (rms of the
        base's states), and first-token recall: trained, common_removed (δ of the other facts taken away),
        common_only (base's state plus that δ), head_only (base's state).

    Raises:
        ValueError: as `split_change`.
    """
    answers = torch.tensor([a[0] for a in prompts.answer_ids])
    before = before.double()
    after = after.double()

    def recalled(states: Tensor) -> Tensor:
        return (readout(model, states).argmax(-1) == answers).double()

    ways = {"one": (torch.zeros(len(prompts), dtype=torch.long), (ALL,)), "relation": relation_groups(prompts)}
    rows = []
    for means, (groups, names) in ways.items():
        split = split_change(before, after, groups)
        mean = others_mean(split)
        of_fact = {
            "common": split.common_per_item.square().sum(-1),
            "individual": split.individual.square().sum(-1),
            "state": before.square().sum(-1),
            "trained": recalled(after),
            "common_removed": recalled(after - mean),
            "common_only": recalled(before + mean),
            "head_only": recalled(before),
        }
        chosen = {ALL: torch.ones(len(prompts), dtype=torch.bool)}
        if len(names) > 1:
            chosen |= {name: groups == i for i, name in enumerate(names)}
        for relation, mask in chosen.items():
            found = {name: float(values[mask].mean()) for name, values in of_fact.items()}
            change = found["common"] + found["individual"]
            share = found["common"] / change if change > 0 else float("nan")
            for name in ("common", "individual", "state"):
                found[name] = found[name] ** 0.5
            rows.append(
                {"means": means, "relation": relation, "facts": int(mask.sum()), **found, "common_share": share}
            )
    return pd.DataFrame(rows)
