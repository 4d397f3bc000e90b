"""What a solver minimises: mean loss and gradient at (β, b), from head statistics or from exact passes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from .correction import Correction
from .kernels import HeadStatistics, Objective, Readout, corrected_moments, fit_objective
from .kernels.chunked import FixedBetaObjective, compute_dtype

BETA_BOUNDS = (0.05, 20.0)

BiasObjective = Callable[[torch.Tensor], tuple[float, torch.Tensor]]
"""b float64 [K] -> (mean loss, its gradient float64 [K]), at β = 1."""


class FitObjective(Protocol):
    """A fit's problem."""

    @property
    def ids(self) -> torch.Tensor:
        """The set, int64 [K]."""
        ...

    @property
    def counts(self) -> torch.Tensor:
        """Targets of each id, float64 [K]."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens fitted on."""
        ...

    @property
    def beta_interval(self) -> tuple[float, float]:
        """The lowest and highest β that can be evaluated."""
        ...

    @property
    def whole_vocabulary(self) -> bool:
        """Whether the set leaves no rest, so that a common bias changes nothing."""
        ...

    @property
    def precise(self) -> bool:
        """Whether sums are over float64 terms."""
        ...

    def __call__(self, beta: float, bias: torch.Tensor) -> Objective:
        """Return mean loss and gradient at (β, b)."""
        ...

    def at_beta_one(self) -> BiasObjective:
        """Return the objective in b alone."""
        ...


@dataclass(frozen=True)
class StatisticsObjective:
    """The objective from head statistics; β is confined to their nodes."""

    statistics: HeadStatistics

    @property
    def ids(self) -> torch.Tensor:
        """The set."""
        return self.statistics.ids.cpu()

    @property
    def counts(self) -> torch.Tensor:
        """Targets of each id, float64 [K]."""
        return self.statistics.target_counts().double().cpu()

    @property
    def n_tokens(self) -> int:
        """Tokens fitted on."""
        return len(self.statistics)

    @property
    def beta_interval(self) -> tuple[float, float]:
        """The bounds of β, within the nodes unless there is no rest to interpolate."""
        if self.statistics.rest_is_empty:
            return BETA_BOUNDS
        low, high = self.statistics.beta_range
        return max(low, BETA_BOUNDS[0]), min(high, BETA_BOUNDS[1])

    @property
    def whole_vocabulary(self) -> bool:
        """Whether a common bias changes nothing."""
        return self.statistics.rest_is_empty

    @property
    def precise(self) -> bool:
        """Whether sums are over float64 terms."""
        return self.statistics.set_logits.dtype == torch.float64

    def __call__(self, beta: float, bias: torch.Tensor) -> Objective:
        """Return mean loss and gradient."""
        return fit_objective(self.statistics, beta, bias)

    def at_beta_one(self) -> BiasObjective:
        """Return the objective in b alone, two matrix-vector products an evaluation."""
        return FixedBetaObjective(self.statistics, 1.0)


@dataclass(frozen=True)
class ExactObjective:
    """The objective from a pass over the whole vocabulary at every evaluation: for sets too large to be stored."""

    hidden: torch.Tensor
    head: torch.Tensor
    targets: torch.Tensor
    ids: torch.Tensor
    readout: Readout
    beta_interval: tuple[float, float] = BETA_BOUNDS

    @cached_property
    def counts(self) -> torch.Tensor:
        """Targets of each id, float64 [K]."""
        return torch.bincount(self.targets, minlength=self.head.shape[0]).cpu()[self.ids].double()

    @property
    def n_tokens(self) -> int:
        """Tokens fitted on."""
        return len(self.targets)

    @property
    def whole_vocabulary(self) -> bool:
        """Whether a common bias changes nothing."""
        masked = 0 if self.readout.masked is None else int(self.readout.masked.sum())
        return self.ids.numel() == self.head.shape[0] - masked

    @property
    def precise(self) -> bool:
        """Whether sums are over float64 terms."""
        return compute_dtype(self.hidden, self.head) == torch.float64

    def __call__(self, beta: float, bias: torch.Tensor) -> Objective:
        """Return mean loss and gradient."""
        correction = Correction(self.ids, bias.cpu(), 1.0 / beta)
        at = corrected_moments(self.hidden, self.head, self.targets, correction, readout=self.readout)
        return Objective(
            loss=float(at.nll.double().mean()),
            gradient_beta=float((at.expected_logit.double() - at.target_logit.double()).mean()),
            gradient_bias=(at.probability_sums.cpu() - self.counts) / self.n_tokens,
        )

    def at_beta_one(self) -> BiasObjective:
        """Return the objective in b alone."""

        def evaluate(bias: torch.Tensor) -> tuple[float, torch.Tensor]:
            at = self(1.0, bias)
            return at.loss, at.gradient_bias

        return evaluate
