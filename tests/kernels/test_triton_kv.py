"""KV writes on Triton: exactly what the reference writes, and not one element more."""

import pytest
import torch

from rlt.kernels import reference, triton_kv
from rlt.kernels.segments import Segment

from .sparse_memory import sparse_tensor
from .triton_cases import LAYERS, Shape, batch, in_dtypes, on_devices

SHAPES = [Shape(16, 4, 2, 16), Shape(5, 3, 3, 20), Shape(1, 1, 1, 6), Shape(3, 20, 10, 128)]


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    return torch.equal(left.view(bits), right.view(bits))


@on_devices
@in_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_store_writes_each_querys_own_position(
    layer: int, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    shape = Shape(shape.block_size, shape.heads, shape.kv_heads, shape.head_dim, dtype)
    lengths = [(1, 1), (7, 9), (1, 0), (4, 16), (3, 0), (1, 17)]
    _, pool, segments = batch(lengths, shape, device, layer=0)
    want = pool.kv.clone()
    keys_values = torch.randn(17, 2 * shape.kv_heads * shape.head_dim).to(device, dtype)
    reference.store_kv(keys_values, want, layer, segments)
    triton_kv.store_kv(keys_values, pool.kv, layer, segments)
    assert equal(pool.kv, want)
    assert want[:, layer].isfinite().any()


@on_devices
def test_store_of_padding_alone_and_of_nothing_writes_nothing(device: str) -> None:
    _, pool, segments = batch([(1, 0), (3, 0)], Shape(), device)
    triton_kv.store_kv(torch.randn(4, 64, device=device), pool.kv, 1, segments)
    triton_kv.store_kv(torch.randn(0, 64, device=device), pool.kv, 1, pool.segments([]))
    assert pool.kv.isnan().all()
    reference.store_kv(torch.randn(4, 64, device=device), pool.kv, 1, segments)
    assert pool.kv.isnan().all()


@on_devices
def test_store_behind_two_to_the_thirty_second_element(device: str) -> None:
    shape = Shape(16, 4, 2, 16, torch.bfloat16)
    _, pool, _ = batch([(3, 18)], shape, device)
    first = 2**32 // pool.kv[0].numel() + 1
    kv = sparse_tensor((first + 2, *pool.kv.shape[1:]), torch.bfloat16, device)
    keys_values = torch.randn(3, 64).to(device, torch.bfloat16)
    far = pool.segments([Segment(3, 18, (first, first + 1))])
    triton_kv.store_kv(keys_values, kv, 1, far)
    triton_kv.store_kv(keys_values, pool.kv, 1, pool.segments([Segment(3, 18, (0, 1))]))
    assert torch.equal(kv[first, 1, :, 15], pool.kv[0, 1, :, 15])
    assert torch.equal(kv[first + 1, 1, :, :2], pool.kv[1, 1, :, :2])


def test_a_slot_is_block_times_size_plus_offset_and_minus_one_for_padding() -> None:
    _, pool, _ = batch([], Shape(5), "cpu")
    items = [Segment(3, 6, (9, 4)), Segment(1, 0, ()), Segment(2, 2, (7,)), Segment(1, 1, (0,))]
    segments = pool.segments(items)
    assert segments.write_slots.tolist() == [48, 49, 20, -1, 35, 36, 0]
    assert segments.stored is not None
    assert segments.stored.tolist() == [0, 1, 2, 4, 5, 6]
    assert pool.segments(items[2:]).stored is None


MOVES = [  # source block, offset, target block, target offset
    (0, 1, 5, 1),
    (0, 1, 6, 1),
    (3, 4, 7, 0),
    (2, 0, 8, 4),
    (11, 2, 9, 2),
]


@on_devices
@in_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", range(len(MOVES) + 1))
def test_finalize_copies_every_layer_of_single_positions(
    rows: int, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    kv = torch.randn(12, LAYERS, 2, 5, shape.kv_heads, shape.head_dim).to(device, dtype)
    kv[1], kv[4], kv[10] = (torch.nan,) * 3
    want = kv.clone()
    moves = torch.tensor(MOVES[:rows], dtype=torch.int64, device=device).view(-1, 4)
    reference.finalize(want, *moves.unbind(1))
    triton_kv.finalize(kv, *moves.unbind(1))
    assert equal(kv, want)


@on_devices
def test_finalize_takes_indices_of_different_strides(device: str) -> None:
    kv = torch.randn(12, 2, 2, 5, 1, 3, device=device)
    want = kv.clone()
    sources, offsets, targets, target_offsets = torch.tensor(MOVES, device=device).unbind(1)
    reference.finalize(want, sources, offsets, targets, target_offsets)
    triton_kv.finalize(kv, sources.clone(), offsets, targets, target_offsets.clone())
    assert equal(kv, want)


@on_devices
def test_finalize_behind_two_to_the_thirty_second_element(device: str) -> None:
    size = (LAYERS, 2, 16, 2, 16)
    per_block = torch.Size(size).numel()
    first = 2**32 // per_block + 1
    kv = sparse_tensor((first + 2, *size), torch.bfloat16, device)
    kv[first] = torch.randn(size).to(torch.bfloat16)
    one = torch.tensor([first, 3, first + 1, 9], device=device).view(4, 1)
    triton_kv.finalize(kv, *one)
    assert torch.equal(kv[first + 1, :, :, 9], kv[first, :, :, 3])
    assert not kv[:2].any()
