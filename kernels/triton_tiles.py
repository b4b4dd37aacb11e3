"""The inner loop of paged attention: one tile of query rows against a range of KV positions.

Owns the row layout: row m of a tile is query m // SHARE, and head m % SHARE of the heads that share
one KV head, so a group's K and V are loaded once. Running maximum and sum are float32, base 2.
"""

import triton.language as tl  # type: ignore[import-untyped]

from .triton_jit import device_function

LOG2_E = 1.4426950408889634


@device_function
def load_queries(
    query: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    keep: tl.tensor,
    token_stride: int,
    head_stride: int,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
) -> tl.tensor:
    """token, head, keep: [ROWS] -> [ROWS, DIM_TILE]; 0 where there is no query or dimension."""
    dims = tl.arange(0, DIM_TILE)
    places = token.to(tl.int64) * token_stride + head * head_stride
    mask = keep[:, None] & (dims < DIM)[None, :]
    loaded = tl.load(query + places[:, None] + dims[None, :], mask=mask, other=0.0)
    if FLOAT32_DOTS:
        loaded = loaded.to(tl.float32)
    return loaded


@device_function
def attend(
    queries: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    last_seen: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    position_stride: tl.tensor,
    scale: float,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
) -> tl.tensor:
    """Positions first..stop-1; row m sees those <= last_seen[m], of which `first` must be one.

    -> maximum [ROWS], total [ROWS], weighted values [ROWS, DIM_TILE], not yet divided by total.
    No address at or behind `stop` is read.
    """
    dims = tl.arange(0, DIM_TILE)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for start in range(first, stop, TILE):
        position = start + tl.arange(0, TILE)
        written = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        places = block * block_stride + (position % BLOCK_SIZE) * position_stride
        loads = places[:, None] + dims[None, :]
        mask = written[:, None] & (dims < DIM)[None, :]
        keys = tl.load(keys_at + loads, mask=mask, other=0.0)
        values = tl.load(values_at + loads, mask=mask, other=0.0)
        if FLOAT32_DOTS:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(position[None, :] <= last_seen[:, None], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = higher
    return maximum, total, weighted
