"""The fits of 02_fit and the exact passes, as ratios to the straightforward way: `python benchmarks/engine.py`.

The straightforward way: torch's L-BFGS with autograd through `torch.nn.functional.linear_cross_entropy`, its chunk
tuned, and through full logits in chunks of tokens; float32. Every alternative is timed to its first iterate within 1e-6
nats of the optimum. By default its time is (cost of one evaluation, measured in turns with ours) × (evaluations that
the same L-BFGS needs on the same objective, counted on the statistics, where an evaluation is cheap); `--full` runs
every evaluation instead, which takes hours.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    RESULTS,
    Problem,
    in_words,
    paired,
    peak_bytes,
    resident,
    seconds,
    setting,
    summary,
    write,
    zipf_problem,
)
from torch.nn.functional import cross_entropy, linear_cross_entropy

from psd_utils import Correction, HeadStatistics, head_statistics
from psd_utils.fit import PENALTIES, Fit, fits_with_penalties
from psd_utils.head import top_k_ids
from psd_utils.kernels import corrected_losses, corrected_moments, fit_objective
from psd_utils.objectives import StatisticsObjective

WITHIN = 1e-6
KINDS = ("temperature", "bias", "bias_temperature")
CHUNKS = (256, 512, 1024)


class Alternative:
    """Mean loss of (β, b) by autograd over the whole vocabulary."""

    def __init__(self, problem: Problem, ids: torch.Tensor, chunk: int) -> None:
        self.problem, self.ids, self.chunk = problem, ids, chunk

    def loss(self, beta: torch.Tensor, bias: torch.Tensor) -> float:
        """Add the gradient of the mean loss to β and b, and return the loss."""
        raise NotImplementedError

    def dense(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias over the whole vocabulary."""
        return torch.zeros(self.problem.head.shape[0]).index_copy(0, self.ids, bias)


class LinearCrossEntropy(Alternative):
    """Through torch's fused linear cross-entropy."""

    def loss(self, beta: torch.Tensor, bias: torch.Tensor) -> float:
        """Add the gradient of the mean loss to β and b, and return the loss."""
        p = self.problem
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk)
        value = linear_cross_entropy(p.hidden * beta, p.head, p.targets, linear_bias=self.dense(bias), options=options)
        value.backward()
        return float(value.detach())


class ChunkedLogits(Alternative):
    """Through full logits, some tokens at a time."""

    def loss(self, beta: torch.Tensor, bias: torch.Tensor) -> float:
        """Add the gradient of the mean loss to β and b, and return the loss."""
        p, total = self.problem, 0.0
        for hidden, targets in zip(p.hidden.split(self.chunk), p.targets.split(self.chunk), strict=True):
            logits = hidden @ p.head.T * beta + self.dense(bias)
            part = cross_entropy(logits, targets, reduction="sum") / len(p.targets)
            part.backward()
            total += float(part.detach())
        return total


class FromStatistics(Alternative):
    """The same objective from the statistics: to count what L-BFGS needs, not to be timed."""

    def __init__(self, statistics: HeadStatistics) -> None:
        self.statistics = statistics
        self.at_beta_one = StatisticsObjective(statistics).at_beta_one()

    def loss(self, beta: torch.Tensor, bias: torch.Tensor) -> float:
        """Add the gradient of the mean loss to β and b, and return the loss."""
        if not beta.requires_grad:
            loss, gradient = self.at_beta_one(bias.detach().double())
            bias.backward(gradient.float())
            return loss
        low, high = self.statistics.beta_range
        at = fit_objective(self.statistics, min(max(float(beta.detach()), low), high), bias.detach())
        for variable, gradient in ((beta, torch.tensor(at.gradient_beta)), (bias, at.gradient_bias.float())):
            if variable.requires_grad:
                variable.backward(gradient.to(variable.dtype))
        return at.loss


class Reached(Exception):
    """The objective came within reach of the optimum."""


def evaluations_of(way: Alternative, kind: str, penalty: float, scale: torch.Tensor, start: Any, goal: float) -> Any:
    """Run torch's L-BFGS until an evaluation lies below `goal`; return (evaluations, lowest value, last point).

    The bias is scaled by 1/√f, which the alternative would not have by itself: it is given the better variables.
    """
    beta = torch.tensor(start[0], requires_grad=kind != "bias")
    u = (start[1] * scale).clone().requires_grad_(kind != "temperature")
    count, lowest, last = 0, float("inf"), start

    def closure() -> torch.Tensor:
        nonlocal count, lowest, last
        optimizer.zero_grad()
        bias = u / scale
        value = way.loss(beta, bias)
        if penalty:
            (penalty / 2 * (u / scale).square().sum()).backward()
        value += penalty / 2 * float(bias.detach().double().square().sum())
        count += 1
        if value < lowest:
            lowest, last = value, (float(beta.detach()), bias.detach().clone())
        if value <= goal:
            raise Reached
        return torch.tensor(value)

    free = [variable for variable in (beta, u) if variable.requires_grad]
    optimizer = torch.optim.LBFGS(
        free, max_iter=200, max_eval=400, history_size=20, line_search_fn="strong_wolfe", tolerance_change=0.0
    )
    try:
        optimizer.step(closure)
    except Reached:
        return count, lowest, last
    return None, lowest, last


