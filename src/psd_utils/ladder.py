"""How much can any output-layer correction give? Corrections beyond bias and temperature, up to a head fitted anew.

Hidden states are rotated to the axes of their second moment, rows of the head scaled by the root of their frequency. A
penalised full map of the states then gives every low-rank map its start, since near an optimum the best rank-r map is a
truncated singular decomposition.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .correction import Correction
from .head import OutputModel, real_ids
from .ladder_problem import (
    Candidate,
    End,
    Moments,
    Problem,
    best_of,
    exact_losses,
    minimise,
    penalty_path,
)
from .selection import choose_corrections

RANKS = (1, 4, 16, 64)
SCALE_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
MAP_PENALTIES = (10.0, 1.0, 1e-1, 1e-2, 1e-3)
"""The penalties from which `select` chooses: (λ/2) times the squared distance from the model as it is."""

_LOW_RANK_EVALUATIONS = 12


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder for one model.

    `losses` gives the exact loss of every token of a split, nats, under the fitted (or, where `selected_none`, no)
    correction. `parameters` are the free numbers, `penalty` the one selected on `select`. `status`: "converged" (half
    the squared gradient, in variables of curvature near 1, is below 1e-4 nats), "stopped" (the evaluations ran out)
    or that of the fit. `gradient_norm` belongs to the same variables; `convex` says whether the end is the optimum.
    """

    name: str
    parameters: int
    convex: bool
    penalty: float | None
    selected_none: bool
    status: str
    evaluations: int
    gradient_norm: float
    losses: Callable[[str], torch.Tensor]


def ladder(
    model: OutputModel, ids: torch.Tensor, special: torch.Tensor, tokenizer_length: int, ranks: Sequence[int] = RANKS
) -> list[Rung]:
    """Return the rungs for one model, from the temperature to the full affine map; `refitted_head` is the last.

    Every rung is fitted on the model's `fit`, its penalty (and whether it is used at all) selected on `select`;
    nothing of `eval` is looked at. `ids` is the set of the bias. `offset` adds c to the final state; maps make it
    h + A h + c with A of rank r and c free.

    Raises:
        PsdError: as `choose_corrections`.
    """
    every_id = real_ids(special, tokenizer_length)
    rungs = _correction_rungs(model, ids, ("temperature", "bias", "bias_temperature"))
    rungs += _correction_rungs(model, every_id, ("bias_all",))
    uncorrected = select_loss_of(model)
    problem = Problem(model)
    moments = Moments.of(problem)
    rungs.append(_scale_rung(model, problem, moments, uncorrected))
    rungs += _map_rungs(model, problem, moments, uncorrected, [r for r in ranks if r < model.head.shape[1]])
    return rungs


def select_loss_of(model: OutputModel) -> float:
    """Return the model's own mean loss on `select`, nats per token."""
    return float(exact_losses(model.splits["select"], model.head, model.readout).mean())


def _correction_rungs(model: OutputModel, ids: torch.Tensor, kinds: Sequence[str]) -> list[Rung]:
    rungs = []
    for kind, chosen in choose_corrections(model, ids, kinds).items():
        record, correction = chosen.fit.convergence, chosen.correction

        def losses(split: str, correction: Correction = correction) -> torch.Tensor:
            return model.losses(split, [correction])[0]

        size = 1 if kind == "temperature" else ids.numel() + (kind == "bias_temperature")
        penalty = None if kind == "temperature" else chosen.fit.penalty
        ends = (chosen.selected_none, record.status, record.iterations, record.gradient_norm)
        rungs.append(Rung(kind, size, True, penalty, *ends, losses))
    return rungs


def finished_rung(
    model: OutputModel,
    name: str,
    parameters: int,
    convex: bool,
    best: Candidate,
    uncorrected: float,
    losses_of: Callable[[str, torch.Tensor], torch.Tensor],
) -> Rung:
    """Return the rung of the best candidate; `uncorrected` is the model's own loss on `select`."""
    end, penalty, none = best.end, best.penalty, uncorrected < best.select_loss

    def losses(split: str) -> torch.Tensor:
        if none:
            return exact_losses(model.splits[split], model.head, model.readout)
        return losses_of(split, end.x)

    convex = convex and model.readout.softcap is None
    return Rung(name, parameters, convex, penalty, none, end.status, end.evaluations, end.gradient_norm, losses)


