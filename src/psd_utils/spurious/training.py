"""Pretraining, gate matching and fine-tuning of the associative memory by plain SGD, all seeds at once.

In: a world and weights. Out: weights, matched learning rates, and a trajectory of measured quantities.

Source: Palit et al. (2026), toy model, pretraining and injection. While rates are searched, a seed that
diverges carries NaN in its own row and leaves the others alone.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm.auto import tqdm

from psd_utils.spurious.descent import Batches, descend
from psd_utils.spurious.memory import (
    Facts,
    MemorySettings,
    Weights,
    World,
    fact_accuracy,
    generator,
    initial_weights,
)
from psd_utils.spurious.trajectory import Trajectory, checkpoint_steps, record

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Protocol:
    """How training is run and when it counts as done; the defaults are the paper's.

    Attributes:
        pretraining_rates: learning rates tried in order; the first that reaches the gate on A and B is used.
        pretraining_check_every: steps between two looks at the accuracy.
        pretraining_limit: steps after which a rate is given up.
        gate: accuracy that counts as learned, 0–1.
        rate_ratio: pretraining rate / default fine-tuning rate.
        gate_step: the step at which the new facts should first reach the gate.
        gate_tolerance: relative tolerance on that step.
        gate_check_every: steps between two looks at the new facts.
        log2_range: the bisection searches the default rate × 2^−range … 2^range.
        n_bisections: rates tried at most.
    """

    pretraining_rates: tuple[float, ...] = (0.5, 0.3, 0.2, 0.1, 0.05)
    pretraining_check_every: int = 100
    pretraining_limit: int = 20_000
    gate: float = 0.99
    rate_ratio: float = 40 / 3
    gate_step: int = 200
    gate_tolerance: float = 0.15
    gate_check_every: int = 5
    log2_range: float = 6.0
    n_bisections: int = 11


PAPER = Protocol()
"""The paper's protocol."""


@dataclass(frozen=True)
class Pretrained:
    """The model that knows A and B.

    Attributes:
        weights: every seed's weights at its own gate.
        rate: [S], the learning rate that worked.
        gate_step: [S], the step at which both sets had reached the gate.
    """

    weights: Weights
    rate: Tensor
    gate_step: Tensor


@dataclass(frozen=True)
class MatchedRate:
    """Fine-tuning rates at which the new facts are learned at the agreed step.

    Attributes:
        rate: [S].
        gate_step: [S], where the new facts first reached the gate at that rate; inf if beyond the search's
            end.
        matched: [S] bool, whether the gate step is within tolerance.
    """

    rate: Tensor
    gate_step: Tensor
    matched: Tensor


@dataclass(frozen=True)
class Replay:
    """Old facts of A mixed into every fine-tuning batch.

    Attributes:
        n_facts: size of the fixed random subset that may be replayed.
        per_step: extra samples per step, drawn from it with replacement.
    """

    n_facts: int
    per_step: int


def pretrain(world: World, protocol: Protocol = PAPER) -> Pretrained:
    """Train on A and B until both reach the gate.

    Raises:
        RuntimeError: a seed that reached the gate at none of the rates.
    """
    start = initial_weights(world.settings, world.seeds)
    final, n = start.clone(), world.n_seeds
    rates, gates = torch.full((n,), math.nan, dtype=torch.float64), torch.full((n,), math.inf)
    todo = torch.arange(n)
    for rate in protocol.pretraining_rates:
        part, weights = world.select(todo), start.select(todo)
        reached = _pretrain_once(part, weights, rate, protocol)
        done = reached.gates.isfinite()
        where = todo[done]
        final.W[where], final.U[where] = reached.weights.W[done], reached.weights.U[done]
        rates[where], gates[where] = rate, reached.gates[done]
        todo = todo[~done]
        if len(todo) == 0:
            return Pretrained(final, rates, gates)
        log.info("Learning rate %g did not reach the gate for %d seeds.", rate, len(todo))
    raise RuntimeError(
        f"Pretraining (α {world.settings.alpha:g}, normalisation {world.settings.normalisation!r}) did not bring "
        f"A and B to {protocol.gate} for seeds {world.select(todo).seeds} "
        f"at any of the rates {protocol.pretraining_rates} within {protocol.pretraining_limit} steps. "
        "Fewer facts, a larger dimension or more steps may help."
    )


