"""A packed linear layer computes what the dense one does and holds its weight once."""

import pytest
import torch
import torch.nn.functional as F

from rlt.kernels.linear import Linear


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("sizes", [(64, 160), (7, 3), (512, 512)])
def test_packing_does_not_change_the_product(
    dtype: torch.dtype, tolerance: float, rows: int, sizes: tuple[int, int]
) -> None:
    linear = Linear(*sizes, dtype=dtype, device="cpu")
    linear.dense_weight.copy_(torch.randn(sizes[1], sizes[0]) / sizes[0] ** 0.5)
    dense = linear.dense_weight.clone()
    x = torch.randn(rows, sizes[0]).to(dtype)
    linear.pack()
    torch.testing.assert_close(linear(x), F.linear(x, dense), atol=tolerance, rtol=tolerance)


def test_a_packed_weight_has_no_second_dense_copy() -> None:
    linear = Linear(4, 4, dtype=torch.float32, device="cpu")
    linear.pack()
    with pytest.raises(RuntimeError, match="packed"):
        _ = linear.dense_weight


def test_a_shared_weight_stays_with_its_owner() -> None:
    weight = torch.randn(6, 4)
    linear = Linear(4, 6, dtype=torch.float32, device="cpu")
    linear.share(weight)
    linear.pack()
    assert linear.dense_weight is weight
    assert linear.num_bytes == 0
