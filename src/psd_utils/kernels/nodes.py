"""Values of β as powers of two: exp(β z) = 2^(z · exponent), and sums at the β that float32 can hold."""

import math
from dataclasses import dataclass

import torch

from .statistics import interpolation

LOG2_E = math.log2(math.e)


def exponent_of(beta: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return (β·log₂e as `dtype` holds it, the β that this stands for): every term of a loss uses that β."""
    exponent = float(torch.tensor(beta * LOG2_E, dtype=dtype))
    return exponent, beta if dtype == torch.float64 else exponent / LOG2_E


@dataclass(frozen=True)
class Nodes:
    """Some values of β, rounded so that β·log₂e is a number of the compute dtype.

    `exponents` are those numbers; `betas` float64 [J] the β they stand for, within 1e-7 of the β asked for.
    """

    exponents: list[float]
    betas: torch.Tensor

    @classmethod
    def of(cls, betas: list[float], dtype: torch.dtype, device: torch.device) -> "Nodes":
        """Return the nodes nearest to `betas`."""
        pairs = [exponent_of(beta, dtype) for beta in betas]
        held = torch.tensor([beta for _, beta in pairs], dtype=torch.float64, device=device)
        return cls([exponent for exponent, _ in pairs], held)

    def moved_to(self, betas: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
        """Return log sums [tokens, J] float64 at `betas`, the values asked for, from log sums at these nodes."""
        change = torch.stack([interpolation(self.betas, beta)[0] for beta in betas.tolist()], dim=1)
        change -= torch.eye(len(self.exponents), dtype=torch.float64)
        return log_sums + log_sums.masked_fill(torch.isinf(log_sums), 0.0) @ change.to(log_sums.device)
