"""Paged attention and KV writes against dense loops, in pools whose every other byte is poison."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt.kernels.gather_plan import plan_groups
from rlt.kernels.reference import paged_attention, store_kv
from rlt.kernels.scratch import KEEP_BYTES, GatherScratch
from rlt.kernels.segments import PoolShape, Segment, Segments

from .naive import dense_attention

LAYERS = 3


class Pool:
    """A poisoned pool in which segments get scattered blocks; keeps dense K and V beside it."""

    def __init__(self, block_size: int, kv_heads: int, head_dim: int) -> None:
        self.kv = torch.full((64, LAYERS, 2, block_size, kv_heads, head_dim), float("nan"))
        self._free = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
        self.shape = PoolShape(LAYERS, block_size, kv_heads * head_dim * 4)

    def fill(self, layer: int, positions: int) -> tuple[tuple[int, ...], Tensor, Tensor]:
        size = self.kv.shape[3]
        blocks = tuple(self._free.pop() for _ in range(-(-positions // size)))
        keys, values = torch.randn(2, positions, *self.kv.shape[4:])
        for position in range(positions):
            block, offset = blocks[position // size], position % size
            self.kv[block, layer, 0, offset] = keys[position]
            self.kv[block, layer, 1, offset] = values[position]
        return blocks, keys, values

    def segments(self, items: Sequence[Segment]) -> Segments:
        return Segments(items, self.shape, torch.device("cpu"), torch.float32)


def check_against_dense(
    lengths: Sequence[tuple[int, int]], block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """lengths: (query length, kv length) of each segment."""
    torch.manual_seed(1)
    pool = Pool(block_size, kv_heads, head_dim)
    layer = LAYERS - 1
    filled = [pool.fill(layer, kv_length) for _, kv_length in lengths]
    segments = pool.segments(
        [Segment(q, kv, blocks) for (q, kv), (blocks, _, _) in zip(lengths, filled, strict=True)]
    )
    query = torch.randn(sum(q for q, _ in lengths), heads, head_dim)
    out = paged_attention(query, pool.kv, layer, segments)
    start = 0
    for (count, _), (_, keys, values) in zip(lengths, filled, strict=True):
        want = dense_attention(query[start : start + count], keys, values)
        torch.testing.assert_close(out[start : start + count].double(), want, atol=1e-5, rtol=1e-5)
        start += count


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(4, 4, 16), (6, 2, 8), (5, 1, 10), (8, 4, 64)]
)
def test_decode_rows_of_mixed_lengths_equal_dense_attention(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    lengths = [(1, kv) for kv in (1, 15, 16, 17, 33, 100, 7, 64)]
    check_against_dense(lengths, 16, heads, kv_heads, head_dim)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2)])
def test_prompt_chunks_and_decode_rows_share_one_call(heads: int, kv_heads: int) -> None:
    lengths = [(7, 7), (5, 21), (1, 30), (7, 40), (1, 1), (16, 16), (3, 3)]
    check_against_dense(lengths, 4, heads, kv_heads, 12)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("query", [17, 128, 129, 300])
@pytest.mark.parametrize("context", [0, 1, 100])
def test_long_prompt_chunks_hide_later_positions_without_a_mask_of_their_size(
    heads: int, kv_heads: int, query: int, context: int
) -> None:
    lengths = [(query, query + context), (3, 9), (query, query + context), (query, query + 5)]
    check_against_dense(lengths, 32, heads, kv_heads, 6)


def test_the_triangle_is_kept_for_every_chunk_and_stays_far_below_chunk_times_context() -> None:
    scratch, like = GatherScratch(), torch.empty(1)
    first = scratch.triangle(2, 64, 8192, like)
    assert scratch.triangle(2, 64, 700, like).data_ptr() == first.data_ptr()
    assert first.nbytes <= 128 * 8192 * 4
    assert first[1, 63].eq(0).all()
    assert first[0, 0].isinf().sum() == 63
    assert scratch.triangle(1, 128, 700, like).shape[:2] == (1, 128)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda two: (two[0], sum(two))),
        min_size=1,
        max_size=6,
    ),
    block_size=st.sampled_from([5, 8, 16]),
    share=st.sampled_from([1, 2, 3]),
)
def test_any_mix_of_segments_equals_dense_attention(
    lengths: list[tuple[int, int]], block_size: int, share: int
) -> None:
    check_against_dense(lengths, block_size, 2 * share, 2, 6)


def test_a_gather_larger_than_the_scratch_buffer_is_cut_into_groups() -> None:

    lengths = np.array([40, 40, 40, 40, 40])
    groups = plan_groups(
        query_lengths=np.ones(5, dtype=np.int64),
        kv_lengths=lengths,
        tables=np.zeros((5, 10), dtype=np.int64),
        block_size=4,
        block_rows=24,
        most_positions=80,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert [group.segments for group in groups] == [2, 2, 1]


def test_padding_stays_small_when_lengths_differ_widely() -> None:
    pool = Pool(16, 1, 4)
    lengths = [400, 4, 400, 4, 4, 4, 4, 4, 4]
    items = [Segment(1, length, tuple(range(25))) for length in lengths]
    groups = pool.segments(items).groups
    gathered = sum(group.segments * group.kv_length for group in groups)
    assert gathered <= 1.25 * sum(lengths)


def test_store_writes_exactly_the_queries_positions_of_one_layer() -> None:
    pool = Pool(4, 2, 3)
    items = [Segment(3, 6, (9, 4)), Segment(1, 8, (1, 30))]
    keys_values = torch.randn(4, 12)
    store_kv(keys_values, pool.kv, 1, pool.segments(items))
    places = [(9, 3), (4, 0), (4, 1), (30, 3)]
    for row, (block, offset) in zip(keys_values, places, strict=True):
        assert torch.equal(pool.kv[block, 1, :, offset].flatten(), row)
        pool.kv[block, 1, :, offset] = float("nan")
    assert pool.kv.isnan().all()


def test_the_scratch_buffer_is_kept_and_an_oversized_request_is_not() -> None:
    scratch, like = GatherScratch(), torch.empty(1, 64)
    assert scratch.rows(10, like).data_ptr() == scratch.rows(20, like).data_ptr()
    too_many = KEEP_BYTES // (64 * 4) + 1
    assert scratch.rows(too_many, like).shape == (too_many, 64)
    assert scratch.rows(too_many, like).data_ptr() != scratch.rows(20, like).data_ptr()
