"""Norm, rotary phases and the gated product against element-by-element formulas."""

import pytest
import torch

from rlt.kernels.norm_rotary import rms_norm, rotary_phases, rotate, swiglu

from .naive import rotate_one


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = torch.randn(5, 7), torch.randn(7)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), want)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_rotation_turns_halves_by_the_positions_angle(head_dim: int) -> None:
    positions = torch.tensor([0, 1, 77, 4000])
    inverse = 1.0 / 500.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    x = torch.randn(4, 3, head_dim)
    out = rotate(x, *rotary_phases(positions, inverse, torch.float32))
    for token, position in enumerate(positions.tolist()):
        for head in range(3):
            want = rotate_one(x[token, head], position, 500.0)
            torch.testing.assert_close(out[token, head].double(), want, atol=2e-3, rtol=0)


def test_the_gate_is_the_first_half() -> None:
    gate, up = torch.randn(2, 3, 4)
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), want)
