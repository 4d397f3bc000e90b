"""The kernels in Triton, for CUDA (and, in tests, for Triton's interpreter on the CPU).

Products run on tensor cores with float32 sums; sums over splits of the vocabulary or of the tokens are float64 and in a
fixed order, so that two runs give the same bits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton

from ..correction import Correction
from . import passes
from .nodes import LOG2_E, Nodes, exponent_of
from .passes import Partition, Rest
from .statistics import CorrectedMoments, HeadStatistics, Objective, Readout, interpolation
from .triton_fit import gradient_kernel, totals_kernel
from .triton_rest import rest_kernel
from .triton_set import set_kernel

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Blocks:
    """One program's tile: tokens × head rows, by steps of `depth` along the width."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int

    @classmethod
    def choose(cls, dtype: torch.dtype, softcap: bool) -> "Blocks":
        """Return tiles for tensor cores, or smaller ones for float32 inputs, which are multiplied without them.

        Soft-capping needs registers of its own: with 128 rows they would spill.
        """
        return cls(128, 64 if softcap else 128, 64, 8, 3) if dtype in _HALF else cls(64, 64, 32, 8, 2)


class TritonEngine:
    """The two pieces of work of `passes`, by kernels."""

    dtype = torch.float32

    def __init__(
        self, hidden: torch.Tensor, head: torch.Tensor, readout: Readout, blocks: Blocks | None = None
    ) -> None:
        both_half = hidden.dtype == head.dtype and head.dtype in _HALF
        self._input = head.dtype if both_half else torch.float32
        self._head = head.to(self._input).contiguous()
        self.device = head.device
        self._readout = readout
        self._blocks = blocks or Blocks.choose(self._input, readout.softcap is not None)
        self._bias = None if readout.bias is None else readout.bias.to(self.device, torch.float32).contiguous()
        self.masked = readout.masked
        self.vocabulary = head.shape[0]
        self.span = 65536

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states on the device in the dtype of the head."""
        return hidden.to(self.device, self._input).contiguous()

    def set_step(self, k: int) -> int:
        """Return tokens whose logits of `k` ids take a quarter of a gigabyte."""
        return max(self._blocks.tokens, 2**26 // max(k, 1))

    def readout_of(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that takes states to float32 logits [tokens, K] of some head rows."""
        blocks = self._blocks

        def logits(states: torch.Tensor) -> torch.Tensor:
            n, k = states.shape[0], ids.numel()
            out = torch.empty(n, k, dtype=torch.float32, device=self.device)
            if n and k:
                grid = (triton.cdiv(n, blocks.tokens), triton.cdiv(k, blocks.rows))
                set_kernel[grid](
                    states, self._head, self._bias_or_head(), ids, out, n, k, *self._layout(states), **self._constants()
                )
            if self.masked is not None:
                out.masked_fill_(self.masked.to(self.device)[ids], -torch.inf)
            return out

        return logits

    def rest(
        self, states: torch.Tensor, partition: Partition, places: torch.Tensor, nodes: Nodes, weighted: bool
    ) -> Rest:
        """Return the sums over the rest at every node: partial sums by split, joined in float64."""
        n, n_nodes, n_rest = states.shape[0], len(nodes.exponents), partition.rest.numel()
        if n == 0 or n_rest == 0:
            return Rest.empty(n, n_nodes, self.dtype, self.device, weighted)
        blocks, device = self._blocks, self.device
        tiles, token_blocks = triton.cdiv(n_rest, blocks.rows), triton.cdiv(n, blocks.tokens)
        splits = min(tiles, max(1, triton.cdiv(4 * _processors(device), token_blocks)))
        tiles_per_split = triton.cdiv(tiles, splits)
        splits = triton.cdiv(tiles, tiles_per_split)
        best, target = (torch.empty(splits, n, dtype=torch.float32, device=device) for _ in range(2))
        column = torch.empty(splits, n, dtype=torch.int32, device=device)
        sums = torch.empty(splits, n, n_nodes, dtype=torch.float32, device=device)
        weighted_sums = torch.empty_like(sums) if weighted else sums
        rest_kernel[token_blocks, splits](
            states,
            self._head,
            self._bias_or_head(),
            partition.rest,
            (places - partition.ids.numel()).to(torch.int32),
            torch.tensor(nodes.exponents, dtype=torch.float32, device=device),
            best,
            column,
            target,
            sums,
            weighted_sums,
            n,
            n_rest,
            *self._layout(states),
            tiles_per_split,
            NODES=n_nodes,
            COLUMNS=max(2, triton.next_power_of_2(n_nodes)),
            WEIGHTED=weighted,
            **self._constants(),
        )
        joined = _Joined.of(best, sums, weighted_sums if weighted else None, nodes)
        best_id = partition.rest[column.gather(0, joined.split[None])[0].long()]
        return Rest(joined.best, best_id, target.amax(dim=0), joined.sums, joined.weighted)

    def _bias_or_head(self) -> torch.Tensor:
        """Return the head's bias, or some pointer where there is none and none is read."""
        return self._head if self._bias is None else self._bias

    def _layout(self, states: torch.Tensor) -> tuple[int, int, int, float, float]:
        cap = 1.0 if self._readout.softcap is None else self._readout.softcap
        return states.shape[1], states.stride(0), self._head.stride(0), float(self._readout.scale), float(cap)

    def _constants(self) -> dict[str, object]:
        blocks = self._blocks
        return {
            "HAS_BIAS": self._bias is not None,
            "HAS_CAP": self._readout.softcap is not None,
            "PRECISION": "ieee",
            "UPCAST": self.device.type != "cuda",
            "TOKENS": blocks.tokens,
            "ROWS": blocks.rows,
            "DEPTH": blocks.depth,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }


