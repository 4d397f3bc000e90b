"""What is logged along a run: accuracies, the shared write, common and individual change, the margins.

In: the world, the weights before fine-tuning and the weights now. Out: one number per seed for each quantity.

Source: Palit et al. (2026), toy model, quantities; names as in the paper. W₀, U₀ are the pretrained weights
and ΔW = W − W₀. See QUANTITIES for what each name means and its unit.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from psd_utils.spurious.memory import (
    Facts,
    MemorySettings,
    Weights,
    World,
    accuracy,
    normalise,
    raw_states,
    region_direction,
)
from psd_utils.spurious.shift import common_only, individual_only, remove_direction, split_change

QUANTITIES = {
    "accuracy_A": "share of A answered correctly, 0–1",
    "accuracy_B": "share of B answered correctly, 0–1",
    "accuracy_new": "share of the new facts answered correctly, 0–1",
    "own_half_A": "share of A answered correctly when only answers of region X may be given, 0–1",
    "probability_A": "mean probability of the right answer on A, 0–1",
    "probability_B": "mean probability of the right answer on B, 0–1",
    "probability_new": "mean probability of the right answer on the new facts, 0–1",
    "loss_A": "mean cross-entropy on A, nats",
    "loss_B": "mean cross-entropy on B, nats",
    "loss_new": "mean cross-entropy on the new facts, nats",
    "shared_write": "‖s‖, length of the shared row s = μᵀΔW, units of h",
    "shared_share": "‖s‖²/‖ΔW‖², share of the change that the shared row holds, 0–1",
    "shift_content": "⟨s,w⟩, the shared row's part along the direction from X to Y, units of h",
    "common": "‖δ‖, length of the common shift of A's readout states",
    "individual": "mean length of A's individual displacements ε_a, readout states",
    "common_h": "‖δ‖ on the raw states h",
    "individual_h": "root mean square length of ε_a on the raw states h",
    "individual_law": "√((1−α)/d)·‖ΔW_⊥‖_F, what the erosion identity predicts for individual_h",
    "state_length": "s̄ = ‖mean_a h_a‖, length of A's mean raw state",
    "margin_new": "mean over new facts of z_y − E_p[z], logits",
    "shared_margin": "Ḡ, mean over new facts of the margin along A's mean state",
    "individual_margin": "M̄, mean over new facts of the margin across A's mean state",
    "common_only_A": "accuracy on A if only the common part of the logit change had happened, 0–1",
    "individual_only_A": "accuracy on A if only the individual part of the logit change had happened, 0–1",
}


@dataclass(frozen=True)
class Reference:
    """What the pretrained model says, against which every change is measured.

    Attributes:
        weights: the pretrained weights.
        h: raw states of A, [S, n, d].
        x: readout states of A, [S, n, d].
        z: logits of A, [S, n, |V|].
        w: unit direction from X to Y in the readout, [S, d].
    """

    weights: Weights
    h: Tensor
    x: Tensor
    z: Tensor
    w: Tensor


def reference(world: World, weights: Weights) -> Reference:
    """The pretrained model's states and logits on A."""
    h = raw_states(world.A.keys, weights)
    x = normalise(h, world.settings.normalisation)
    return Reference(weights.clone(), h, x, torch.bmm(x, weights.U), region_direction(weights.U))


def shared_row(world: World, change: Tensor) -> Tensor:
    """s = μᵀΔW, [S, d], the row of the change that the shared key writes."""
    return torch.bmm(world.shared_key[:, None], change)[:, 0]


def confidence_margin(z: Tensor, answers: Tensor) -> Tensor:
    """γ = z_y − Σ_v p(v) z_v for each fact, [S, n], in logits (paper: the margin that sets the normaliser's
    sign).
    """
    right = z.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    return right - (torch.softmax(z, -1) * z).sum(-1)


