"""The logits of a set of tokens, gathered from the head in the order of the set."""

import triton
import triton.language as tl

from .triton_tile import tile_logits


@triton.jit
def set_kernel(
    hidden: tl.tensor,
    head: tl.tensor,
    head_bias: tl.tensor,
    ids: tl.tensor,
    logits_out: tl.tensor,
    n_tokens: tl.tensor,
    n_ids: tl.tensor,
    width: tl.tensor,
    hidden_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Write float32 logits [n_tokens, n_ids]."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_inside = tokens < n_tokens
    columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_inside = columns < n_ids
    z = tile_logits(
        hidden,
        head,
        head_bias,
        tl.where(token_inside, tokens, 0),
        token_inside,
        tl.load(ids + columns, mask=row_inside, other=0),
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
    out = logits_out + tokens[:, None] * n_ids + columns[None, :]
    tl.store(out, z, mask=token_inside[:, None] & row_inside[None, :])
