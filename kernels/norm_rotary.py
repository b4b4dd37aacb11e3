"""The small operations around attention, in plain torch: norms, rotary phases, the gated product.

Pure functions of their arguments. Positions do not change with depth, so one pass makes its rotary
phases once, for every layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """x: [rows, size], residual: the same or None; weight: [size]. Mean square over the last
    dimension; the residual is added to the normed x."""
    normed = F.rms_norm(x, weight.shape, weight, epsilon)
    return normed if residual is None else residual + normed


def rotary_phases(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions: [tokens] -> cos and signed sin, [tokens, 1, head_dim] each, for rotate()."""
    angle = positions.to(torch.float32)[:, None] * inverse_frequencies
    cos, sin = angle.cos(), angle.sin()
    return (
        torch.cat((cos, cos), -1).unsqueeze(1).to(dtype),
        torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype),
    )


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim], rotated by halves: (low, high) -> (low, high) * cos +
    (-high, low) * sin."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, signed_sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: [rows, 2 * size], gate first -> silu(gate) * up: [rows, size]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
