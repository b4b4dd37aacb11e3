"""Hidden states and tokens move between slots and batches on Triton as in the reference."""

import pytest
import torch

from rlt.kernels import reference, triton_rows

from .sparse_memory import sparse_tensor
from .triton_cases import on_devices, poisoned_memory

KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
WIDTHS = pytest.mark.parametrize("width", [None, 1, 5, 64, 1023, 1024, 1025])
SLOTS = pytest.mark.parametrize("slots", [[], [4], [6, 0, 3], [2, 1, 0, 3, 4, 5, 6]], ids=str)


def resident(width: int | None, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[7, width], or [7] for tokens: every number once."""
    size = 7 if width is None else 7 * width
    numbers = torch.arange(size, device=device) % 251  # exact in bfloat16
    return numbers.to(dtype).view(7, *([] if width is None else [width]))


@on_devices
@KINDS
@WIDTHS
@SLOTS
def test_gather_and_scatter(
    slots: list[int], width: int | None, dtype: torch.dtype, device: str
) -> None:
    hidden = resident(width, dtype, device)
    chosen = torch.tensor(slots, dtype=torch.int64, device=device)
    with poisoned_memory():
        rows = triton_rows.gather_rows(hidden, chosen)
    assert torch.equal(rows, reference.gather_rows(hidden, chosen))
    want = hidden.clone()
    reference.scatter_rows(want, chosen, rows + 1)
    triton_rows.scatter_rows(hidden, chosen, rows + 1)
    assert torch.equal(hidden, want)


@on_devices
def test_scatter_takes_rows_that_are_not_contiguous(device: str) -> None:
    hidden = torch.zeros(4, 6, device=device)
    rows = torch.randn(6, 2, device=device).T
    triton_rows.scatter_rows(hidden, torch.tensor([3, 1], device=device), rows)
    assert torch.equal(hidden[[3, 1]], rows)


@on_devices
def test_rows_behind_two_to_the_thirty_second_element(device: str) -> None:
    slot, width = 2**20 + 1, 2**12
    hidden = sparse_tensor((slot + 1, width), torch.bfloat16, device)
    slots = torch.tensor([slot], device=device)
    rows = torch.ones(1, width, dtype=torch.bfloat16, device=device)
    triton_rows.scatter_rows(hidden, slots, rows)
    assert torch.equal(hidden[slot], rows[0])
    assert not hidden[:2].any()  # where an address that wraps around would end
    assert torch.equal(triton_rows.gather_rows(hidden, slots), rows)
