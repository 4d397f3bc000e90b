"""Controls: models whose loss is known to hold nothing to restore, so that a share can be read against them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from scipy.optimize import brentq

from .capture import TextStates
from .errors import PsdError
from .head import OutputModel
from .kernels import corrected_losses

GAP_TOLERANCE = 1e-4
"""How closely a damaged model's gap on `fit` matches the pair's, nats per token (DESIGN §2)."""

_SEARCH_TOKENS = 4096
_MOST_DOUBLINGS = 40


@dataclass(frozen=True)
class Damage:
    """A damaged model, the amount of damage, and its gap on `fit` in nats per token.

    `noise_sd` is the standard deviation of what was added: to the head's weights, or to the states for hidden noise.
    """

    model: OutputModel
    noise_sd: float
    fit_gap: float


def damage_seed(seed: int, index: int) -> int:
    """Return the seed of a run's damaged model number `index`; those of runs with other seeds are others."""
    return seed * 1_000_003 + index


def matched_head_noise(
    base: OutputModel, base_loss: float, gap: float, seed: int, n_real_rows: int | None = None
) -> Damage:
    """Return the base with Gaussian noise on its real head rows, scaled until its `fit` gap is `gap` (DESIGN §2).

    One direction per `seed`; only the scale is searched: bracketed by doubling and narrowed by Brent's method, first
    on some thousand tokens, then on all, to 1e-4 nats. `base_loss` is the base's exact mean loss on `fit`.

    Raises:
        PsdError: `gap` is not positive, or no scale reaches it (possible where logits are soft-capped).
    """
    rows = base.head.shape[0] if n_real_rows is None else n_real_rows
    return _matched_head(base, base_loss, gap, lambda: _noise(base.head, rows, seed), rows)


def with_head_noise(base: OutputModel, noise_sd: float, seed: int, n_real_rows: int) -> OutputModel:
    """Return the model that `matched_head_noise` found, from the `noise_sd` that it recorded."""
    direction = _noise(base.head, n_real_rows, seed)
    return base.with_head((base.head.to(direction.dtype) + noise_sd * direction).to(base.head.dtype))


def matched_permuted_difference(
    base: OutputModel, derived: OutputModel, base_loss: float, gap: float, seed: int, n_real_rows: int
) -> Damage:
    """Return the base with c·P(W_derived − W_base) on its real head rows, c matched on `fit` as for head noise.

    P permutes the rows, differently for each `seed`: the pair's own change of the head, given to the wrong tokens.
    `n_real_rows` is the tokenizer's length.

    Raises:
        PsdError: the heads differ in shape or are equal; or as `matched_head_noise`.
    """
    if base.head.shape != derived.head.shape:
        raise PsdError(f"the heads differ in shape, {tuple(base.head.shape)} and {tuple(derived.head.shape)}")
    precise = torch.float64 if base.head.dtype == torch.float64 else torch.float32
    difference = derived.head[:n_real_rows].to(precise) - base.head[:n_real_rows].to(precise)
    spread = difference.square().mean().sqrt()
    if not bool(spread > 0):
        raise PsdError("base and derived have the same head: there is no difference to permute")
    order = torch.randperm(n_real_rows, generator=torch.Generator().manual_seed(seed)).to(difference.device)

    def direction() -> torch.Tensor:
        moved = torch.zeros(base.head.shape, dtype=precise, device=base.head.device)
        moved[:n_real_rows] = difference[order] / spread
        return moved

    return _matched_head(base, base_loss, gap, direction, n_real_rows)


def _matched_head(
    base: OutputModel, base_loss: float, gap: float, make_direction: Callable[[], torch.Tensor], rows: int
) -> Damage:
    _check_gap(gap)
    direction = make_direction()
    unit = float(base.head[:rows].float().std())

    def damaged_head(sigma: float) -> torch.Tensor:
        return (base.head.to(direction.dtype) + sigma * unit * direction).to(base.head.dtype)

    def loss(sigma: float, states: TextStates) -> float:
        head = damaged_head(sigma)
        losses = corrected_losses(states.hidden, head, states.targets, [None], readout=base.readout)
        return float(losses[0].double().mean())

    fit = base.splits["fit"]
    sigma = _matched_sigma(loss, fit, _every_nth(fit, _SEARCH_TOKENS), base_loss, gap)
    model = base.with_head(damaged_head(sigma))
    return Damage(model, sigma * unit, loss(sigma, fit) - base_loss)


