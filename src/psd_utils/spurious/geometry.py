"""Where the hidden states lie before, during and after the collapse (descriptive).

In: a world and a run that kept its weights. Out: one row for each step and population.

Source: Palit et al. (2026), toy model, hidden geometry.
"""

from collections.abc import Sequence

import pandas as pd
import torch

from psd_utils.spurious.measure import reference
from psd_utils.spurious.memory import Facts, World
from psd_utils.spurious.trajectory import Trajectory


def geometry(world: World, run: Trajectory, steps: Sequence[int]) -> pd.DataFrame:
    """Where the raw states of A, B and the new facts lie (descriptive), at kept steps.

    Returns:
        step, population, shared_share (share of ‖h‖² along c = μᵀW), cosine_within (mean cosine between two
        facts of the population), cosine_with_A (with facts of A), own_alignment (cosine of the part of h
        outside the population's mean with the fact's own readout column), tilt (⟨mean h, w⟩, units of h).
        Means over facts and seeds.
    """
    ref_w = reference(world, run.weights_at(0)).w
    rows = []
    for step in steps:
        now = run.weights_at(step)
        shared = torch.bmm(world.shared_key.unsqueeze(1), now.W)
        shared = shared / torch.linalg.vector_norm(shared, dim=-1, keepdim=True)
        states = {name: torch.bmm(f.keys, now.W) for name, f in _populations(world).items()}
        units = {n: h / torch.linalg.vector_norm(h, dim=-1, keepdim=True) for n, h in states.items()}
        columns = now.U / torch.linalg.vector_norm(now.U, dim=1, keepdim=True)
        for name, facts in _populations(world).items():
            h, unit = states[name], units[name]
            n = h.shape[1]
            gram = torch.bmm(unit, unit.transpose(1, 2))
            mean = h.mean(1, keepdim=True)
            own = torch.nn.functional.normalize(h - mean, dim=-1)
            column = columns.transpose(1, 2).gather(1, facts.answers.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
            rows.append(
                {
                    "step": step,
                    "population": name,
                    "shared_share": (unit * shared).sum(-1).square().mean().item(),
                    "cosine_within": ((gram.sum((1, 2)) - n) / (n * (n - 1))).mean().item() if n > 1 else 1.0,
                    "cosine_with_A": torch.bmm(unit, units["A"].transpose(1, 2)).mean().item(),
                    "own_alignment": (own * column).sum(-1).mean().item(),
                    "tilt": (mean.squeeze(1) * ref_w).sum(-1).mean().item(),
                }
            )
    return pd.DataFrame(rows)


def _populations(world: World) -> dict[str, Facts]:
    return {"A": world.A, "B": world.B, "new": world.new}
