"""Paged attention of single queries: the context is cut into splits, and a second kernel merges.

Owns the size of a split, which is fixed: a row's result does not depend on what shares its batch.
Reads positions below kv_length alone; partial results behind a row's last split are never read.
"""

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .segments import Segments
from .triton_jit import OPTIONS, float32_dots, jit, power_of_two
from .triton_tiles import LOG2_E, attend, load_queries

SPLIT_POSITIONS = 256
LEAST_ROWS = 16  # tl.dot takes no fewer


@jit(changing=("table_width",))
def _attend_split(
    query: tl.tensor,
    kv: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    partials: tl.tensor,
    tables: tl.tensor,
    kv_lengths: tl.tensor,
    query_starts: tl.tensor,
    decodes: tl.tensor,
    layer_offset: int,
    value_offset: int,
    block_stride: int,
    position_stride: int,
    table_width: int,
    token_stride: int,
    head_stride: int,
    scale: float,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
) -> None:
    """Grid (decodes, kv_heads, splits). partials: [decodes, splits, heads, DIM] float32."""
    decode, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    segment = tl.load(decodes + decode)
    kv_length = tl.load(kv_lengths + segment)
    first = split * SPLIT
    stop = tl.minimum(first + SPLIT, kv_length)
    if first < stop:
        row = tl.arange(0, ROWS)
        keep = row < SHARE
        head = kv_head * SHARE + row
        token = tl.load(query_starts + segment) + row * 0
        queries = load_queries(
            query, token, head, keep, token_stride, head_stride, DIM, DIM_TILE, FLOAT32_DOTS
        )
        keys_at = kv + layer_offset + kv_head * DIM
        maximum, total, weighted = attend(
            queries,
            first,
            stop,
            row * 0 + (kv_length - 1),
            keys_at,
            keys_at + value_offset,
            tables + segment.to(tl.int64) * table_width,
            block_stride,
            position_stride,
            scale,
            ROWS,
            DIM,
            DIM_TILE,
            BLOCK_SIZE,
            TILE,
            FLOAT32_DOTS,
        )
        dims = tl.arange(0, DIM_TILE)
        heads = tl.num_programs(1) * SHARE
        place = (decode.to(tl.int64) * tl.num_programs(2) + split) * heads + head
        tl.store(maxima + place, maximum, mask=keep)
        tl.store(totals + place, total, mask=keep)
        mask = keep[:, None] & (dims < DIM)[None, :]
        tl.store(partials + place[:, None] * DIM + dims[None, :], weighted, mask=mask)


@jit(changing=("splits",))
def _merge_splits(
    out: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    partials: tl.tensor,
    kv_lengths: tl.tensor,
    query_starts: tl.tensor,
    decodes: tl.tensor,
    splits: int,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Grid (decodes, heads). Weights each split by what it saw, and divides once."""
    decode, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    segment = tl.load(decodes + decode)
    used = (tl.load(kv_lengths + segment) + SPLIT - 1) // SPLIT
    dims = tl.arange(0, DIM_TILE)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([DIM_TILE], tl.float32)
    for split in range(0, used):
        place = (decode.to(tl.int64) * splits + split) * heads + head
        part = tl.load(partials + place * DIM + dims, mask=dims < DIM, other=0.0)
        part_maximum = tl.load(maxima + place)
        higher = tl.maximum(maximum, part_maximum)
        shrink, weight = tl.exp2(maximum - higher), tl.exp2(part_maximum - higher)
        total = total * shrink + tl.load(totals + place) * weight
        weighted = weighted * shrink + part * weight
        maximum = higher
    token = tl.load(query_starts + segment).to(tl.int64)
    result = weighted / tl.where(total > 0.0, total, 1.0)
    place = (token * heads + head) * DIM + dims
    tl.store(out + place, result.to(out.dtype.element_ty), mask=dims < DIM)


def decode_attention(
    query: Tensor, kv: Tensor, layer: int, segments: Segments, out: Tensor
) -> None:
    """Write the rows of `out` that belong to segments with one query.

    query: [tokens, heads, head_dim], last dimension contiguous; kv: the pool, same dtype (float32
    or bfloat16); out: [tokens, heads * head_dim]. A segment with kv_length 0 gets zeros.
    Bytes, with n = kv_lengths in sum: reads 2 * n * kv_heads * head_dim * itemsize of K and V, each
    position once for all heads that share it, 4 of block table per position and KV head, and the
    queries; writes and reads 4 * (head_dim + 2) * heads per started split of SPLIT_POSITIONS, in
    float32; writes out.
    Bound on a GPU: memory. At least those bytes / bandwidth; K and V outweigh the rest by a factor
    of about SPLIT_POSITIONS * itemsize * kv_heads / (4 * heads). The products take
    4 * n * heads * head_dim operations on full tiles of LEAST_ROWS rows, so fewer heads per KV head
    than LEAST_ROWS waste tensor-core rows, not bandwidth.
    """
    indices = segments.launch
    decodes = len(indices.decodes)
    if not decodes:
        return
    heads, dim = query.shape[1:]
    kv_heads, share = kv.shape[4], heads // kv.shape[4]
    splits = max(1, -(-indices.longest_decode // SPLIT_POSITIONS))
    maxima, totals = query.new_empty(2, decodes, splits, heads, dtype=torch.float32)
    partials = query.new_empty(decodes, splits, heads, dim, dtype=torch.float32)
    _attend_split[decodes, kv_heads, splits](
        query,
        kv,
        maxima,
        totals,
        partials,
        indices.tables,
        indices.kv_lengths,
        indices.query_starts,
        indices.decodes,
        layer * kv.stride(1),
        kv.stride(2),
        kv.stride(0),
        kv.stride(3),
        indices.tables.shape[1],
        query.stride(0),
        query.stride(1),
        LOG2_E / dim**0.5,
        SHARE=share,
        ROWS=max(LEAST_ROWS, power_of_two(share)),
        DIM=dim,
        DIM_TILE=max(LEAST_ROWS, power_of_two(dim)),
        BLOCK_SIZE=kv.shape[3],
        SPLIT=SPLIT_POSITIONS,
        TILE=tile_positions(kv.dtype),
        FLOAT32_DOTS=float32_dots(kv.dtype),
        **OPTIONS,
    )
    _merge_splits[decodes, heads](
        out,
        maxima,
        totals,
        partials,
        indices.kv_lengths,
        indices.query_starts,
        indices.decodes,
        splits,
        DIM=dim,
        DIM_TILE=power_of_two(dim),
        SPLIT=SPLIT_POSITIONS,
        **OPTIONS,
    )


def tile_positions(dtype: torch.dtype) -> int:
    """KV positions in one tile: 32 KB of K and V at head_dim 128, so that two fit any GPU."""
    return 128 // dtype.itemsize
