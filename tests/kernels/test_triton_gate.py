"""Gate scores on Triton equal the reference, the running survival also the scheduler's product."""

import pytest
import torch

from rlt.kernels import gate, triton_gate

from .triton_cases import in_dtypes, on_devices, poisoned_memory


@on_devices
@in_dtypes
@pytest.mark.parametrize("size", [1, 5, 64, 100, 2048])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("first_loop", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_gate_scores(
    biased: bool, first_loop: bool, rows: int, size: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, size).to(device, dtype)
    weight = (2 * torch.randn(1, size) / size**0.5).to(device, dtype)
    bias = torch.randn(1).to(device, dtype) if biased else None
    before = None if first_loop else torch.rand(rows, dtype=torch.float64).to(device)
    want, want_survival = gate.gate_scores(hidden, weight, bias, before)
    with poisoned_memory():
        got, survival = triton_gate.gate_scores(hidden, weight, bias, before)
    assert (got.dtype, survival.dtype) == (torch.float32, torch.float64)
    close = {"rtol": 0.0, "atol": 1e-6 if dtype == torch.float32 else 1e-2}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(survival, want_survival, **close)


@on_devices
def test_survival_over_loops_is_the_schedulers_product_bit_for_bit(device: str) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(1, 32, device=device), torch.randn(1, device=device)
    survival = None
    expected = [1.0] * 9
    for _ in range(4):
        hidden = torch.randn(9, 32, device=device)
        scores, survival = triton_gate.gate_scores(hidden, weight, bias, survival)
        expected = [p * (1.0 - score) for p, score in zip(expected, scores.tolist(), strict=True)]
        assert survival.tolist() == expected


@on_devices
def test_extreme_logits_give_zero_and_one(device: str) -> None:
    hidden = torch.tensor([[200.0], [-200.0]], device=device)
    scores, survival = triton_gate.gate_scores(hidden, torch.ones(1, 1, device=device), None)
    assert scores.tolist() == [1.0, 0.0]
    assert survival.tolist() == [0.0, 1.0]