class Table:
    """Nine fits of one model: temperature, and bias and both × four penalties."""

    def __init__(self, problem: Problem, ids: torch.Tensor) -> None:
        self.problem, self.ids = problem, ids
        self.fits: dict[str, list[Fit]] = {}
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Make the statistics, fit, certify by one exact pass."""
        p = self.problem
        made: list[HeadStatistics] = []
        self.seconds["statistics"] = seconds(
            lambda: made.append(head_statistics(p.hidden, p.head, p.targets, self.ids))
        )
        self.statistics = made[0]
        objective = StatisticsObjective(self.statistics)
        for kind in KINDS:
            self.seconds[f"fits of {kind}"] = seconds(
                lambda kind=kind: self.fits.update({kind: fits_with_penalties(objective, kind)})
            )
        self.seconds["certifying exact pass"] = seconds(self.certify)

    def certify(self) -> None:
        """Compare every fit's loss with the exact pass."""
        fits = [fit for kind in KINDS for fit in self.fits[kind]]
        p = self.problem
        exact = corrected_losses(p.hidden, p.head, p.targets, [fit.correction for fit in fits])
        claimed = torch.tensor([fit.convergence.loss for fit in fits], dtype=torch.float64)
        self.error = float((exact.double().mean(dim=1) - claimed).abs().max())

    def objective(self, kind: str, fit: Fit) -> float:
        """Return the penalised objective at a fit."""
        return fit.convergence.loss + fit.penalty / 2 * float(fit.correction.bias.double().square().sum())


def count_evaluations(table: Table, way: Alternative) -> dict[str, Any]:
    """Return, by fit, the evaluations that torch's L-BFGS needs to come within 1e-6 nats, warm-started like ours."""
    frequencies = table.statistics.target_counts().double() / len(table.statistics)
    counts: dict[str, Any] = {}
    for kind in KINDS:
        start = (1.0, torch.zeros(table.ids.numel()))
        for fit in table.fits[kind]:
            scale = (frequencies.clamp(min=0.5 / len(table.statistics)) + fit.penalty).sqrt().float()
            goal = table.objective(kind, fit) + WITHIN
            count, lowest, start = evaluations_of(way, kind, fit.penalty, scale, start, goal)
            counts[f"{kind} λ={fit.penalty:g}"] = {"evaluations": count, "short_by": max(0.0, lowest - goal + WITHIN)}
    return counts


def tuned(way: type[Alternative], problem: Problem, ids: torch.Tensor) -> Alternative:
    """Return the alternative with its fastest chunk, by one evaluation of an eighth of the tokens each."""
    part = Problem(problem.hidden[:2048], problem.head, problem.targets[:2048])
    evaluate(way(part, ids, CHUNKS[0]))()
    best = min(CHUNKS, key=lambda chunk: min(seconds(evaluate(way(part, ids, chunk))) for _ in range(2)))
    return way(problem, ids, best)


def evaluate(way: Alternative) -> Callable[[], float]:
    """Return one evaluation with its gradient at β = 1.1 and b = 0."""

    def run() -> float:
        beta = torch.tensor(1.1, requires_grad=True)
        return way.loss(beta, torch.zeros(way.ids.numel(), requires_grad=True))

    return run


def fit_table(problems: dict[str, Problem], ids: torch.Tensor, rounds: int, full: bool) -> dict[str, Any]:
    """Compare the whole table of both models with every alternative."""
    tables = {name: Table(problem, ids) for name, problem in problems.items()}
    ways = [tuned(way, problems["base"], ids) for way in (LinearCrossEntropy, ChunkedLogits)]

    def ours() -> None:
        for table in tables.values():
            table.run()

    ours()
    result: dict[str, Any] = {"alternatives": {}}
    ours_once = sum(sum(t.seconds.values()) for t in tables.values())
    counts: dict[str, Any] = {}
    for way in ways:
        name, took = f"{type(way).__name__}, chunk {way.chunk}", 0.0
        if full or not counts:
            for member, table in tables.items():
                counter = type(way)(problems[member], ids, way.chunk) if full else FromStatistics(table.statistics)
                start = time.perf_counter()
                counts[member] = count_evaluations(table, counter)
                took += time.perf_counter() - start
        entries = [entry for by_fit in counts.values() for entry in by_fit.values()]
        reached = [entry["evaluations"] for entry in entries if entry["evaluations"] is not None]
        result["alternatives"][name] = {
            "evaluations": dict(counts),
            "fits_that_reach_the_optimum": f"{len(reached)} of {len(entries)}",
            "evaluations_in_all": sum(reached),
        }
        if full:
            result["alternatives"][name]["ratio"] = summary([took / ours_once])
    if not full:
        ratios: dict[str, list[float]] = {name: [] for name in result["alternatives"]}
        for turn in range(rounds):
            own = seconds(ours) if turn else ours_once
            for name, way in zip(result["alternatives"], ways, strict=True):
                ratios[name].append(seconds(evaluate(way)) / own)
        for name, values in ratios.items():
            entry = result["alternatives"][name]
            entry["ratio"] = summary([entry["evaluations_in_all"] * value for value in values])
            entry["one_evaluation_over_our_whole_table"] = [round(value, 4) for value in values]
    shares: dict[str, float] = {}
    total = sum(sum(t.seconds.values()) for t in tables.values())
    for table in tables.values():
        for part, took in table.seconds.items():
            shares[part] = shares.get(part, 0.0) + took / total
    result["where_our_time_goes"] = {part: round(share, 3) for part, share in shares.items()}
    result["largest_difference_to_the_exact_pass"] = max(table.error for table in tables.values())
    result["status"] = {
        member: {f"{kind} λ={fit.penalty:g}": fit.convergence.status for kind in KINDS for fit in table.fits[kind]}
        for member, table in tables.items()
    }
    return result