def _scale_rung(model: OutputModel, problem: Problem, moments: Moments, uncorrected: float) -> Rung:
    """One scale and one bias per entry: z + (s − 1)(z − centre) + b, penalised by (λ/2)(‖s − 1‖² + ‖b‖²)."""
    rows = problem.head.shape[0]
    centre = moments.centre.to(problem.dtype)

    def parts(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stretch, bias = value.to(problem.dtype)
        return 1 + stretch, bias - stretch * centre

    def objective(value: torch.Tensor, penalty: float) -> tuple[float, torch.Tensor]:
        scale, bias = parts(value)
        gradient = torch.zeros(2, rows, dtype=torch.float64, device=problem.head.device)

        def visit(part: slice, z: torch.Tensor, residual: torch.Tensor) -> None:
            sums = residual.sum(dim=0)
            gradient[0].add_((residual * z.nan_to_num(neginf=0.0)).sum(dim=0) - sums * centre)
            gradient[1].add_(sums)

        return problem.each(visit, scale=scale, bias=bias), gradient / problem.n

    def scale_of(penalty: float) -> torch.Tensor:
        return torch.stack([moments.mass * moments.spread**2, moments.mass]).add(penalty).sqrt()

    def losses_of(split: str, value: torch.Tensor) -> torch.Tensor:
        scale, bias = parts(value)
        return exact_losses(model.splits[split], problem.head, model.readout, scale=scale, bias=bias)

    start = torch.zeros(2, rows, dtype=torch.float64, device=problem.head.device)
    ends = penalty_path(objective, SCALE_PENALTIES, start, scale_of, lambda x: float(losses_of("select", x).mean()))
    return finished_rung(model, "scale_bias_all", 2 * rows, True, best_of(ends), uncorrected, losses_of)


def _map_rungs(
    model: OutputModel,
    problem: Problem,
    moments: Moments,
    uncorrected: float,
    ranks: Sequence[int],
) -> list[Rung]:
    """Affine maps of the state: an offset alone and the full map, which are convex, and each rank between them.

    The ranks start from the truncated full map.
    """
    width = problem.head.shape[1]
    mean = moments.mean.to(problem.dtype)
    pull, pull_axes = torch.linalg.eigh(moments.pull)
    spread, spread_axes = torch.linalg.eigh(moments.covariance)
    pull, spread = (values.clamp_min(1e-4 * float(values.max())) for values in (pull, spread))
    root_pull = (pull_axes * pull.sqrt()) @ pull_axes.T
    root_spread = (spread_axes * spread.sqrt()) @ spread_axes.T
    inverse_pull, inverse_spread = torch.linalg.inv(root_pull), torch.linalg.inv(root_spread)

    def change_of(a: torch.Tensor, c: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        a, c = a.to(problem.dtype), c.to(problem.dtype)
        return lambda h: h + (h - mean.to(h.device)) @ a.T + c

    def gradient_of(a: torch.Tensor, c: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
        gradient_a = torch.zeros(width, width, dtype=torch.float64, device=problem.head.device)
        gradient_c = torch.zeros(width, dtype=torch.float64, device=problem.head.device)

        def visit(part: slice, z: torch.Tensor, residual: torch.Tensor) -> None:
            by_state = residual @ problem.head
            gradient_a.add_((by_state.T @ (problem.hidden[part] - mean)).double())
            gradient_c.add_(by_state.double().sum(dim=0))

        loss = problem.each(visit, change=change_of(a, c))
        return loss, gradient_a / problem.n, gradient_c / problem.n

    def natural(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pull_axes @ value[:, :width] @ spread_axes.T, pull_axes @ value[:, width]

    def objective(value: torch.Tensor, penalty: float) -> tuple[float, torch.Tensor]:
        loss, by_a, by_c = gradient_of(*natural(value))
        turned = pull_axes.T @ by_a @ spread_axes
        return loss, torch.cat([turned, (pull_axes.T @ by_c)[:, None]], dim=1)

    def scale_of(penalty: float) -> torch.Tensor:
        curvature = torch.cat([pull[:, None] * spread[None, :], pull[:, None]], dim=1)
        return (curvature + penalty).sqrt()

    def losses_of(split: str, value: torch.Tensor) -> torch.Tensor:
        return exact_losses(model.splits[split], problem.head, model.readout, change_of(*natural(value)))

    def truncated(value: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, c = natural(value)
        u, s, v = torch.linalg.svd(root_pull @ a @ root_spread)
        return u[:, :rank] * s[:rank], v[:rank].T * s[:rank], root_pull @ c

    def factors(x: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = width * rank
        return x[:n].view(width, rank), x[n : 2 * n].view(width, rank), x[2 * n :]

    def unpacked(x: torch.Tensor, strength: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, v, c = factors(x, strength.numel())
        return inverse_pull @ (u / strength) @ v.T @ inverse_spread, inverse_pull @ c

    def low_rank_losses(split: str, x: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        return exact_losses(model.splits[split], problem.head, model.readout, change_of(*unpacked(x, strength)))

    def low_rank(rank: int) -> Rung:
        # factors u·s and v·s, with s of the start between them, have curvatures near 1
        starts = []
        for full in ends:
            u, v, c = truncated(full.end.x, rank)
            strength = v.norm(dim=0).clamp_min(1e-3 * float(v.norm(dim=0).max()) + 1e-12)
            x = torch.cat([u.flatten(), v.flatten(), c])
            loss = float(low_rank_losses("select", x, strength).mean())
            starts.append((Candidate(full.penalty, End(x, 0.0, 0), loss), strength))
        start, strength = min(starts, key=lambda s: s[0].select_loss)
        penalty = start.penalty

        def at(x: torch.Tensor) -> tuple[float, torch.Tensor]:
            u, v, _ = factors(x, rank)
            a, c = unpacked(x, strength)
            loss, by_a, by_c = gradient_of(a, c)
            by_y = inverse_pull @ (by_a + penalty * a) @ inverse_spread
            by_d = inverse_pull @ (by_c + penalty * c)
            square = float(a.square().sum() + c.square().sum())
            by_u, by_v = by_y @ (v / strength), by_y.T @ (u / strength)
            return loss + penalty / 2 * square, torch.cat([by_u.flatten(), by_v.flatten(), by_d])

        end = minimise(at, start.end.x, most=_LOW_RANK_EVALUATIONS)
        best = Candidate(penalty, end, float(low_rank_losses("select", end.x, strength).mean()))
        size = 2 * width * rank - rank**2 + width
        return finished_rung(
            model, f"map_rank_{rank}", size, False, best, uncorrected, lambda s, x: low_rank_losses(s, x, strength)
        )

    def offset() -> Rung:
        unmoved = torch.zeros(width, width, dtype=torch.float64, device=problem.head.device)

        def at(value: torch.Tensor, penalty: float) -> tuple[float, torch.Tensor]:
            loss, _, by_c = gradient_of(unmoved, pull_axes @ value)
            return loss, pull_axes.T @ by_c

        def losses(split: str, value: torch.Tensor) -> torch.Tensor:
            change = change_of(unmoved, pull_axes @ value)
            return exact_losses(model.splits[split], problem.head, model.readout, change)

        def root(penalty: float) -> torch.Tensor:
            return (pull + penalty).sqrt()

        found = penalty_path(at, MAP_PENALTIES, unmoved[0], root, lambda x: float(losses("select", x).mean()))
        return finished_rung(model, "offset", width, True, best_of(found), uncorrected, losses)

    zero = torch.zeros(width, width + 1, dtype=torch.float64, device=problem.head.device)
    ends = penalty_path(objective, MAP_PENALTIES, zero, scale_of, lambda x: float(losses_of("select", x).mean()))
    full = finished_rung(model, "map_full", width * (width + 1), True, best_of(ends), uncorrected, losses_of)
    return [offset(), *(low_rank(rank) for rank in ranks), full]
