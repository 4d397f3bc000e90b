"""A device and a dtype to compute with, and why they were chosen."""

from dataclasses import dataclass

import torch

from .errors import PsdError, nearest
from .pairs import DTYPES

SPREAD_MEMORY: dict[int | str, int | str] | None = None
"""How much of each device (its number, or "cpu") a spread model may take; None: what accelerate finds free."""


@dataclass(frozen=True)
class Device:
    """A device and dtype to compute with, and why they were chosen.

    `spread`: models are laid out by accelerate over all accelerators, then memory, then disk, and `device` is where
    they read; everything after scoring happens on `device`.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str
    spread: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype as text, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")


def choose_device(device: str = "auto", dtype: str | None = None) -> Device:
    """Return the device ("auto": CUDA if there is one) and the dtype (None: bfloat16 on CUDA, float32 elsewhere).

    "spread" is "auto" for models larger than one device: accelerate lays them out over what there is.

    Raises:
        PsdError: an unknown dtype, or a device that this machine lacks.
    """
    spread = device == "spread"
    if device in ("auto", "spread"):
        name, why = ("cuda", "a CUDA device is there") if torch.cuda.is_available() else ("cpu", "no CUDA device")
    else:
        name, why = device, "asked for"
    try:
        chosen = torch.device(name)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise PsdError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if dtype is not None and dtype not in DTYPES:
        raise PsdError(f"dtype {dtype!r}: {nearest(dtype, list(DTYPES))}")
    dtype_name = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    dtype_why = "asked for" if dtype else f"the default on {chosen.type}"
    over = "; models spread over all devices" if spread else ""
    return Device(chosen, getattr(torch, dtype_name), f"{name}: {why}; {dtype_name}: {dtype_why}{over}", spread)
