"""What a run is asked for, with every default filled in."""

import logging
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from .devices import Device, choose_device
from .errors import PsdError
from .pairs import Pair
from .paths import results_dir

_LOG = logging.getLogger(__name__)

DEFAULT_N_TOKENS = 1_000_000
DEFAULT_TOP_K = 4096
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Settings:
    """What a run was asked for, with every default filled in."""

    text: str | None
    n_tokens: int
    top_k: int
    device: Device
    seed: int
    n_damage_seeds: int
    n_resamples: int
    out_dir: Path
    mask_padding: bool


def resolve_settings(
    pair: Pair,
    *,
    text: str | Path | None = None,
    n_tokens: int | None = None,
    top_k: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    seed: int = 0,
    n_damage_seeds: int = 5,
    n_resamples: int = 10_000,
    out_dir: str | Path | None = None,
    mask_padding: bool = False,
) -> Settings:
    """Fill in what is not given: the registry's values, else the defaults.

    Raises:
        PsdError: a value out of range; it says which.
    """
    n_tokens = n_tokens if n_tokens is not None else pair.n_tokens or DEFAULT_N_TOKENS
    top_k = top_k if top_k is not None else pair.top_k or DEFAULT_TOP_K
    for name, value, least in (
        ("n_tokens", n_tokens, 1),
        ("top_k", top_k, 1),
        ("seed", seed, 0),
        ("n_damage_seeds", n_damage_seeds, 0),
        ("n_resamples", n_resamples, 100),
    ):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise PsdError(f"{name} must be a whole number of at least {least}, found {value!r}")
    if seed > LARGEST_SEED:
        raise PsdError(f"seed must be at most {LARGEST_SEED}, found {seed}")
    chosen = choose_device(device, dtype or pair.dtype)
    _LOG.info("%s", chosen.reason)
    folder = Path(out_dir).expanduser().resolve() if out_dir else results_dir()
    return Settings(
        text=None if text is None else str(text),
        n_tokens=int(n_tokens),
        top_k=int(top_k),
        device=chosen,
        seed=int(seed),
        n_damage_seeds=int(n_damage_seeds),
        n_resamples=int(n_resamples),
        out_dir=folder,
        mask_padding=mask_padding,
    )
