"""One tile of logits on tensor cores: readout(hidden × headᵀ) for some tokens and some head rows, float32."""

import triton
import triton.language as tl


@triton.jit
def tile_logits(
    hidden: tl.tensor,
    head: tl.tensor,
    head_bias: tl.tensor,
    tokens: tl.tensor,
    token_inside: tl.tensor,
    rows: tl.tensor,
    row_inside: tl.tensor,
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
) -> tl.tensor:
    """Return logits [TOKENS, ROWS]; `tokens` and `rows` are int64 indices, 0 where they are not inside."""
    product = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    hidden_rows = hidden + tokens[:, None] * hidden_stride
    head_rows = head + rows[None, :] * head_stride
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        states = tl.load(hidden_rows + depth[None, :], mask=token_inside[:, None] & (depth[None, :] < width), other=0.0)
        weights = tl.load(head_rows + depth[:, None], mask=row_inside[None, :] & (depth[:, None] < width), other=0.0)
        if UPCAST:  # Triton's interpreter cannot multiply half-precision numbers; on a GPU this would cost tensor cores
            states = states.to(tl.float32)
            weights = weights.to(tl.float32)
        product = tl.dot(states, weights, product, input_precision=PRECISION)
    if HAS_BIAS:
        product += tl.load(head_bias + rows, mask=row_inside, other=0.0)[None, :]
    product *= scale
    if HAS_CAP:
        # tanh x = 1 − 2 / (1 + e^2x), with e^2x as a power of two
        power = tl.exp2(product * (2.8853900817779268 / softcap))
        product = softcap * (1.0 - 2.0 / (1.0 + power))
    return product