def matched_hidden_noise(base: OutputModel, base_loss: float, gap: float, seed: int) -> Damage:
    """Return the base with Gaussian noise on its final hidden states, on every split, matched on `fit`.

    As `matched_head_noise`, but the noise differs from token to token; its unit is the states' standard deviation.

    Raises:
        PsdError: as `matched_head_noise`.
    """
    _check_gap(gap)
    unit = float(base.splits["fit"].hidden.float().std())

    def direction(index: int, hidden: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3 * seed + index)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return torch.randn(hidden.shape, generator=generator, dtype=dtype).to(hidden.device)

    def damaged(states: TextStates, noise: torch.Tensor, sigma: float) -> TextStates:
        hidden = (states.hidden.to(noise.dtype) + sigma * unit * noise).to(states.hidden.dtype)
        return replace(states, hidden=hidden)

    fit = base.splits["fit"]
    noise = direction(0, fit.hidden)
    sample = _every_nth(fit, _SEARCH_TOKENS)
    sample_noise = noise[:: _stride(fit, _SEARCH_TOKENS)]

    def loss(sigma: float, states: TextStates) -> float:
        at = damaged(states, noise if states is fit else sample_noise, sigma)
        losses = corrected_losses(at.hidden, base.head, at.targets, [None], readout=base.readout)
        return float(losses[0].double().mean())

    sigma = _matched_sigma(loss, fit, sample, base_loss, gap)
    splits = {
        split: damaged(states, noise if split == "fit" else direction(i, states.hidden), sigma)
        for i, (split, states) in enumerate(base.splits.items())
    }
    return Damage(replace(base, splits=splits), sigma * unit, loss(sigma, fit) - base_loss)


def _check_gap(gap: float) -> None:
    if not gap > 0:
        raise PsdError(f"the gap on fit is {gap:.4g} nats, not positive: there is no damage to match")


def _matched_sigma(
    loss: Callable[[float, TextStates], float], fit: TextStates, sample: TextStates, base_loss: float, gap: float
) -> float:
    """Return the scale at which the loss on `fit` exceeds `base_loss` by `gap`: guessed on the sample, found on all."""
    if len(sample.targets) < len(fit.targets):
        sample_base = loss(0.0, sample)
        guess = _root(lambda sigma: loss(sigma, sample) - sample_base - gap, 0.05, 2.0, gap / 1000)
        step = 1.03
    else:
        guess, step = 0.05, 2.0
    return _root(lambda sigma: loss(sigma, fit) - base_loss - gap, guess, step, GAP_TOLERANCE / 2)


def _noise(head: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
    """Return one fixed direction of iid N(0, 1) noise, zero on padded rows, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if head.dtype == torch.float64 else torch.float32
    noise = torch.zeros(head.shape, dtype=dtype)
    noise[:rows] = torch.randn(rows, head.shape[1], generator=generator, dtype=dtype)
    return noise.to(head.device)


def _every_nth(states: TextStates, n_tokens: int) -> TextStates:
    """Return evenly spaced tokens of a split, about `n_tokens` of them, as one document."""
    step = _stride(states, n_tokens)
    targets = states.targets[::step]
    return TextStates(states.hidden[::step], targets, torch.tensor([len(targets)]), ("sample",))


def _stride(states: TextStates, n_tokens: int) -> int:
    return max(1, len(states.targets) // n_tokens)


def _root(function: Callable[[float], float], guess: float, step: float, tolerance: float) -> float:
    """Return a point with |f| ≤ tolerance of a function that is negative at 0 and grows: bracket, then Brent."""

    def settled(x: float) -> float:
        value = function(x)
        return 0.0 if abs(value) <= tolerance else value  # an exact 0 is where Brent's method stops

    at = guess
    value = settled(at)
    factor = step if value < 0 else 1 / step
    for _ in range(_MOST_DOUBLINGS):
        if value == 0.0:
            return at
        previous, at = at, at * factor
        new = settled(at)
        if new * value < 0:
            return float(brentq(settled, min(previous, at), max(previous, at), xtol=1e-12, rtol=1e-12))
        value = new
    raise PsdError("no amount of damage reaches the pair's gap (are its logits soft-capped?)")
