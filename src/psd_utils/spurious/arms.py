"""The arms of the study: the model, and the model with one ingredient taken away or held fixed.

In: the names of arms, seeds and a base setting. Out: each arm's world, matched rate and trajectory.

Source: Palit et al. (2026), the three ingredients of spurious forgetting and their ablations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from psd_utils.spurious.memory import BASE, MemorySettings, World, make_world
from psd_utils.spurious.training import (
    PAPER,
    MatchedRate,
    Pretrained,
    Protocol,
    fine_tune,
    match_rate,
    pretrain,
)
from psd_utils.spurious.trajectory import Trajectory


@dataclass(frozen=True)
class Arm:
    """One arm: what it changes in the base settings, and how the legend calls it.

    Attributes:
        label: for figures.
        changes: fields of MemorySettings that differ from the base.
        rate_of: the arm whose matched rate is used; None for its own. The projected arm runs at the model's
            rate, so that one sees the new facts being learned earlier.
    """

    label: str
    changes: dict[str, Any] = field(default_factory=dict)
    rate_of: str | None = None


ARMS = {
    "model": Arm("model: B′, shared keys, RMS"),
    "relu": Arm("ReLU instead of RMS", {"normalisation": "relu"}),
    "linear": Arm("no normalisation", {"normalisation": "none"}),
    "alpha_0": Arm("no shared key (α = 0)", {"alpha": 0.0}),
    "all_values": Arm("C: new answers in X and Y", {"new_answers": "all"}),
    "projected": Arm("shared row projected out", {"project_shared": True}, rate_of="model"),
    "frozen_readout": Arm("readout frozen", {"readout_rate": 0.0}),
}


@dataclass(frozen=True)
class ArmResult:
    """One arm's run.

    Attributes:
        name: key of ARMS, or the caller's own.
        world: the facts.
        pretrained: the model before fine-tuning.
        matched: the rate and its gate step, as found by matching (for a borrowed rate: the lender's).
        trajectory: what was measured.
    """

    name: str
    world: World
    pretrained: Pretrained
    matched: MatchedRate
    trajectory: Trajectory

    def summary(self) -> pd.DataFrame:
        """Trajectory.summary with the arm's name in front."""
        table = self.trajectory.summary()
        table.insert(0, "arm", self.name)
        return table


def arm_settings(name: str, base: MemorySettings = BASE) -> MemorySettings:
    """The settings of an arm.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ARMS:
        raise ValueError(f"No arm {name!r}; expected one of {', '.join(ARMS)}.")
    return replace(base, **ARMS[name].changes)


def run_arms(
    names: Sequence[str],
    seeds: Sequence[int],
    n_steps: int = 5000,
    base: MemorySettings = BASE,
    protocol: Protocol = PAPER,
    keep_weights: Sequence[str] = ("model",),
    progress: bool = False,
) -> dict[str, ArmResult]:
    """Pretrain, match the gate and fine-tune each arm; arms that share pretraining share its result.

    Args:
        names: keys of ARMS.
        seeds: the seeds, run as one batch.
        n_steps: fine-tuning steps.
        base: settings that the arms change.
        protocol: how training is run.
        keep_weights: arms that keep their weights at every checkpoint (for interventions; 16 MB a seed at the
            base sizes and 5,000 steps).
        progress: show progress bars.

    Raises:
        ValueError: an unknown arm.
        RuntimeError: pretraining failed.
        FloatingPointError: a run diverged.
    """
    pretrained: dict[MemorySettings, Pretrained] = {}
    rates: dict[str, MatchedRate] = {}
    results = {}
    for name in tqdm(names, desc="arms", disable=not progress, leave=False):
        settings = arm_settings(name, base)
        world = make_world(settings, seeds)
        start = _pretrained(world, pretrained, protocol)
        lender = ARMS[name].rate_of
        if lender is not None and lender not in rates:
            lender_world = make_world(arm_settings(lender, base), seeds)
            rates[lender] = match_rate(lender_world, _pretrained(lender_world, pretrained, protocol), protocol)
        rates[name] = match_rate(world, start, protocol) if lender is None else rates[lender]
        run = fine_tune(
            world,
            start.weights,
            rates[name].rate,
            n_steps,
            keep_weights=name in keep_weights,
            progress=progress,
        )
        results[name] = ArmResult(name, world, start, rates[name], run)
    return results


def _pretrained(world: World, known: dict[MemorySettings, Pretrained], protocol: Protocol) -> Pretrained:
    key = world.settings.before_fine_tuning
    if key not in known:
        known[key] = pretrain(world, protocol)
    return known[key]


def mean_curves(results: dict[str, ArmResult], quantities: Sequence[str]) -> pd.DataFrame:
    """Mean and standard deviation over seeds at every checkpoint: arm, step, quantity, mean, sd, n."""
    parts = []
    for name, result in results.items():
        for quantity in quantities:
            values: Tensor = result.trajectory[quantity]
            sd = values.std(1) if values.shape[1] > 1 else torch.zeros(len(values), dtype=values.dtype)
            parts.append(
                pd.DataFrame(
                    {
                        "arm": name,
                        "step": result.trajectory.steps,
                        "quantity": quantity,
                        "mean": values.mean(1).numpy(),
                        "sd": sd.numpy(),
                        "n": values.shape[1],
                    }
                )
            )
    return pd.concat(parts, ignore_index=True)


def summary_table(results: dict[str, ArmResult]) -> pd.DataFrame:
    """One row per arm: means over seeds of the summary, and the standard deviations of trough and end."""
    table = pd.concat([r.summary() for r in results.values()], ignore_index=True)
    means = table.drop(columns="seed").groupby("arm", sort=False).mean()
    spread = table.groupby("arm", sort=False)[["trough", "max_after", "end"]].std().add_suffix("_sd")
    return means.join(spread).reset_index()
