"""Interventions that tell the reversible common shift from the real loss.

In: an arm's world and the weights it kept. Out: tidy tables of accuracies, one row per seed.

Source: Palit et al. (2026), causal interventions: offset subtraction, brief replay, replay during training,
surgery on the weight update, and the comparison at equal new-fact accuracy.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from psd_utils.spurious.arms import ArmResult
from psd_utils.spurious.measure import reference
from psd_utils.spurious.memory import Facts, Weights, World, fact_accuracy, generator, readout_states
from psd_utils.spurious.shift import (
    random_part,
    remove_direction,
    subtract_offset,
    top_directions,
)
from psd_utils.spurious.training import Replay, brief_training, fine_tune

SURGERIES = ("trained", "row", "top_1", "top_4", "random_1", "random_4")
"""What `surgery` removes from ΔW: nothing, the shared row, the top 1 or 4 singular directions, a random
control.
"""


def moments(arm: ArmResult) -> dict[str, Weights]:
    """The weights at each seed's own trough and at the end of the run.

    Raises:
        KeyError: the arm kept no weights there.
    """
    run = arm.trajectory
    trough = run.summary()["trough_step"].tolist()
    return {"trough": run.weights_at(trough), "end": run.weights_at(run.steps[-1])}


def offset_subtraction(
    world: World, start: Weights, now: Weights, n_facts: Sequence[int] = (1, 2, 4, 8), n_draws: int = 3
) -> pd.DataFrame:
    """Accuracy on A after the mean change of readout states is subtracted, with no training.

    Returns:
        seed, estimated_from ("none": as trained, "all", or a number k), accuracy. With k facts, the others
        are scored, and the mean over the random draws is given.

    Raises:
        ValueError: a k that leaves no other facts to score.
    """
    _check_sizes(world, n_facts)
    kind = world.settings.normalisation
    before = reference(world, start).x
    after = readout_states(world.A.keys, now, kind)
    n = world.settings.n_old

    def right(states: Tensor) -> Tensor:
        return (torch.bmm(states, now.U).argmax(-1) == world.A.answers).double()

    found: dict[str, Tensor] = {
        "none": right(after).mean(1),
        "all": right(subtract_offset(before, after)).mean(1),
    }
    draws = [generator(s, "offset") for s in world.seeds]
    orders = [torch.stack([torch.randperm(n, generator=g) for g in draws]) for _ in range(n_draws)]
    for k in n_facts:
        scores = []
        for order in orders:
            repaired = right(subtract_offset(before, after, order[:, :k]))
            scores.append(repaired.gather(1, order[:, k:]).mean(1))
        found[str(k)] = torch.stack(scores).mean(0)
    return _tidy(world, "estimated_from", found)


def brief_replay(
    world: World,
    now: Weights,
    rate: Tensor,
    n_facts: Sequence[int] = (1, 8, 32, 64),
    n_steps: Sequence[int] = (50, 200),
) -> pd.DataFrame:
    """Accuracy on the facts of A that were not replayed, after a few steps on k facts of A alone.

    Returns seed, n_facts, n_steps, accuracy. k facts are the first of each seed's random order, so that
    larger sets hold the smaller ones.

    Raises:
        ValueError: a k that leaves no other facts to score.
    """
    _check_sizes(world, n_facts)
    settings = world.settings
    draws = [generator(s, "replayed_facts") for s in world.seeds]
    order = torch.stack([torch.randperm(settings.n_old, generator=g) for g in draws])
    parts = []
    for k in n_facts:
        replayed, others = _facts_at(world.A, order[:, :k]), _facts_at(world.A, order[:, k:])
        for steps in n_steps:
            after = brief_training(replayed, now, rate, steps, settings, world.seeds)
            score = fact_accuracy(others, after, settings.normalisation)
            parts.append(pd.DataFrame({"seed": world.seeds, "n_facts": k, "n_steps": steps, "accuracy": score.numpy()}))
    return pd.concat(parts, ignore_index=True)


def replay_in_training(
    arm: ArmResult,
    n_facts: Sequence[int] = (0, 1, 4, 16, 64),
    per_step: Sequence[int] = (4, 16),
    n_steps: int = 3000,
) -> pd.DataFrame:
    """Trough, later maximum and end of A's never-replayed facts, with a few of A's facts in every batch.

    The extra samples are added to the 32 new ones and the loss is the mean over all of them. No facts to
    replay (0) is run once, with per_step 0.

    Returns:
        per_step, n_facts, then the columns of Trajectory.summary.

    Raises:
        ValueError: a number of facts that leaves no others to score.
    """
    _check_sizes(arm.world, [k for k in n_facts if k])
    parts = []
    if 0 in n_facts:
        run = fine_tune(arm.world, arm.pretrained.weights, arm.matched.rate, n_steps)
        parts.append(run.summary().assign(per_step=0, n_facts=0))
    for extra in per_step:
        for k in n_facts:
            if k == 0:
                continue
            run = fine_tune(arm.world, arm.pretrained.weights, arm.matched.rate, n_steps, replay=Replay(k, extra))
            parts.append(run.summary(name="accuracy_A_others").assign(per_step=extra, n_facts=k))
    table = pd.concat(parts, ignore_index=True)
    return table[["per_step", "n_facts", *[c for c in table.columns if c not in ("per_step", "n_facts")]]]


def edited(world: World, start: Weights, now: Weights, what: str) -> Weights:
    """The weights with part of the update ΔW = W − W₀ removed; U is left as it is.

    Args:
        world: for the shared key.
        start: W₀.
        now: W.
        what: one of SURGERIES. "random_r" removes a random rank-r matrix as large as the top-r part.

    Raises:
        ValueError: an unknown surgery.
    """
    if what not in SURGERIES:
        raise ValueError(f"No surgery {what!r}; expected one of {', '.join(SURGERIES)}.")
    change = now.W - start.W
    if what == "row":
        change = remove_direction(change, world.shared_key)
    elif what != "trained":
        kind, rank = what.split("_")
        top = top_directions(change, int(rank))
        if kind == "top":
            change = change - top.matrix
        else:
            norms = torch.linalg.vector_norm(top.values, dim=-1)
            draws = [generator(s, "random_control") for s in world.seeds]
            parts = [random_part(change[i], int(rank), norms[i], g) for i, g in enumerate(draws)]
            change = change - torch.stack(parts)
    return Weights(start.W + change, now.U)


def surgery(world: World, start: Weights, moments: dict[str, Weights], what: Sequence[str] = SURGERIES) -> pd.DataFrame:
    """Accuracies after each surgery at each moment: seed, moment, removed, accuracy_A, accuracy_B,
    accuracy_new.
    """
    kind = world.settings.normalisation
    parts = []
    for moment, now in moments.items():
        for removed in what:
            after = edited(world, start, now, removed)
            scores = {
                f"accuracy_{name}": fact_accuracy(facts, after, kind).numpy()
                for name, facts in (("A", world.A), ("B", world.B), ("new", world.new))
            }
            parts.append(pd.DataFrame({"seed": world.seeds, "moment": moment, "removed": removed, **scores}))
    return pd.concat(parts, ignore_index=True)


def surgery_curves(arm: ArmResult, what: Sequence[str] = ("trained", "row", "top_1")) -> pd.DataFrame:
    """`surgery` at every kept checkpoint after step 0, with `step` in place of `moment`."""
    kept = {str(step): w for step, w in sorted(arm.trajectory.kept.items()) if step > 0}
    table = surgery(arm.world, arm.pretrained.weights, kept, what)
    table["moment"] = table["moment"].astype(int)
    return table.rename(columns={"moment": "step"})


def equal_accuracy(
    curves: pd.DataFrame,
    levels: Sequence[float] = (0.7, 0.8, 0.9, 0.95),
    what: Sequence[str] = ("trained", "row"),
) -> pd.DataFrame:
    """Old-fact accuracy when the new facts are known equally well: the comparison that no rewind can win.

    For each seed and surgery, the first checkpoint is taken at which the new-fact accuracy of the *edited*
    model reaches the level; the edited model therefore stands at a later step than the trained one.

    Args:
        curves: from `surgery_curves`.
        levels: new-fact accuracies, 0–1.
        what: which surgeries.

    Returns:
        seed, removed, level, step, accuracy_A, accuracy_new; NaN where the level is never reached.
    """
    rows = []
    for (seed, removed), part in curves[curves["removed"].isin(what)].groupby(["seed", "removed"], sort=False):
        part = part.sort_values("step")
        for level in levels:
            reached = part[part["accuracy_new"] >= level]
            at = reached.iloc[0] if len(reached) else None
            rows.append(
                {
                    "seed": seed,
                    "removed": removed,
                    "level": level,
                    "step": np.nan if at is None else at["step"],
                    "accuracy_A": np.nan if at is None else at["accuracy_A"],
                    "accuracy_new": np.nan if at is None else at["accuracy_new"],
                }
            )
    return pd.DataFrame(rows)


def leading_directions(arm: ArmResult) -> pd.DataFrame:
    """How far the update's top singular direction is the shared key, at every kept checkpoint after step 0.

    Returns:
        step, seed, cosine |⟨u₁, μ⟩| (0–1), share_1 and share_4 (share of ‖ΔW‖² in the top 1 and 4
        directions).
    """
    start, key = arm.pretrained.weights.W, arm.world.shared_key
    parts = []
    for step, now in sorted(arm.trajectory.kept.items()):
        if step == 0:
            continue
        top = top_directions(now.W - start, 4)
        cosine = (top.left[..., 0] * key).sum(-1).abs()
        shares = top.share.cumsum(-1)
        parts.append(
            pd.DataFrame(
                {
                    "step": step,
                    "seed": arm.world.seeds,
                    "cosine": cosine.numpy(),
                    "share_1": shares[:, 0].numpy(),
                    "share_4": shares[:, 3].numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _check_sizes(world: World, n_facts: Sequence[int]) -> None:
    n = world.settings.n_old
    bad = [k for k in n_facts if not 1 <= k < n]
    if bad:
        raise ValueError(f"n_facts holds {bad}; expected 1 … {n - 1}, so that of A's {n} facts some are left to score.")


def _facts_at(facts: Facts, index: Tensor) -> Facts:
    keys = facts.keys.gather(1, index.unsqueeze(-1).expand(-1, -1, facts.keys.shape[-1]))
    return Facts(keys, facts.answers.gather(1, index))


def _tidy(world: World, name: str, found: dict[str, Tensor]) -> pd.DataFrame:
    parts = [pd.DataFrame({"seed": world.seeds, name: k, "accuracy": v.numpy()}) for k, v in found.items()]
    return pd.concat(parts, ignore_index=True)
