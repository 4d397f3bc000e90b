"""What a pair will cost before it is run: operations, bytes, disk, memory and time, from the models' configurations.

An operation is a floating-point addition or multiplication (a product of n × k and k × m takes 2·n·k·m). Counts leave
out what is small beside the matrix products: norms, activations, softmax.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from .errors import PsdError, nearest
from .pairs import Member, ModelFacts, Pair, model_folder
from .selection import STATISTICS_BUDGET
from .settings import DEFAULT_N_TOKENS, DEFAULT_TOP_K
from .sources import load_config, locate, widths_of
from .storage import WORKSPACE

STEPS = ("score", "fit", "controls", "figures")

FIT_SHARE = 0.45
"""The part of a text that is fitted on (DESIGN §2)."""

# How often a text's states go through products with the head, in units of all its tokens; and how often a fit's
# objective is evaluated. Counted on tiny pairs; benchmarks/plan.py checks them against what the code does.
SWEEPS_OF_A_MEMBER = 3.05
SWEEPS_OF_A_DAMAGE = 7.5
SWEEPS_OF_CONTROLS = 137.0
TOKENS_OF_LADDER = 600 * 8192
EVALUATIONS_OF_A_SET = 120
EVALUATIONS_OF_BIAS_ALL = 205
"""Each is a pass over the vocabulary where the statistics of all tokens would exceed their budget."""
CONTROL_MODELS = 12

ATTENDED = 1024
"""Mean positions that a token attends to: causal attention over documents that fill 2,048 positions, an upper bound."""
_SAFETY = 3


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with gated layers, as Llama, Qwen2, OLMo-2 and SmolLM2 have them."""

    width: int
    layers: int
    mlp_width: int
    heads: int
    kv_heads: int
    rows: int
    tied: bool

    @property
    def body_parameters(self) -> int:
        """Weights of all layers, without embedding and head (norms are left out)."""
        attention = 2 * self.width**2 + 2 * self.width * (self.width // self.heads) * self.kv_heads
        return self.layers * (attention + 3 * self.width * self.mlp_width)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.body_parameters + self.rows * self.width * (1 if self.tied else 2)

    def forward_operations(self, tokens: int, attended: float = ATTENDED) -> float:
        """Return the operations of one forward pass up to the final states."""
        return tokens * (2 * self.body_parameters + 4 * self.layers * self.width * attended)

    def head_operations(self, tokens: int) -> int:
        """Return the operations of one product of `tokens` states with the head."""
        return 2 * tokens * self.rows * self.width


def shape_of(member: Member, facts: ModelFacts) -> Shape:
    """Return a model's sizes: from its own configuration if it is a local folder, else from the registry's facts.

    The facts are the base's; a derived model is taken to have the same sizes.

    Raises:
        PsdError: neither says them.
    """
    if model_folder(member.model) is not None:
        config = load_config(locate(member, weights=False))
        found = widths_of(config)
        rows, tied = getattr(config, "vocab_size", None), bool(getattr(config, "tie_word_embeddings", False))
    else:
        found, rows, tied = facts, facts.head_rows, bool(facts.tied)
    sizes = {
        "width": found.width,
        "layers": found.layers,
        "mlp_width": found.mlp_width,
        "heads": found.heads,
        "kv_heads": found.kv_heads or found.heads,
        "rows": rows,
    }
    lacking = [name for name, value in sizes.items() if not value]
    if lacking:
        raise PsdError(
            f"{member.label}: its {', '.join(lacking)} not known, so its cost cannot be reckoned; put them under "
            "`facts` of a registered pair, or give a local folder"
        )
    return Shape(**{name: int(value or 0) for name, value in sizes.items()}, tied=tied)


@dataclass(frozen=True)
class Machine:
    """A device: peak operations a second, the share of it that products reach, bytes a second, bytes of memory.

    The shares of GPUs are assumptions, not measurements of this package.
    """

    name: str
    peak: float
    share: float
    bandwidth: float
    memory: float
    start_seconds: float
    is_gpu: bool = True


MACHINES = {
    m.name: m
    for m in (
        Machine("A100", 312e12, 0.35, 2.0e12, 80e9, 60.0),
        Machine("H200", 989e12, 0.35, 4.8e12, 141e9, 60.0),
        # one core with 512-bit vector instructions: float32 products as oneDNN runs them
        Machine("cpu core", 100e9, 0.5, 8e9, math.inf, 20.0, is_gpu=False),
    )
}


@dataclass(frozen=True)
class Cost:
    """What a step takes: operations, bytes read by fits; bytes kept on disk, of the device's and the host's memory."""

    operations: float = 0.0
    traffic: float = 0.0
    disk: float = 0.0
    device_memory: float = 0.0
    host_memory: float = 2e9

    def seconds(self, machine: Machine) -> float:
        """Return the expected seconds on a machine, with the start of a notebook and a model."""
        return (
            machine.start_seconds + self.operations / (machine.peak * machine.share) + self.traffic / machine.bandwidth
        )


@dataclass(frozen=True)
class Size:
    """How much is asked of a pair: tokens, ids of the set, damaged models, bytes a stored number."""

    n_tokens: int
    top_k: int
    n_damage_seeds: int = 5
    itemsize: int = 2

    @classmethod
    def of(cls, pair: Pair, parameters: Mapping[str, object] | None = None) -> "Size":
        """Return what a pair's registry entry and a notebook's `parameters` ask for, defaults filled in."""
        given = {name: value for name, value in (parameters or {}).items() if value not in (None, "")}
        dtype = given.get("dtype", pair.dtype or "bfloat16")
        return cls(
            n_tokens=int(str(given.get("n_tokens", pair.n_tokens or DEFAULT_N_TOKENS))),
            top_k=int(str(given.get("top_k", pair.top_k or DEFAULT_TOP_K))),
            n_damage_seeds=int(str(given.get("n_damage_seeds", 5))),
            itemsize=4 if dtype == "float32" else 2,
        )


def step_cost(step: str, shape: Shape, size: Size, attended: float = ATTENDED) -> Cost:
    """Return the cost of a step: "score" of one model; "fit", "controls" and "figures" of a pair.

    `attended`: mean positions that a token attends to.

    Raises:
        PsdError: another step.
    """
    if step not in STEPS:
        raise PsdError(f"no step {step!r}; {nearest(step, list(STEPS))}")
    if step == "figures":
        return Cost(disk=5e6)
    states = size.n_tokens * (shape.width * size.itemsize + 4)
    head = shape.rows * shape.width * size.itemsize
    if step == "score":
        weights = shape.parameters * size.itemsize
        # a batch's activations, several copies of the widest layer
        batch = 32_768 * (4 * shape.mlp_width + 8 * shape.width) * 2
        return Cost(
            operations=shape.forward_operations(size.n_tokens, attended) + shape.head_operations(size.n_tokens),
            disk=states + head + size.n_tokens * 9,
            device_memory=weights + batch + WORKSPACE,
            host_memory=2e9 + weights + 2 * 16_384 * shape.width * size.itemsize,
        )
    tokens = FIT_SHARE * size.n_tokens
    set_bytes, all_bytes = tokens * 4 * size.top_k, tokens * 4 * shape.rows
    by_passes = all_bytes > STATISTICS_BUDGET
    if step == "fit":
        models = 2 + size.n_damage_seeds
        sweeps = 2 * SWEEPS_OF_A_MEMBER + size.n_damage_seeds * SWEEPS_OF_A_DAMAGE
        sweeps += 2 * FIT_SHARE * EVALUATIONS_OF_BIAS_ALL * by_passes
        traffic = 2 * EVALUATIONS_OF_BIAS_ALL * all_bytes * (not by_passes)
    else:
        models, traffic = CONTROL_MODELS, 0.0
        sweeps = SWEEPS_OF_CONTROLS + TOKENS_OF_LADDER / size.n_tokens
    stored = set_bytes if by_passes else max(set_bytes, all_bytes)
    return Cost(
        operations=sweeps * shape.head_operations(size.n_tokens),
        traffic=traffic + models * EVALUATIONS_OF_A_SET * set_bytes,
        disk=50e6,
        device_memory=4 * head + 2 * min(stored, STATISTICS_BUDGET) + 2e9,
        host_memory=3e9 + 2 * states + 3 * head,
    )


@dataclass(frozen=True)
class Resources:
    """What a job asks of an engine: GPUs, megabytes of memory and disk, minutes."""

    gpu: int
    mem_mb: int
    disk_mb: int
    runtime: int


def resources(step: str, shape: Shape, size: Size, machine: Machine, on_gpu: bool) -> Resources:
    """Return what a step's job asks for, three times the expected time and a quarter of an hour.

    More GPUs than one where a model does not fit in `machine`'s memory (score it with device "spread").
    """
    cost = step_cost(step, shape, size)
    gpus = max(1, math.ceil(cost.device_memory / machine.memory)) if on_gpu and step != "figures" else 0
    host = cost.host_memory + (0 if on_gpu else cost.device_memory)
    minutes = 15 + _SAFETY * cost.seconds(machine) / 60
    return Resources(gpus, math.ceil(host / 1e6), math.ceil(cost.disk / 1e6), math.ceil(minutes))


def plan_table(pairs: Mapping[str, tuple[Pair, Size]], machine: Machine, steps: Sequence[str] = STEPS) -> pd.DataFrame:
    """Return the plan, a row per pair and a last row `all`, in which a model that pairs share is scored once.

    Columns: `pair, tokens, score_tflop, fit_tflop, controls_tflop, traffic_gb, disk_gb, memory_gb` (of the device, at
    its peak), `hours` on `machine`. A pair whose sizes are not known has nulls.
    """
    rows, seen = [], set()
    total = {"score_tflop": 0.0, "disk_gb": 0.0, "hours": 0.0}
    for name, (pair, size) in pairs.items():
        try:
            shapes = {m: shape_of(m, pair.facts) for m in (pair.base, pair.derived)}
        except PsdError:
            rows.append({"pair": name, "tokens": size.n_tokens})
            continue
        scores = {member: step_cost("score", shape, size) for member, shape in shapes.items()}
        others = {step: step_cost(step, shapes[pair.base], size) for step in steps if step != "score"}
        every = [*scores.values(), *others.values()]
        rows.append(
            {
                "pair": name,
                "tokens": size.n_tokens,
                "score_tflop": sum(c.operations for c in scores.values()) / 1e12,
                **{f"{s}_tflop": others[s].operations / 1e12 for s in ("fit", "controls") if s in others},
                "traffic_gb": sum(c.traffic for c in every) / 1e9,
                "disk_gb": sum(c.disk for c in every) / 1e9,
                "memory_gb": max(c.device_memory for c in every) / 1e9,
                "hours": sum(c.seconds(machine) for c in every) / 3600,
            }
        )
        for member, cost in scores.items():
            if (key := (member, pair.text, size.n_tokens)) in seen:
                total["score_tflop"] -= cost.operations / 1e12
                total["disk_gb"] -= cost.disk / 1e9
                total["hours"] -= cost.seconds(machine) / 3600
            seen.add(key)
    table = pd.DataFrame(rows)
    summed = table.drop(columns=["pair", "memory_gb"]).sum() if len(table.columns) > 2 else table[["tokens"]].sum()
    last = {**summed, **({"memory_gb": table["memory_gb"].max()} if "memory_gb" in table else {}), "pair": "all"}
    for column, repeated in total.items():
        if column in table:
            last[column] += repeated
    return pd.concat([table, pd.DataFrame([last])], ignore_index=True)