def split_margins(h: Tensor, z: Tensor, answers: Tensor, readout: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    """Shared and individual margins of facts, and the angle to the mean state.

    Source: the reduced equation of Palit et al. (2026). With m = mean/‖mean‖ and q_b the unit vector of
    h_b − (m·h_b) m: G_b = (Uᵀm)_y − pᵀUᵀm and M_b = (Uᵀq_b)_y − pᵀUᵀq_b.

    Args:
        h: raw states, [S, n, d].
        z: logits, [S, n, |V|].
        answers: [S, n].
        readout: U, [S, d, |V|].
        mean: mean raw state of A, [S, d].

    Returns:
        G, M, cos θ and sin θ, each [S, n], where θ is the angle between h_b and the mean.
    """
    p = torch.softmax(z, -1)
    unit = mean / torch.linalg.vector_norm(mean, dim=-1, keepdim=True)
    along = torch.bmm(h, unit.unsqueeze(-1))
    across = h - along * unit.unsqueeze(1)
    length = torch.linalg.vector_norm(h, dim=-1)
    across_length = torch.linalg.vector_norm(across, dim=-1)
    score_m = torch.bmm(unit.unsqueeze(1), readout)
    G = score_m.expand_as(p).gather(-1, answers.unsqueeze(-1)).squeeze(-1) - (p * score_m).sum(-1)
    score_q = torch.bmm(across / across_length.unsqueeze(-1), readout)
    M = score_q.gather(-1, answers.unsqueeze(-1)).squeeze(-1) - (p * score_q).sum(-1)
    return G, M, along.squeeze(-1) / length, across_length / length


def measure(world: World, weights: Weights, ref: Reference) -> dict[str, Tensor]:
    """Every quantity of QUANTITIES now, each [S] float64."""
    settings = world.settings
    out: dict[str, Tensor] = {}
    h_a, x_a, z_a = _states(world.A, weights, settings)
    _, _, z_b = _states(world.B, weights, settings)
    h_n, _, z_n = _states(world.new, weights, settings)
    for name, facts, z in (("A", world.A, z_a), ("B", world.B, z_b), ("new", world.new, z_n)):
        logp = torch.log_softmax(z, -1).gather(-1, facts.answers.unsqueeze(-1)).squeeze(-1)
        out[f"accuracy_{name}"] = accuracy(z, facts.answers)
        out[f"probability_{name}"] = logp.exp().mean(-1)
        out[f"loss_{name}"] = -logp.mean(-1)
    out["own_half_A"] = accuracy(z_a[..., : settings.n_values_x], world.A.answers)

    change = weights.W - ref.weights.W
    s = shared_row(world, change)
    total = change.square().sum((-2, -1))
    out["shared_write"] = torch.linalg.vector_norm(s, dim=-1)
    out["shared_share"] = torch.where(total > 0, s.square().sum(-1) / torch.where(total > 0, total, 1.0), 0.0)
    out["shift_content"] = (s * ref.w).sum(-1)

    for name, before, after in (("", ref.x, x_a), ("_h", ref.h, h_a)):
        split = split_change(before, after)
        lengths = torch.linalg.vector_norm(split.individual, dim=-1)
        out["common" + name] = torch.linalg.vector_norm(split.common[:, 0], dim=-1)
        out["individual" + name] = lengths.mean(-1) if name == "" else lengths.square().mean(-1).sqrt()
    rest = remove_direction(change, world.shared_key)
    scale = math.sqrt((1 - settings.alpha) / settings.dimension)
    out["individual_law"] = scale * torch.linalg.matrix_norm(rest)

    mean_state = h_a.mean(1)
    G, M, _, _ = split_margins(h_n, z_n, world.new.answers, weights.U, mean_state)
    out["state_length"] = torch.linalg.vector_norm(mean_state, dim=-1)
    out["margin_new"] = confidence_margin(z_n, world.new.answers).mean(-1)
    out["shared_margin"] = G.mean(-1)
    out["individual_margin"] = M.mean(-1)

    split = split_change(ref.z, z_a)
    out["common_only_A"] = accuracy(common_only(ref.z, split), world.A.answers)
    out["individual_only_A"] = accuracy(individual_only(ref.z, split), world.A.answers)
    return out


def _states(facts: Facts, weights: Weights, settings: MemorySettings) -> tuple[Tensor, Tensor, Tensor]:
    h = raw_states(facts.keys, weights)
    x = normalise(h, settings.normalisation)
    return h, x, torch.bmm(x, weights.U)
