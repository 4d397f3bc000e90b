"""Sums of exp(β z) over the rest of the vocabulary, at every β from the same tile, with its largest logit and id.

The vocabulary is split across programs; each writes its own partial sums, which `triton.py` joins in a fixed order.
"""

import triton
import triton.language as tl

from .triton_tile import tile_logits


@triton.jit
def rest_kernel(
    hidden: tl.tensor,
    head: tl.tensor,
    head_bias: tl.tensor,
    rest_ids: tl.tensor,
    target_columns: tl.tensor,
    exponents: tl.tensor,
    best_out: tl.tensor,
    column_out: tl.tensor,
    target_out: tl.tensor,
    sums_out: tl.tensor,
    weighted_out: tl.tensor,
    n_tokens: tl.tensor,
    n_rest: tl.tensor,
    width: tl.tensor,
    hidden_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    tiles_per_split: tl.tensor,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Write [splits, tokens] maxima, their columns and target logits, and [splits, tokens, NODES] sums.

    A column counts along `rest_ids`. COLUMNS is NODES rounded up to a power of two. All sums are relative to the
    split's own largest logit.
    """
    split = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_inside = tokens < n_tokens
    safe_tokens = tl.where(token_inside, tokens, 0)
    target_column = tl.load(target_columns + tokens, mask=token_inside, other=-1)
    nodes = tl.arange(0, COLUMNS)
    exponent = tl.load(exponents + nodes, mask=nodes < NODES, other=1.0)
    best = tl.full([TOKENS], float("-inf"), dtype=tl.float32)
    best_column = tl.full([TOKENS], -1, dtype=tl.int32)
    target = tl.full([TOKENS], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([TOKENS, COLUMNS], dtype=tl.float32)
    weighted = tl.zeros([TOKENS, COLUMNS], dtype=tl.float32)
    for tile in range(0, tiles_per_split):
        start = (split * tiles_per_split + tile) * ROWS
        columns = start + tl.arange(0, ROWS)
        row_inside = columns < n_rest
        rows = tl.load(rest_ids + columns, mask=row_inside, other=0)
        z = tile_logits(
            hidden,
            head,
            head_bias,
            safe_tokens,
            token_inside,
            rows,
            row_inside,
            width,
            hidden_stride,
            head_stride,
            scale,
            softcap,
            HAS_BIAS,
            HAS_CAP,
            PRECISION,
            UPCAST,
            TOKENS,
            ROWS,
            DEPTH,
        )
        z = tl.where(row_inside[None, :], z, float("-inf"))
        is_target = columns[None, :] == target_column[:, None]
        target = tl.maximum(target, tl.max(tl.where(is_target, z, float("-inf")), axis=1))
        tile_best, tile_column = tl.max(z, axis=1, return_indices=True)
        best_column = tl.where(tile_best > best, tile_column + start, best_column)
        new_best = tl.maximum(best, tile_best)
        # a split may lie wholly beyond the vocabulary: nothing is finite and nothing must become NaN
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = best - shift
        scaling = tl.exp2(decay[:, None] * exponent[None, :])
        if WEIGHTED:  # Σ p·(z − new maximum) from Σ p·(z − old maximum)
            moved = tl.where(best == float("-inf"), 0.0, decay)
            weighted = (weighted + sums * moved[:, None]) * scaling
        sums *= scaling
        best = new_best
        z -= shift[:, None]
        for node in range(NODES):
            powers = tl.exp2(z * tl.load(exponents + node))
            here = nodes[None, :] == node
            sums += tl.where(here, tl.sum(powers, axis=1)[:, None], 0.0)
            if WEIGHTED:
                terms = powers * tl.where(row_inside[None, :], z, 0.0)
                weighted += tl.where(here, tl.sum(terms, axis=1)[:, None], 0.0)
    at = split.to(tl.int64) * n_tokens + tokens
    tl.store(best_out + at, best, mask=token_inside)
    tl.store(column_out + at, best_column, mask=token_inside)
    tl.store(target_out + at, target, mask=token_inside)
    node_at = at[:, None] * NODES + nodes[None, :]
    node_inside = token_inside[:, None] & (nodes[None, :] < NODES)
    tl.store(sums_out + node_at, sums, mask=node_inside)
    if WEIGHTED:
        tl.store(weighted_out + node_at, weighted, mask=node_inside)
