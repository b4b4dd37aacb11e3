"""RMSNorm and the rotation by rotary phases on Triton.

Owns nothing. Both compute in float32 and round once, to the dtype of their input.
"""

import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .triton_jit import OPTIONS, jit, power_of_two


@jit()
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    row_stride: int,
    residual_stride: int,
    epsilon: float,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Grid (rows,). A whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    mask = at < SIZE
    values = tl.load(x + row * row_stride + at, mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values, 0) / SIZE
    normed = values * tl.rsqrt(mean_square + epsilon)
    normed = normed * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        normed += tl.load(residual + row * residual_stride + at, mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(out + row * SIZE + at, normed.to(out.dtype.element_ty), mask=mask)


@jit()
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    signed_sin: tl.tensor,
    out: tl.tensor,
    token_stride: int,
    head_stride: int,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Grid (tokens,). The low and the high half of every head are loaded once each."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_TILE)
    real = half < DIM // 2
    head = tl.arange(0, HEAD_TILE)
    mask = (head < HEADS)[:, None] & real[None, :]
    phase = token * DIM + half
    low_cos = tl.load(cos + phase, mask=real, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos + phase + DIM // 2, mask=real, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(signed_sin + phase, mask=real, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(signed_sin + phase + DIM // 2, mask=real, other=0.0).to(tl.float32)[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + half[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    target = out + token * (HEADS * DIM) + head[:, None] * DIM + half[None, :]
    element = out.dtype.element_ty
    tl.store(target, (low * low_cos + high * low_sin).to(element), mask=mask)
    tl.store(target + DIM // 2, (high * high_cos + low * high_sin).to(element), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """x: [rows, size], residual: the same shape or None; weight: [size]; float32 or bfloat16 ->
    the norm of x over its last dimension times weight, plus residual, [rows, size] in x's dtype.

    Bytes: reads size * itemsize per row, and as much of residual, writes as much; the weight stays
    in cache. Adding in the same launch saves one write and one read of a row.
    Bound on a GPU: memory, (2 or 3) * rows * size * itemsize / bandwidth.
    """
    rows, size = x.shape
    out = x.new_empty(rows, size)
    if rows:
        added = x if residual is None else residual
        _rms_norm[(rows,)](
            x,
            weight,
            added,
            out,
            x.stride(0),
            added.stride(0),
            epsilon,
            SIZE=size,
            TILE=power_of_two(size),
            ADD=residual is not None,
            **OPTIONS,
        )
    return out


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim], last dimension contiguous, rotated by halves; cos, signed_sin:
    [tokens, 1, head_dim] as rotary_phases makes them; float32 or bfloat16 -> contiguous, x's dtype.

    Bytes: reads and writes heads * head_dim * itemsize per token, reads 2 * head_dim * itemsize of
    phases. Bound on a GPU: memory, 2 * tokens * (heads + 1) * head_dim * itemsize / bandwidth.
    """
    tokens, heads, dim = x.shape
    out = x.new_empty(tokens, heads, dim)
    if tokens:
        _rotate[(tokens,)](
            x,
            cos,
            signed_sin,
            out,
            x.stride(0),
            x.stride(1),
            HEADS=heads,
            HEAD_TILE=power_of_two(heads),
            DIM=dim,
            HALF_TILE=power_of_two(dim // 2),
            **OPTIONS,
        )
    return out
