"""The equations of motion: the gradient's two terms, the force on the shared row, the reduced scalar
equation.

In: a world, weights, a rate. Out: the terms themselves, and a run's measured course beside the predicted one.

Source: Palit et al. (2026), toy model. With x = φ(h), p = softmax(x U), γ = z_y − Σ_v p(v) z_v and ĥ = h/‖h‖,

    ∂ℓ/∂h = (√d/‖h‖) U(p − e_y) + (γ/‖h‖) ĥ                                   (RMS normaliser)

The second term exists only with the normaliser. While a new fact is wrong (γ < 0) it lengthens the state,
once it is right (γ > 0) it shortens it: that withdraws the shared shift.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from psd_utils.spurious.descent import Batches, descend
from psd_utils.spurious.measure import confidence_margin, reference, shared_row, split_margins
from psd_utils.spurious.memory import Facts, Normalisation, Weights, World, normalise, raw_states
from psd_utils.spurious.trajectory import checkpoint_steps


@dataclass(frozen=True)
class StateGradient:
    """∂ℓ/∂h of each fact, [S, n, d], as a sum of two terms.

    Attributes:
        plain: the term that would be there without the normaliser's derivative along h.
        normaliser: the term along ĥ; zero without RMS normalisation.
        margin: γ, [S, n], logits.
    """

    plain: Tensor
    normaliser: Tensor
    margin: Tensor

    @property
    def total(self) -> Tensor:
        """∂ℓ/∂h, [S, n, d]."""
        return self.plain + self.normaliser


def state_gradient(h: Tensor, answers: Tensor, readout: Tensor, normalisation: Normalisation) -> StateGradient:
    """The gradient of each fact's loss with respect to its raw state.

    Args:
        h: raw states, [S, n, d].
        answers: [S, n].
        readout: U, [S, d, |V|].
        normalisation: φ.
    """
    d = h.shape[-1]
    z = torch.bmm(normalise(h, normalisation), readout)
    margin = confidence_margin(z, answers)
    error = torch.softmax(z, -1) - torch.nn.functional.one_hot(answers, z.shape[-1]).to(z)
    plain = torch.bmm(error, readout.transpose(1, 2))
    if normalisation == "relu":
        return StateGradient(plain * (h > 0), torch.zeros_like(h), margin)
    if normalisation == "none":
        return StateGradient(plain, torch.zeros_like(h), margin)
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    return StateGradient(plain * (math.sqrt(d) / length), margin.unsqueeze(-1) * h / length.square(), margin)


def weight_gradient(facts: Facts, weights: Weights, normalisation: Normalisation) -> Weights:
    """Gradient of the mean loss over some facts with respect to W [S, d, d] and U [S, d, |V|]."""
    h = raw_states(facts.keys, weights)
    x = normalise(h, normalisation)
    n = facts.answers.shape[1]
    p = torch.softmax(torch.bmm(x, weights.U), -1)
    error = (p - torch.nn.functional.one_hot(facts.answers, p.shape[-1]).to(p)) / n
    force = state_gradient(h, facts.answers, weights.U, normalisation).total / n
    return Weights(torch.bmm(facts.keys.transpose(1, 2), force), torch.bmm(x.transpose(1, 2), error))


def shared_row_gradient(facts: Facts, gradient: Tensor, shared_key: Tensor) -> Tensor:
    """μᵀ∇_W L = mean_b ⟨μ,k_b⟩ ∂ℓ_b/∂h_b, [S, d]: the gradient of the shared row from states alone (an
    identity).

    Args:
        facts: the batch.
        gradient: ∂ℓ_b/∂h_b, [S, n, d].
        shared_key: μ, [S, d].
    """
    overlap = torch.bmm(facts.keys, shared_key.unsqueeze(-1))
    return (overlap * gradient).mean(1)


def reduced_rate(h: Tensor, answers: Tensor, readout: Tensor, mean: Tensor, normalisation: Normalisation) -> Tensor:
    """Right-hand side of the reduced equation without η α, [S]: how fast the mean state's length s grows.

    ds/dt = η α mean_b{ (√d/‖h_b‖) [ sin²θ_b G_b − sin θ_b cos θ_b M_b ] } with RMS, η α mean_b G_b without.

    Args:
        h: raw states of the new facts, [S, n, d].
        answers: [S, n].
        readout: U, [S, d, |V|].
        mean: mean raw state of A, [S, d].
        normalisation: "rms" or "none".

    Raises:
        ValueError: "relu", for which the equation is not derived.
    """
    if normalisation == "relu":
        raise ValueError("The reduced equation is derived for 'rms' and 'none'; found 'relu'.")
    z = torch.bmm(normalise(h, normalisation), readout)
    G, M, cos, sin = split_margins(h, z, answers, readout, mean)
    if normalisation == "none":
        return G.mean(-1)
    scale = math.sqrt(h.shape[-1]) / torch.linalg.vector_norm(h, dim=-1)
    return (scale * (sin.square() * G - sin * cos * M)).mean(-1)


@dataclass(frozen=True)
class ReducedRun:
    """The mean state's length along a real SGD run, measured and predicted.

    Attributes:
        steps: [T], from the first integrated step on.
        measured: s = ‖mean_a h_a‖, [T, S].
        predicted: the reduced equation integrated on the run's own minibatches, [T, S].
        corrected: the same with the finite-step term |D_⊥|²/(2s), [T, S].
        vector: length of the mean integrated as a vector with exact overlaps ⟨k̄_A,k_b⟩, [T, S].
    """

    steps: Tensor
    measured: Tensor
    predicted: Tensor
    corrected: Tensor
    vector: Tensor

    def error(self, which: str) -> Tensor:
        """Largest |which − measured| as a share of the measured range, [S]; which names an attribute."""
        span = self.measured.max(0).values - self.measured.min(0).values
        return (getattr(self, which) - self.measured).abs().max(0).values / span


def reduced_run(world: World, weights: Weights, rate: Tensor, n_steps: int = 1000, start: int = 10) -> ReducedRun:
    """Integrate the reduced equation along a real run, from step `start`, after the mean has met the write.

    Args:
        world: facts; normalisation "rms" or "none".
        weights: pretrained; not changed.
        rate: [S].
        n_steps: last step.
        start: step from which the prediction is integrated.

    Raises:
        ValueError: ReLU, or a start that is not before the end.
    """
    if not 0 <= start < n_steps:
        raise ValueError(f"start is {start}, n_steps {n_steps}; expected 0 ≤ start < n_steps.")
    settings = world.settings
    batches = list(Batches(world.seeds, "fine_tuning", settings.n_new, settings.batch_size).steps(n_steps))
    now = weights.clone()
    run = descend(now, world.new, batches, rate, settings, settings.readout_rate)
    mean_key = world.A.keys.mean(1)
    slopes: list[Tensor] = []
    measured, corrections, moves = [], [], []
    for step in range(n_steps + 1):
        mean = torch.bmm(mean_key.unsqueeze(1), now.W).squeeze(1)
        if step >= start:
            measured.append(mean)
        if step == n_steps:
            break
        if step >= start:
            index = batches[step]
            keys = world.new.keys.gather(1, index.unsqueeze(-1).expand(-1, -1, settings.dimension))
            answers = world.new.answers.gather(1, index)
            h = raw_states(keys, now)
            slopes.append(rate * settings.alpha * reduced_rate(h, answers, now.U, mean, settings.normalisation))
            force = state_gradient(h, answers, now.U, settings.normalisation).total
            overlap = torch.bmm(keys, mean_key.unsqueeze(-1))
            move = -rate.unsqueeze(-1) * (overlap * force).mean(1)
            length = torch.linalg.vector_norm(mean, dim=-1)
            along = (move * mean).sum(-1) / length
            corrections.append((move.square().sum(-1) - along.square()) / (2 * length))
            moves.append(move)
        next(run)
    means = torch.stack(measured)
    first = torch.linalg.vector_norm(means[0], dim=-1)
    zero = torch.zeros_like(first).unsqueeze(0)
    slope, extra = torch.stack(slopes), torch.stack(corrections)
    vector = means[0] + torch.cat([torch.zeros_like(means[:1]), torch.stack(moves).cumsum(0)])
    return ReducedRun(
        torch.arange(start, n_steps + 1),
        torch.linalg.vector_norm(means, dim=-1),
        first + torch.cat([zero, slope.cumsum(0)]),
        first + torch.cat([zero, (slope + extra).cumsum(0)]),
        torch.linalg.vector_norm(vector, dim=-1),
    )


def forces(world: World, weights: Weights, start: Weights) -> dict[str, Tensor]:
    """The full-batch force on the shared row, −μᵀ∇_W L, and what the proof of recovery needs of it. Each [S].

    Returns:
        plain_s, normaliser_s: the two terms along ŝ = s/‖s‖, the shared row so far (0 before training).
        plain_w, normaliser_w: the same along ŵ, the direction from X to Y.
        margin: mean γ over the new facts, logits.
        content: ⟨s,ŵ⟩.
        moved: mean_b ⟨h_b − h_b⁰, ŵ⟩ over the new facts, to compare with √α ⟨s,ŵ⟩ in `write`.
        write: √α ⟨s,ŵ⟩.
        alignment: Σ_b γ_b C_b/‖h_b‖ with C_b = ĥ_b·ŵ; its sign follows the mean margin's.
    """
    settings, facts = world.settings, world.new
    ref = reference(world, start)
    h = raw_states(facts.keys, weights)
    gradient = state_gradient(h, facts.answers, weights.U, settings.normalisation)
    plain = -shared_row_gradient(facts, gradient.plain, world.shared_key)
    normaliser = -shared_row_gradient(facts, gradient.normaliser, world.shared_key)
    s = shared_row(world, weights.W - start.W)
    length = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    unit = torch.where(length > 0, s / torch.where(length > 0, length, 1.0), 0.0)
    lengths = torch.linalg.vector_norm(h, dim=-1)
    along_w = torch.bmm(h, ref.w.unsqueeze(-1)).squeeze(-1)
    content = (s * ref.w).sum(-1)
    before = torch.bmm(raw_states(facts.keys, start), ref.w.unsqueeze(-1)).squeeze(-1)
    return {
        "plain_s": (plain * unit).sum(-1),
        "normaliser_s": (normaliser * unit).sum(-1),
        "plain_w": (plain * ref.w).sum(-1),
        "normaliser_w": (normaliser * ref.w).sum(-1),
        "margin": gradient.margin.mean(-1),
        "content": content,
        "moved": (along_w - before).mean(-1),
        "write": math.sqrt(settings.alpha) * content,
        "alignment": (gradient.margin * along_w / lengths.square()).sum(-1),
    }


def force_history(
    world: World,
    weights: Weights,
    rate: Tensor,
    n_steps: int = 3000,
    checkpoints: Sequence[int] | None = None,
) -> pd.DataFrame:
    """`forces` at the checkpoints of a run, and the mean state's length: step, seed, one column each."""
    settings = world.settings
    wanted = set(checkpoint_steps(n_steps) if checkpoints is None else checkpoints)
    batches = Batches(world.seeds, "fine_tuning", settings.n_new, settings.batch_size).steps(n_steps)
    mean_key = world.A.keys.mean(1, keepdim=True)
    parts = []
    now = weights.clone()
    for step, live in descend(now, world.new, batches, rate, settings, settings.readout_rate):
        if step in wanted:
            row = forces(world, live, weights)
            row["state_length"] = torch.linalg.vector_norm(torch.bmm(mean_key, live.W), dim=-1).squeeze(1)
            columns = {name: value.numpy() for name, value in row.items()}
            parts.append(pd.DataFrame({"step": step, "seed": world.seeds, **columns}))
    return pd.concat(parts, ignore_index=True)
