"""KV writes on Triton: storing a pass's own K and V, and copying positions between planes.

Owns nothing. Addresses are 64 bit: a pool may have more elements than 32 bits count.
"""

import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .segments import Segments
from .triton_jit import OPTIONS, jit, power_of_two

TILE = 1024  # elements that one program copies at a time


@jit()
def _store(
    keys_values: tl.tensor,
    kv: tl.tensor,
    slots: tl.tensor,
    layer_offset: int,
    value_offset: int,
    block_stride: int,
    token_stride: int,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (tokens, K|V). Row `token` of keys_values holds K, then V, of WIDTH elements each."""
    token, which = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        source = keys_values + token.to(tl.int64) * token_stride + which * WIDTH
        position = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * WIDTH
        target = kv + layer_offset + which.to(tl.int64) * value_offset + position
        for start in range(0, WIDTH, TILE):
            at = start + tl.arange(0, TILE)
            tl.store(target + at, tl.load(source + at, mask=at < WIDTH), mask=at < WIDTH)


@jit()
def _finalize(
    kv: tl.tensor,
    sources: tl.tensor,
    offsets: tl.tensor,
    targets: tl.tensor,
    target_offsets: tl.tensor,
    index_stride: int,
    block_stride: int,
    plane_stride: int,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (rows, layers * 2): one position's K or V of one layer, WIDTH elements."""
    row = tl.program_id(0) * index_stride
    plane = tl.program_id(1).to(tl.int64) * plane_stride
    source = tl.load(sources + row) * block_stride + tl.load(offsets + row) * WIDTH
    target = tl.load(targets + row) * block_stride + tl.load(target_offsets + row) * WIDTH
    for start in range(0, WIDTH, TILE):
        at = start + tl.arange(0, TILE)
        copied = tl.load(kv + source + plane + at, mask=at < WIDTH)
        tl.store(kv + target + plane + at, copied, mask=at < WIDTH)


def store_kv(keys_values: Tensor, kv: Tensor, layer: int, segments: Segments) -> None:
    """keys_values: [tokens, 2 * kv_heads * head_dim], K then V, in the pool's dtype. Writes each
    query's own K and V of `layer` in place; padding (slot -1) is skipped.

    Bytes: reads and writes 2 * kv_heads * head_dim * itemsize per token, and reads 8 of its slot.
    Bound on a GPU: memory, 4 * tokens * kv_heads * head_dim * itemsize / bandwidth; below some
    hundred tokens, the time of a launch.
    """
    if not len(keys_values):
        return
    width = kv.shape[4] * kv.shape[5]
    _store[len(keys_values), 2](
        keys_values,
        kv,
        segments.write_slots,
        layer * kv.stride(1),
        kv.stride(2),
        kv.stride(0),
        keys_values.stride(0),
        WIDTH=width,
        BLOCK_SIZE=kv.shape[3],
        TILE=min(TILE, power_of_two(width)),
        **OPTIONS,
    )


def finalize(
    kv: Tensor, sources: Tensor, offsets: Tensor, targets: Tensor, target_offsets: Tensor
) -> None:
    """Copy single positions, every layer, K and V, between blocks: all rows in one launch.

    kv: the pool, any dtype. sources, offsets, targets, target_offsets: [rows] int64 each, with one
    stride. Sources and targets are disjoint.
    Bytes: reads and writes layers * 2 * kv_heads * head_dim * itemsize per row, reads 32 of index.
    Bound on a GPU: memory, twice those bytes / bandwidth, in pieces of kv_heads * head_dim *
    itemsize bytes; for a few rows, the time of a launch.
    """
    if not len(sources):
        return
    stride = sources.stride(0)
    if any(index.stride(0) != stride for index in (offsets, targets, target_offsets)):
        sources, offsets, targets, target_offsets = (
            index.contiguous() for index in (sources, offsets, targets, target_offsets)
        )
        stride = 1
    width = kv.shape[4] * kv.shape[5]
    _finalize[len(sources), kv.shape[1] * 2](
        kv,
        sources,
        offsets,
        targets,
        target_offsets,
        stride,
        kv.stride(0),
        kv.stride(2),
        WIDTH=width,
        TILE=min(TILE, power_of_two(width)),
        **OPTIONS,
    )
