"""The exit gate on Triton: logit, sigmoid and surviving probability of a row in one launch.

Owns nothing. Logit and sigmoid are float32, the product float64, as the scheduler's is.
"""

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .triton_jit import OPTIONS, jit, power_of_two


@jit()
def _gate(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    before: tl.tensor,
    scores: tl.tensor,
    after: tl.tensor,
    row_stride: int,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
) -> None:
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    mask = at < SIZE
    state = tl.load(hidden + row * row_stride + at, mask=mask, other=0.0).to(tl.float32)
    logit = tl.sum(state * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32), 0)
    if HAS_BIAS:
        logit += tl.load(bias).to(tl.float32)
    small = tl.exp(-tl.abs(logit))  # never overflows
    score = tl.where(logit >= 0.0, 1.0, small) / (1.0 + small)
    survival = 1.0 - score.to(tl.float64)
    if HAS_BEFORE:
        survival = tl.load(before + row) * survival
    tl.store(scores + row, score)
    tl.store(after + row, survival)


def gate_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, survival: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """hidden: [rows, size], float32 or bfloat16; weight: [1, size]; bias: [1] or None; survival:
    [rows] float64, the product of 1 - score over this token's earlier loops, or None before the
    first -> scores [rows] float32, and survival after this loop, [rows] float64.

    In bfloat16 the reference rounds the logit to bfloat16 before the sigmoid; this one does not.
    Bytes: reads size * itemsize per row and 8 of survival, writes 12; the weight stays in cache.
    Bound on a GPU: memory, rows * size * itemsize / bandwidth; below some hundred rows, the time
    of a launch.
    """
    rows, size = hidden.shape
    scores = hidden.new_empty(rows, dtype=torch.float32)
    after = hidden.new_empty(rows, dtype=torch.float64)
    if rows:
        _gate[(rows,)](
            hidden,
            weight,
            weight if bias is None else bias,
            after if survival is None else survival,
            scores,
            after,
            hidden.stride(0),
            SIZE=size,
            TILE=power_of_two(size),
            HAS_BIAS=bias is not None,
            HAS_BEFORE=survival is not None,
            **OPTIONS,
        )
    return scores, after