def exact_passes(problem: Problem, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Compare the exact loss with linear_cross_entropy's forward, and the moments with its forward and backward."""
    correction = Correction(ids, torch.linspace(-1, 1, ids.numel()), 1 / 1.1)
    p = problem

    def forward(chunk: int) -> Callable[[], Any]:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return lambda: linear_cross_entropy(p.hidden, p.head, p.targets, reduction="none", options=options)

    chunk = min(CHUNKS, key=lambda size: min(seconds(forward(size)) for _ in range(2)))
    name = f"torch.nn.functional.linear_cross_entropy {torch.__version__}"
    both = tuned(LinearCrossEntropy, problem, ids)
    result = {}
    for what, ours, other, label in (
        (
            "exact loss",
            lambda: corrected_losses(p.hidden, p.head, p.targets, [None]),
            forward(chunk),
            f"forward, chunk {chunk}",
        ),
        (
            "loss with Σp and E_p[z]",
            lambda: corrected_moments(p.hidden, p.head, p.targets, correction),
            evaluate(both),
            f"forward and backward, chunk {both.chunk}",
        ),
    ):
        ratios = paired(ours, {"other": other}, rounds)["other"]
        result[what] = {"alternative": f"{name}, {label}", "ratio": summary(ratios)}
    ours_bytes, other_bytes = (peak_bytes(__file__, "--peak", way, str(chunk)) for way in ("ours", "other"))
    result["exact loss"]["memory_ratio"] = round(other_bytes / ours_bytes, 2)
    return result


def peak(way: str, chunk: int) -> None:
    """Print the bytes that one exact loss pass adds to this process at most."""
    hidden, head = torch.randn(16_384, 256), torch.randn(50_304, 256)
    targets = torch.zeros(16_384, dtype=torch.int64)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    runs = {
        "ours": lambda n: corrected_losses(hidden[:n], head, targets[:n], [None]),
        "other": lambda n: linear_cross_entropy(hidden[:n], head, targets[:n], reduction="none", options=options),
    }
    runs[way](8)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    runs[way](16_384)
    print(resident("VmHWM") - before)


def main() -> None:
    """Run, print ratios, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table-only", action="store_true", help="keep the exact passes of the last results")
    parser.add_argument("--full", action="store_true", help="run every evaluation of the alternatives (hours)")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "CHUNK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        peak(arguments.peak[0], int(arguments.peak[1]))
        return
    base = zipf_problem(arguments.vocabulary, arguments.tokens, arguments.width)
    ids = top_k_ids(base.targets, arguments.top_k, torch.empty(0, dtype=torch.int64), arguments.vocabulary)
    results: dict[str, Any] = {
        "setting": setting(),
        "shape": {
            "vocabulary": arguments.vocabulary,
            "tokens": arguments.tokens,
            "width": arguments.width,
            "set": ids.numel(),
            "penalties": list(PENALTIES),
        },
        "alternatives_timed_by": "running them" if arguments.full else "cost of an evaluation × evaluations needed",
    }
    if arguments.table_only:
        results["exact_passes"] = json.loads((RESULTS / "engine.json").read_text())["exact_passes"]
    else:
        results["exact_passes"] = exact_passes(base, ids, arguments.rounds)
    for what, entry in results["exact_passes"].items():
        print(f"{what}: {in_words(entry['ratio'])} times faster than {entry['alternative']}", flush=True)
    write("engine", results)
    results["fit_table"] = fit_table(
        {"base": base, "derived": base.damaged(1)}, ids, arguments.table_rounds, arguments.full
    )
    for name, entry in results["fit_table"]["alternatives"].items():
        print(
            f"table of 18 fits: {in_words(entry['ratio'])} times faster than torch {torch.__version__} L-BFGS through "
            f"{name} ({entry['fits_that_reach_the_optimum']} fits reach the optimum, in "
            f"{entry['evaluations_in_all']} evaluations)"
        )
    print(
        "our time:",
        ", ".join(f"{part} {share:.0%}" for part, share in results["fit_table"]["where_our_time_goes"].items()),
    )
    write("engine", results)


if __name__ == "__main__":
    main()
