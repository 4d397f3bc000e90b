"""What a run leaves behind: measured quantities at checkpoints, and what is read off them.

In: the steps of a run as they happen. Out: a Trajectory, its tidy table and its summary per seed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from psd_utils.spurious.measure import measure, reference
from psd_utils.spurious.memory import MemorySettings, Weights, World, readout_states

EVENT_WINDOW = 400
"""The trough is sought up to this step, or slow erosion would be mistaken for the collapse."""


@dataclass(frozen=True)
class Trajectory:
    """One arm's run.

    Attributes:
        settings: the memory's settings.
        seeds: the seeds (S).
        rate: [S], learning rates.
        steps: the checkpoints (T), step 0 first.
        quantities: name -> [T, S]; see measure.QUANTITIES. With replay also accuracy_A_others (never
            replayed) and accuracy_A_replayed.
        kept: weights at the checkpoints that were kept.
    """

    settings: MemorySettings
    seeds: tuple[int, ...]
    rate: Tensor
    steps: tuple[int, ...]
    quantities: dict[str, Tensor]
    kept: dict[int, Weights]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.quantities:
            raise KeyError(f"No quantity {name!r}; this run measured: {', '.join(self.quantities)}.")
        return self.quantities[name]

    def at(self, name: str, step: int) -> Tensor:
        """A quantity at the checkpoint nearest to a step, [S]."""
        return self[name][self.nearest(step)]

    def nearest(self, step: int) -> int:
        """Position of the checkpoint nearest to a step."""
        return int(np.abs(np.array(self.steps) - step).argmin())

    def weights_at(self, steps: Sequence[int] | Tensor | int) -> Weights:
        """Kept weights, one step for every seed or each seed's own.

        Raises:
            KeyError: a step whose weights were not kept.
        """
        each = [steps] * len(self.seeds) if isinstance(steps, int) else [int(s) for s in steps]
        missing = sorted(set(each) - set(self.kept))
        if missing:
            raise KeyError(
                f"No weights kept at steps {missing[:5]}; run fine_tune with keep_weights=True, or with these steps."
            )
        rows = [self.kept[step] for step in each]
        return Weights(
            torch.stack([w.W[i] for i, w in enumerate(rows)]),
            torch.stack([w.U[i] for i, w in enumerate(rows)]),
        )

    def thin(self, steps: Sequence[int]) -> "Trajectory":
        """The same run as if it had been measured at fewer steps; steps it has no checkpoint for are left out."""
        places = [i for i, step in enumerate(self.steps) if step in set(steps)]
        quantities = {name: values[places] for name, values in self.quantities.items()}
        kept = {step: w for step, w in self.kept.items() if step in set(steps)}
        return replace(self, steps=tuple(self.steps[i] for i in places), quantities=quantities, kept=kept)

    def frame(self) -> pd.DataFrame:
        """Tidy table: step, seed, and one column for each quantity."""
        t, s = len(self.steps), len(self.seeds)
        columns = {name: q.reshape(-1).numpy() for name, q in self.quantities.items()}
        return pd.DataFrame({"step": np.repeat(self.steps, s), "seed": np.tile(self.seeds, t), **columns})

    def summary(self, window: float | Sequence[float] = EVENT_WINDOW, name: str = "accuracy_A") -> pd.DataFrame:
        """One row per seed: trough and its step, the highest value after it, the end, and the shared write.

        Args:
            window: last step at which the trough may lie, one for all seeds or one each.
            name: which accuracy.

        Returns:
            columns seed, rate, start, trough, trough_step, new_at_trough, max_after, recovery (max_after −
            trough), recovery_step (first step after the trough with 90 % of that rise), end, B_at_trough, B_end,
            probability_trough and probability_end (mean probability of A's right answers: lowest within the window,
            and at the end), gate_step (NaN if never), peak_content, peak_content_step, end_content (⟨s,w⟩),
            erosion_ratio (‖ε_a‖_h / its law, at the end).
        """
        windows = np.broadcast_to(np.asarray(window, dtype=float), len(self.seeds))
        steps = np.array(self.steps)
        rows = []
        for i, seed in enumerate(self.seeds):
            curve = self[name][:, i].numpy()
            low = int(curve[steps <= windows[i]].argmin())
            after = curve[low:]
            rise = after.max() - after[0]
            recovered = low + int((after >= after[0] + 0.9 * rise).argmax())
            content = self["shift_content"][:, i].numpy()
            learned = np.flatnonzero(self["accuracy_new"][:, i].numpy() >= 0.99)
            law = self["individual_law"][-1, i].item()
            likely = self["probability_A"][:, i].numpy()
            rows.append(
                {
                    "seed": seed,
                    "rate": self.rate[i].item(),
                    "start": curve[0],
                    "trough": curve[low],
                    "trough_step": steps[low],
                    "new_at_trough": self["accuracy_new"][low, i].item(),
                    "B_at_trough": self["accuracy_B"][low, i].item(),
                    "max_after": after.max(),
                    "recovery": rise,
                    "recovery_step": steps[recovered] if rise > 0 else math.nan,
                    "end": curve[-1],
                    "probability_trough": likely[steps <= windows[i]].min(),
                    "probability_end": likely[-1],
                    "B_end": self["accuracy_B"][-1, i].item(),
                    "gate_step": steps[learned[0]] if len(learned) else math.nan,
                    "peak_content": content.max(),
                    "peak_content_step": steps[content.argmax()],
                    "end_content": content[-1],
                    "erosion_ratio": self["individual_h"][-1, i].item() / law if law > 0 else math.nan,
                }
            )
        return pd.DataFrame(rows)


def checkpoint_steps(n_steps: int, dense_until: int = 200, every: int = 5, n_log: int = 60) -> tuple[int, ...]:
    """Step 0, every 5 steps to 200, then 60 log-spaced steps to the end; the last step is always among
    them.
    """
    steps = set(range(0, min(dense_until, n_steps) + 1, every)) | {n_steps}
    if n_steps > dense_until:
        steps |= set(np.geomspace(dense_until, n_steps, n_log + 1).round().astype(int).tolist())
    return tuple(sorted(steps))


def record(
    world: World,
    start: Weights,
    rate: Tensor,
    steps: Sequence[int],
    run: Iterable[tuple[int, Weights]],
    keep_weights: Iterable[int] | bool,
    replayed: Tensor | None,
) -> Trajectory:
    """Measure a run at the given steps as it goes by; `run` yields (step, live weights).

    Raises:
        FloatingPointError: weights that are no longer finite at a checkpoint.
    """
    ref = reference(world, start)
    wanted = set(steps)
    keep = (wanted if keep_weights else set()) if isinstance(keep_weights, bool) else set(keep_weights)
    rows: list[dict[str, Tensor]] = []
    kept: dict[int, Weights] = {}

    def look(step: int, now: Weights) -> None:
        if step in wanted:
            _refuse_divergence(world, step, now)
            rows.append(measure(world, now, ref) | _replay_accuracies(world, now, replayed))
        if step in keep:
            kept[step] = now.clone()

    look(0, start)
    for step, now in run:
        look(step, now)
    quantities = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return Trajectory(world.settings, world.seeds, rate.clone(), tuple(sorted(wanted)), quantities, kept)


def _refuse_divergence(world: World, step: int, now: Weights) -> None:
    finite = now.W.flatten(1).isfinite().all(1) & now.U.flatten(1).isfinite().all(1)
    if not bool(finite.all()):
        bad = [world.seeds[i] for i in (~finite).nonzero().flatten().tolist()]
        raise FloatingPointError(
            f"Training diverged by step {step} for seeds {bad}. Use a lower rate; match_rate finds one "
            "at which the new facts are learned at the agreed step."
        )


def _replay_accuracies(world: World, now: Weights, replayed: Tensor | None) -> dict[str, Tensor]:
    if replayed is None:
        return {}
    states = readout_states(world.A.keys, now, world.settings.normalisation)
    right = (torch.bmm(states, now.U).argmax(-1) == world.A.answers).double()
    inside = torch.zeros_like(right).scatter_(1, replayed, 1.0)
    others = (right * (1 - inside)).sum(1) / (1 - inside).sum(1)
    return {"accuracy_A_others": others, "accuracy_A_replayed": (right * inside).sum(1) / inside.sum(1)}
