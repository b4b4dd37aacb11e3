"""Paged attention of prompt chunks: their queries against their own and all earlier positions.

Owns nothing. Causal: query i of a segment sees positions 0..kv_length - query_length + i. Softmax
is online, in float32; K and V of this chunk must be in the pool already.
"""

import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .segments import Segments
from .triton_decode import LEAST_ROWS, tile_positions
from .triton_jit import OPTIONS, float32_dots, jit, power_of_two
from .triton_tiles import LOG2_E, attend, load_queries

TILE_ROWS = 64  # query rows of one program, counted once per head of the group


@jit(changing=("table_width",))
def _attend_chunk(
    query: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    tables: tl.tensor,
    kv_lengths: tl.tensor,
    query_starts: tl.tensor,
    query_lengths: tl.tensor,
    prompts: tl.tensor,
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
    TILE: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
) -> None:
    """Grid (query tiles of the longest chunk, prompts, kv_heads)."""
    tile, kv_head = tl.program_id(0), tl.program_id(2)
    segment = tl.load(prompts + tl.program_id(1))
    query_length = tl.load(query_lengths + segment)
    kv_length = tl.load(kv_lengths + segment)
    first_query = tile * (ROWS // SHARE)
    if first_query < query_length:
        row = tl.arange(0, ROWS)
        index = first_query + row // SHARE
        last_query = tl.minimum(first_query + ROWS // SHARE, query_length) - 1
        keep = index <= last_query  # also drops rows behind the last whole query of a tile
        token = tl.load(query_starts + segment) + index
        head = kv_head * SHARE + row % SHARE
        queries = load_queries(
            query, token, head, keep, token_stride, head_stride, DIM, DIM_TILE, FLOAT32_DOTS
        )
        before = kv_length - query_length
        keys_at = kv + layer_offset + kv_head * DIM
        _, total, weighted = attend(
            queries,
            0,
            before + last_query + 1,
            before + index,
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
        result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
        dims = tl.arange(0, DIM_TILE)
        heads = tl.num_programs(2) * SHARE
        place = (token.to(tl.int64) * heads + head)[:, None] * DIM + dims[None, :]
        mask = keep[:, None] & (dims < DIM)[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    query: Tensor, kv: Tensor, layer: int, segments: Segments, out: Tensor
) -> None:
    """Write the rows of `out` that belong to segments with several queries.

    query: [tokens, heads, head_dim], last dimension contiguous; kv: the pool, same dtype (float32
    or bfloat16); out: [tokens, heads * head_dim]. A segment with kv_length 0 gets zeros.
    Bytes: reads the queries, writes out, and reads K and V below a query tile's last position once
    per tile: about 2 * kv_heads * head_dim * itemsize * (sum over tiles of positions seen), where a
    tile is TILE_ROWS // share queries (share: heads per KV head).
    Bound on a GPU: arithmetic, 4 * heads * head_dim * (query, position) pairs seen / peak rate of
    tl.dot in the dtype (float32 runs without tensor cores, because it is exact); memory bounds
    chunks of fewer queries than peak rate / bandwidth * itemsize / (2 * share).
    """
    indices = segments.launch
    prompts = len(indices.prompts)
    if not prompts:
        return
    heads, dim = query.shape[1:]
    kv_heads, share = kv.shape[4], heads // kv.shape[4]
    rows = max(TILE_ROWS, power_of_two(share))
    tiles = -(-indices.longest_prompt // (rows // share))
    _attend_chunk[tiles, prompts, kv_heads](
        query,
        kv,
        out,
        indices.tables,
        indices.kv_lengths,
        indices.query_starts,
        indices.query_lengths,
        indices.prompts,
        layer * kv.stride(1),
        kv.stride(2),
        kv.stride(0),
        kv.stride(3),
        indices.tables.shape[1],
        query.stride(0),
        query.stride(1),
        LOG2_E / dim**0.5,
        SHARE=share,
        ROWS=rows,
        DIM=dim,
        DIM_TILE=max(LEAST_ROWS, power_of_two(dim)),
        BLOCK_SIZE=kv.shape[3],
        TILE=tile_positions(kv.dtype),
        FLOAT32_DOTS=float32_dots(kv.dtype),
        **OPTIONS,
    )