@dataclass
class _Reached:
    weights: Weights
    gates: Tensor = field(default_factory=lambda: torch.empty(0))


def _pretrain_once(world: World, weights: Weights, rate: float, protocol: Protocol) -> _Reached:
    settings, every = world.settings, protocol.pretraining_check_every
    reached = _Reached(weights.clone(), torch.full((world.n_seeds,), math.inf))
    pool = world.A + world.B
    batches = Batches(world.seeds, "pretraining", 2 * settings.n_old, settings.batch_size)
    run = descend(weights.clone(), pool, batches.steps(protocol.pretraining_limit), rate, settings)
    for step, now in run:
        if step % every:
            continue
        both = torch.minimum(*(fact_accuracy(f, now, settings.normalisation) for f in (world.A, world.B)))
        new = (both >= protocol.gate) & reached.gates.isinf()
        reached.weights.W[new], reached.weights.U[new] = now.W[new], now.U[new]
        reached.gates[new] = step
        alive = now.W.flatten(1).isfinite().all(1)
        if not bool((reached.gates.isinf() & alive).any()):
            break
    return reached


def default_rate(start: Pretrained, protocol: Protocol = PAPER) -> Tensor:
    """The fine-tuning rate before matching, [S]: the pretraining rate / 13.33."""
    return start.rate / protocol.rate_ratio


def gate_step(world: World, weights: Weights, rate: Tensor, n_steps: int, protocol: Protocol = PAPER) -> Tensor:
    """First step at which the new facts reach the gate, [S]: inf if beyond n_steps, NaN if diverged."""
    return _race(world, weights, rate, n_steps, protocol)[0]


def _race(world: World, weights: Weights, rate: Tensor, n_steps: int, protocol: Protocol) -> tuple[Tensor, Tensor]:
    """The gate steps, and the new-fact accuracy when the race ended, each [S]."""
    settings = world.settings
    now = weights.clone()
    gates = torch.full((world.n_seeds,), math.inf, dtype=torch.float64)
    batches = Batches(world.seeds, "fine_tuning", settings.n_new, settings.batch_size)
    run = descend(now, world.new, batches.steps(n_steps), rate, settings, settings.readout_rate, _projected(world))
    for step, _ in run:
        if step % protocol.gate_check_every:
            continue
        reached = fact_accuracy(world.new, now, settings.normalisation) >= protocol.gate
        gates[reached & gates.isinf()] = step
        gates[~now.W.flatten(1).isfinite().all(1) & gates.isinf()] = math.nan
        if not bool(gates.isinf().any()):
            break
    return gates, fact_accuracy(world.new, now, settings.normalisation)


def match_rate(world: World, start: Pretrained, protocol: Protocol = PAPER) -> MatchedRate:
    """Find each seed's fine-tuning rate at which the new facts reach the gate at the agreed step.

    Bisection on log₂ of the rate (paper: gate matching). A rate is judged as soon as the gate is reached or
    the upper end of the tolerance is passed. Where no rate falls within the tolerance, the nearest tried is
    returned with matched False, and a warning is logged; nearest is by gate step, or by the accuracy reached
    where the gate never was.
    """
    n = world.n_seeds
    low = torch.full((n,), -protocol.log2_range, dtype=torch.float64)
    high = -low
    best = torch.full((n,), math.inf, dtype=torch.float64)
    rate, gates = default_rate(start, protocol).clone(), best.clone()
    last = math.ceil(protocol.gate_step * (1 + protocol.gate_tolerance))
    allowed = protocol.gate_tolerance * protocol.gate_step
    todo = torch.arange(n)
    for _ in range(protocol.n_bisections):
        middle = (low[todo] + high[todo]) / 2
        tried = default_rate(start, protocol)[todo] * 2**middle
        found, accuracy = _race(world.select(todo), start.weights.select(todo), tried, last, protocol)
        distance = (found - protocol.gate_step).abs()
        distance[found.isinf()] = 1e6 * (2 - accuracy[found.isinf()])
        closer = distance < best[todo]
        where = todo[closer]
        rate[where], gates[where], best[where] = tried[closer], found[closer], distance[closer]
        too_fast = (found < protocol.gate_step) | found.isnan()
        high[todo[too_fast]], low[todo[~too_fast]] = middle[too_fast], middle[~too_fast]
        todo = todo[~(distance <= allowed)]
        if len(todo) == 0:
            break
    matched = best <= allowed
    if not bool(matched.all()):
        bad = [world.seeds[i] for i in (~matched).nonzero().flatten().tolist()]
        log.warning(
            "No tried rate lets the new facts reach %g at step %d ± %g for seeds %s: nearest rate used.",
            protocol.gate,
            protocol.gate_step,
            allowed,
            bad,
        )
    return MatchedRate(rate, gates, matched)


