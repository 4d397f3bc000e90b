"""The objective of a fit from statistics, in two sweeps over the set's logits: totals by token, then the gradient."""

import triton
import triton.language as tl


@triton.jit
def totals_kernel(
    set_logits: tl.tensor,
    bias: tl.tensor,
    top_out: tl.tensor,
    total_out: tl.tensor,
    expected_out: tl.tensor,
    n_tokens: tl.tensor,
    n_ids: tl.tensor,
    exponent: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write, token by token, m = max(u), Σ 2^(u − m) and Σ 2^(u − m)·z over the set, with u = exponent·z + bias."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_inside = tokens < n_tokens
    top = tl.full([TOKENS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TOKENS], dtype=tl.float32)
    expected = tl.zeros([TOKENS], dtype=tl.float32)
    for start in range(0, n_ids, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < n_ids
        here = token_inside[:, None] & inside[None, :]
        z = tl.load(set_logits + tokens[:, None] * n_ids + columns[None, :], mask=here, other=0.0)
        b = tl.load(bias + columns, mask=inside, other=float("-inf"))
        u = z * exponent + b[None, :]
        new_top = tl.maximum(top, tl.max(u, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        scaling = tl.exp2(top - shift)
        powers = tl.exp2(u - shift[:, None])
        total = total * scaling + tl.sum(powers, axis=1)
        expected = expected * scaling + tl.sum(powers * z, axis=1)
        top = new_top
    tl.store(top_out + tokens, top, mask=token_inside)
    tl.store(total_out + tokens, total, mask=token_inside)
    tl.store(expected_out + tokens, expected, mask=token_inside)


@triton.jit
def gradient_kernel(
    set_logits: tl.tensor,
    bias: tl.tensor,
    top: tl.tensor,
    share: tl.tensor,
    gradient_out: tl.tensor,
    n_tokens: tl.tensor,
    n_ids: tl.tensor,
    exponent: tl.tensor,
    blocks_per_split: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write [splits, n_ids] sums over a split's tokens of share·2^(u − top), the probabilities of the set."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n_ids
    b = tl.load(bias + columns, mask=inside, other=float("-inf"))
    split = tl.program_id(1)
    gradient = tl.zeros([COLUMNS], dtype=tl.float32)
    for block in range(0, blocks_per_split):
        tokens = (split * blocks_per_split + block).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        token_inside = tokens < n_tokens
        here = token_inside[:, None] & inside[None, :]
        z = tl.load(set_logits + tokens[:, None] * n_ids + columns[None, :], mask=here, other=0.0)
        m = tl.load(top + tokens, mask=token_inside, other=0.0)
        weight = tl.load(share + tokens, mask=token_inside, other=0.0)
        powers = tl.exp2(z * exponent + b[None, :] - m[:, None])
        gradient += tl.sum(powers * weight[:, None], axis=0)
    tl.store(gradient_out + split * n_ids + columns, gradient, mask=inside)
