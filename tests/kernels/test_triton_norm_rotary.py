"""RMSNorm and rotation on Triton equal the reference."""

import pytest
import torch

from rlt.kernels import norm_rotary, triton_norm_rotary

from .triton_cases import in_dtypes, on_devices, poisoned_memory, tolerance


@on_devices
@in_dtypes
@pytest.mark.parametrize("size", [1, 5, 16, 64, 100, 2048, 2049])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(add: bool, rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(rows, size)).to(device, dtype)
    weight = torch.randn(size).to(device, dtype)
    residual = torch.randn(rows, size).to(device, dtype) if add else None
    want = norm_rotary.rms_norm(x, weight, 1e-3, residual)
    with poisoned_memory():
        got = triton_norm_rotary.rms_norm(x, weight, 1e-3, residual)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, **tolerance(dtype))


@on_devices
def test_rms_norm_of_tiny_rows_counts_epsilon(device: str) -> None:
    x = torch.full((2, 8), 1e-4, device=device)
    weight = torch.ones(8, device=device)
    for epsilon in (1e-6, 1e-9):
        want = norm_rotary.rms_norm(x, weight, epsilon)
        got = triton_norm_rotary.rms_norm(x, weight, epsilon)
        torch.testing.assert_close(got, want)


@on_devices
@in_dtypes
def test_rms_norm_takes_parts_of_wider_rows(dtype: torch.dtype, device: str) -> None:
    wide = torch.randn(5, 30).to(device, dtype)
    weight = torch.randn(10).to(device, dtype)
    want = norm_rotary.rms_norm(wide[:, 3:13], weight, 1e-6, wide[:, 20:])
    got = triton_norm_rotary.rms_norm(wide[:, 3:13], weight, 1e-6, wide[:, 20:])
    torch.testing.assert_close(got, want, **tolerance(dtype))


@on_devices
@in_dtypes
@pytest.mark.parametrize("head_dim", [2, 6, 16, 20, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rotation(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 77, 4000, 2])[:tokens]
    inverse = 1.0 / 500.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    phases = norm_rotary.rotary_phases(positions.to(device), inverse.to(device), dtype)
    wide = torch.randn(tokens, heads + 2, head_dim).to(device, dtype)
    x = wide[:, :heads]
    with poisoned_memory():
        got = triton_norm_rotary.rotate(x, *phases)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, norm_rotary.rotate(x, *phases), **tolerance(dtype))
