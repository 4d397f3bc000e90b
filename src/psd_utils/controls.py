"""Controls: models whose loss is known to hold nothing to restore, so that a share can be read against them."""

from collections.abc import Callable
from dataclasses import dataclass

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
    """A damaged model, the noise's standard deviation in units of the head's weights, and its gap on `fit`."""

    model: OutputModel
    noise_sd: float
    fit_gap: float


def matched_head_noise(
    base: OutputModel, base_loss: float, gap: float, seed: int, n_real_rows: int | None = None
) -> Damage:
    """Return the base with Gaussian noise on its real head rows, scaled until its `fit` gap is `gap` (DESIGN §2).

    One direction per `seed`; only the scale is searched: bracketed by doubling and narrowed by Brent's method, first
    on some thousand tokens, then on all, to 1e-4 nats. `base_loss` is the base's exact mean loss on `fit`.

    Raises:
        PsdError: `gap` is not positive, or no scale reaches it (possible where logits are soft-capped).
    """
    if not gap > 0:
        raise PsdError(f"the gap on fit is {gap:.4g} nats, not positive: there is no damage to match")
    rows = base.head.shape[0] if n_real_rows is None else n_real_rows
    direction = _noise(base.head, rows, seed)
    unit = float(base.head[:rows].float().std())

    def damaged_head(sigma: float) -> torch.Tensor:
        return (base.head.to(direction.dtype) + sigma * unit * direction).to(base.head.dtype)

    def loss(sigma: float, states: TextStates) -> float:
        head = damaged_head(sigma)
        losses = corrected_losses(states.hidden, head, states.targets, [None], readout=base.readout)
        return float(losses[0].double().mean())

    fit = base.splits["fit"]
    sample = _every_nth(fit, _SEARCH_TOKENS)
    if len(sample.targets) < len(fit.targets):
        sample_base = loss(0.0, sample)
        guess = _root(lambda sigma: loss(sigma, sample) - sample_base - gap, 0.05, 2.0, gap / 1000)
        step = 1.03
    else:
        guess, step = 0.05, 2.0
    sigma = _root(lambda sigma: loss(sigma, fit) - base_loss - gap, guess, step, GAP_TOLERANCE / 2)
    model = base.with_head(damaged_head(sigma))
    return Damage(model, sigma * unit, loss(sigma, fit) - base_loss)


def _noise(head: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
    """Return one fixed direction of iid N(0, 1) noise, zero on padded rows, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if head.dtype == torch.float64 else torch.float32
    noise = torch.zeros(head.shape, dtype=dtype)
    noise[:rows] = torch.randn(rows, head.shape[1], generator=generator, dtype=dtype)
    return noise.to(head.device)


def _every_nth(states: TextStates, n_tokens: int) -> TextStates:
    """Return evenly spaced tokens of a split, about `n_tokens` of them, as one document."""
    step = max(1, len(states.targets) // n_tokens)
    targets = states.targets[::step]
    return TextStates(states.hidden[::step], targets, torch.tensor([len(targets)]), ("sample",))


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
    raise PsdError("no amount of noise on the head reaches the pair's gap (are its logits soft-capped?)")