def fine_tune(
    world: World,
    weights: Weights,
    rate: Tensor | float,
    n_steps: int,
    *,
    checkpoints: Sequence[int] | None = None,
    keep_weights: Iterable[int] | bool = False,
    replay: Replay | None = None,
    progress: bool = False,
) -> Trajectory:
    """Train on the new facts and measure every quantity at the checkpoints.

    Args:
        world: the facts; its settings say whether U is frozen and the shared row projected out.
        weights: where to start; not changed.
        rate: learning rate of W, one per seed [S] or one for all.
        n_steps: SGD steps.
        checkpoints: steps at which to measure; None for every 5 to step 200, then 60 log-spaced ones.
        keep_weights: True keeps the weights of all checkpoints, or give the steps to keep.
        replay: old facts to mix into every batch.
        progress: show a progress bar.

    Raises:
        ValueError: rates that do not fit the seeds or are not above 0, no steps, or a replay larger than A.
    """
    settings = world.settings
    rates = torch.as_tensor(rate, dtype=torch.float64)
    if rates.ndim > 1 or (rates.ndim == 1 and len(rates) != world.n_seeds) or not bool((rates > 0).all()):
        raise ValueError(
            f"rate is {rate}; expected a learning rate above 0, or one for each of the {world.n_seeds} seeds."
        )
    if n_steps < 1:
        raise ValueError(f"n_steps is {n_steps}; expected at least 1.")
    steps = checkpoint_steps(n_steps) if checkpoints is None else tuple(sorted({*checkpoints, 0}))
    pool = world.new
    streams = [Batches(world.seeds, "fine_tuning", settings.n_new, settings.batch_size)]
    replayed = None
    if replay is not None and replay.n_facts > 0:
        if replay.n_facts > settings.n_old or replay.per_step < 1:
            raise ValueError(
                f"replay asks for {replay.n_facts} facts, {replay.per_step} per step; expected 1 … "
                f"{settings.n_old} facts and at least one sample per step."
            )
        replayed = replayed_facts(world, replay.n_facts)
        chosen = Facts(
            world.A.keys.gather(1, replayed[..., None].expand(-1, -1, settings.dimension)),
            world.A.answers.gather(1, replayed),
        )
        pool = world.new + chosen
        streams.append(Batches(world.seeds, "replay", replay.n_facts, replay.per_step, settings.n_new))
    batches = zip(*(s.steps(n_steps) for s in streams), strict=True)
    run = descend(
        weights.clone(),
        pool,
        (torch.cat(parts, 1) for parts in batches),
        rates,
        settings,
        settings.readout_rate,
        _projected(world),
    )
    return record(
        world,
        weights,
        rates.expand(world.n_seeds),
        steps,
        tqdm(run, total=n_steps, disable=not progress, leave=False),
        keep_weights,
        replayed,
    )


def replayed_facts(world: World, n_facts: int) -> Tensor:
    """The fixed random subset of A that a seed replays, [S, n_facts]; smaller subsets are inside larger
    ones.
    """
    n = world.settings.n_old
    return torch.stack([torch.randperm(n, generator=generator(s, "replayed_facts"))[:n_facts] for s in world.seeds])


def brief_training(
    facts: Facts,
    weights: Weights,
    rate: Tensor,
    n_steps: int,
    settings: MemorySettings,
    seeds: Sequence[int],
) -> Weights:
    """A few SGD steps on given facts alone (the brief replay of the interventions); returns new weights."""
    batches = Batches(tuple(seeds), "replay", facts.answers.shape[1], settings.batch_size)
    now = weights.clone()
    for _ in descend(now, facts, batches.steps(n_steps), rate, settings, settings.readout_rate):
        pass
    return now


def _projected(world: World) -> Tensor | None:
    return world.shared_key if world.settings.project_shared else None
