"""A packed linear layer computes what the dense one does and holds its weight once."""

import pytest
import torch
import torch.nn.functional as F

from rlt.kernels.linear import Linear


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("sizes", [(512, 512), (700, 301)])
def test_packing_does_not_change_the_product(
    dtype: torch.dtype, tolerance: float, rows: int, sizes: tuple[int, int]
) -> None:
    linear = Linear(*sizes, dtype=dtype, device="cpu")
    linear.dense_weight.copy_(torch.randn(sizes[1], sizes[0]) / sizes[0] ** 0.5)
    dense = linear.dense_weight.clone()
    x = torch.randn(rows, sizes[0]).to(dtype)
    linear.pack()
    assert linear.weight is None
    torch.testing.assert_close(linear(x), F.linear(x, dense), atol=tolerance, rtol=tolerance)


def test_a_packed_weight_has_no_second_dense_copy() -> None:
    linear = Linear(400, 400, dtype=torch.float32, device="cpu")
    linear.pack()
    with pytest.raises(RuntimeError, match="packed"):
        _ = linear.dense_weight


def test_a_shared_weight_stays_with_its_owner() -> None:
    weight = torch.randn(600, 400)
    linear = Linear(400, 600, dtype=torch.float32, device="cpu")
    linear.share(weight)
    linear.pack()
    assert linear.dense_weight is weight
    assert linear.num_bytes == 0


def test_a_small_weight_stays_dense_and_works_the_same() -> None:
    linear = Linear(7, 3, dtype=torch.float32, device="cpu")
    linear.dense_weight.copy_(torch.randn(3, 7))
    linear.pack()
    x = torch.randn(5, 7)
    torch.testing.assert_close(linear(x), x @ linear.dense_weight.T)
