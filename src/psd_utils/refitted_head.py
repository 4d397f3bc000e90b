"""The ladder's last rung: the head fitted anew, the bound of what an output layer can give."""

import torch

from .errors import PsdError
from .head import OutputModel
from .ladder import Rung, finished_rung, select_loss_of
from .ladder_problem import HISTORY, SHORT_HISTORY, Moments, Problem, best_of, exact_losses, penalty_path
from .storage import free_memory

HEAD_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""The values of μ from which `select` chooses."""

LARGE_HEAD = 1 << 26
"""Heads of more numbers than this are fitted with a shorter history, so that one GPU holds it."""

_COPIES = 12  # of the head, beside the solver's history: value, gradient, scale, direction, best, and temporaries


def refitted_head(model: OutputModel) -> Rung:
    """Return the last rung: the head fitted anew, held to the model's own by (μ/2)·‖W − W_model‖², μ by `select`.

    It is the bound of what the output layer can give. Its state is a few dozen copies of the head.

    Raises:
        PsdError: the memory is clearly too small for that.
    """
    history = SHORT_HISTORY if model.head.numel() > LARGE_HEAD else HISTORY
    itemsize = 8 if model.head.dtype == torch.float64 else 4
    needed, free = (2 * history + _COPIES) * model.head.numel() * itemsize, free_memory(model.head.device)
    if free is not None and needed > free:
        raise PsdError(
            f"fitting a head of {model.head.numel():,} numbers anew needs about {needed / 2**30:.0f} GiB of memory on "
            f"{model.head.device.type}, where {free / 2**30:.0f} GiB are free"
        )
    problem = Problem(model)
    moments, uncorrected = Moments.of(problem), select_loss_of(model)
    second = moments.covariance + torch.outer(moments.mean, moments.mean)
    size, axes = torch.linalg.eigh(second)
    size = size.clamp_min(0.0)
    rows, width = problem.head.shape
    turn = axes.to(problem.dtype)
    mass = moments.mass * problem.readout.scale**2

    def head_of(value: torch.Tensor) -> torch.Tensor:
        return problem.head + value.to(problem.dtype) @ turn.T

    def objective(value: torch.Tensor, penalty: float) -> tuple[float, torch.Tensor]:
        gradient = torch.zeros(rows, width, dtype=problem.dtype, device=problem.head.device)

        def visit(part: slice, z: torch.Tensor, residual: torch.Tensor) -> None:
            gradient.addmm_(residual.T, problem.hidden[part])

        return problem.each(visit, head=head_of(value)), gradient @ turn / problem.n

    def scale_of(penalty: float) -> torch.Tensor:
        return torch.addmm(torch.tensor(penalty).to(size), mass[:, None], size[None, :]).sqrt_().to(problem.dtype)

    def losses_of(split: str, value: torch.Tensor) -> torch.Tensor:
        return exact_losses(model.splits[split], head_of(value), model.readout)

    def select_loss(value: torch.Tensor) -> float:
        return float(losses_of("select", value).mean())

    start = torch.zeros(rows, width, dtype=problem.dtype, device=problem.head.device)
    ends = penalty_path(objective, HEAD_PENALTIES, start, scale_of, select_loss, history)
    return finished_rung(model, "head", rows * width, True, best_of(ends), uncorrected, losses_of)