@dataclass(frozen=True)
class _Joined:
    """Partial sums of the splits joined, in float64 and in the order of the splits."""

    best: torch.Tensor
    split: torch.Tensor
    sums: torch.Tensor
    weighted: torch.Tensor | None

    @classmethod
    def of(cls, best: torch.Tensor, sums: torch.Tensor, weighted: torch.Tensor | None, nodes: Nodes) -> "_Joined":
        top, split = best.max(dim=0)
        total = torch.zeros(len(nodes.exponents), best.shape[1], dtype=torch.float64, device=best.device)
        total_weighted = torch.zeros_like(total)
        for part in range(best.shape[0]):
            distance = (best[part] - top).double()
            scale = (nodes.betas[:, None] * distance).exp()
            total += scale * sums[part].T
            if weighted is not None:  # relative to the largest logit of all, not to the split's own
                total_weighted += scale * (weighted[part].T + sums[part].T * distance)
        return cls(top, split, total, None if weighted is None else total_weighted)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: enough to make several splits
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which kernels are launched on a device, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def head_statistics(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor,
    betas: torch.Tensor,
    readout: Readout,
    blocks: Blocks | None = None,
) -> HeadStatistics:
    """Return the statistics of DESIGN §3 in float32, on the head's device."""
    with _on(head.device):
        return passes.head_statistics(TritonEngine(hidden, head, readout, blocks), hidden, targets, ids, betas)


def corrected_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    corrections: Sequence[Correction],
    readout: Readout,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Return exact losses [C, N] in nats under several corrections, from one pass over the product."""
    with _on(head.device):
        return passes.corrected_losses(TritonEngine(hidden, head, readout, blocks), hidden, targets, corrections)


def corrected_moments(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    correction: Correction,
    readout: Readout,
    blocks: Blocks | None = None,
) -> CorrectedMoments:
    """Return the exact loss, Σ_n p(k) on the set and E_p[z], from one pass over the product."""
    with _on(head.device):
        return passes.corrected_moments(TritonEngine(hidden, head, readout, blocks), hidden, targets, correction)


# tokens × ids of one tile of the objective's two sweeps
_FIT_TILE = (16, 128)
_GRADIENT_TOKENS = 2048


def fit_objective(
    statistics: HeadStatistics, beta: float, bias: torch.Tensor, tile: tuple[int, int] = _FIT_TILE
) -> Objective:
    """Return the mean loss and gradient at (β, b) from statistics; the same bits every time, float64 totals."""
    with _on(statistics.set_logits.device):
        return _objective(statistics, beta, bias, tile)


def _objective(statistics: HeadStatistics, beta: float, bias: torch.Tensor, tile: tuple[int, int]) -> Objective:
    s, (block, columns) = statistics, tile
    n, k, device = len(s), s.ids.numel(), s.set_logits.device
    exponent, beta = exponent_of(beta, torch.float32)
    set_logits = s.set_logits.contiguous()
    exponent_bias = (bias.to(device).double() * LOG2_E).float()
    low, high = s.beta_range
    values, slopes = (weights.to(device) for weights in interpolation(s.betas, min(max(beta, low), high)))
    if s.rest_is_empty:
        rest = torch.full((n,), -torch.inf, dtype=torch.float64, device=device)
        rest_slope = torch.zeros_like(rest)
    else:
        log_sums = s.rest_log_sum.double()
        rest, rest_slope = log_sums @ values, log_sums @ slopes
    top = torch.full((n,), -torch.inf, dtype=torch.float32, device=device)
    total, expected = torch.zeros_like(top), torch.zeros_like(top)
    if n and k:
        totals_kernel[(triton.cdiv(n, block),)](
            set_logits, exponent_bias, top, total, expected, n, k, exponent, TOKENS=block, COLUMNS=columns
        )
    # the rest and the set share one reference, which float32 holds
    reference = torch.maximum(top, (rest * LOG2_E).float())
    nats = reference.double() / LOG2_E
    scale = ((top - reference).double() / LOG2_E).exp()
    rest_weight = (rest - nats).exp()
    sums = total.double() * scale + rest_weight
    slope = (expected.double() * scale + rest_weight * rest_slope) / sums
    gradient = torch.zeros(k, dtype=torch.float64, device=device)
    if n and k:
        blocks_per_split = triton.cdiv(_GRADIENT_TOKENS, block)
        splits = triton.cdiv(n, block * blocks_per_split)
        parts = torch.empty(splits, k, dtype=torch.float32, device=device)
        gradient_kernel[(triton.cdiv(k, columns), splits)](
            set_logits,
            exponent_bias,
            reference,
            sums.reciprocal().float(),
            parts,
            n,
            k,
            exponent,
            blocks_per_split,
            TOKENS=block,
            COLUMNS=columns,
        )
        gradient = parts.double().sum(dim=0)
    target_sum = s.target_logit.double().sum()
    counts = s.target_counts().double()
    loss = (sums.log() + nats).sum() - beta * target_sum - counts @ (exponent_bias.double() / LOG2_E)
    return Objective(
        loss=float(loss / n),
        gradient_beta=float((slope.sum() - target_sum) / n),
        gradient_bias=(gradient - counts) / n,
    )
