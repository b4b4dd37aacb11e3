"""Paged attention on Triton equals the reference, in pools and memory whose every other byte is
poison."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.kernels import reference, triton_decode
from rlt.kernels.segments import Segment
from rlt.kernels.triton_attention import paged_attention

from .sparse_memory import sparse_tensor
from .triton_cases import (
    DEVICES,
    LAYERS,
    Shape,
    batch,
    in_dtypes,
    on_devices,
    poisoned_memory,
    tolerance,
)

GROUPS = [(1, 1), (4, 4), (4, 2), (6, 2), (5, 1), (16, 2), (17, 1)]  # heads, KV heads


def check(lengths: Sequence[tuple[int, int]], shape: Shape, device: str) -> None:
    query, pool, segments = batch(lengths, shape, device)
    before = pool.kv.clone()
    want = reference.paged_attention(query, pool.kv, LAYERS - 1, segments)
    with poisoned_memory():
        got = paged_attention(query, pool.kv, LAYERS - 1, segments)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, **tolerance(shape.dtype))
    assert torch.equal(pool.kv.nan_to_num(7.0), before.nan_to_num(7.0))


@on_devices
@in_dtypes
@pytest.mark.parametrize("heads, kv_heads", GROUPS)
def test_decode_rows_of_mixed_lengths(
    heads: int, kv_heads: int, dtype: torch.dtype, device: str
) -> None:
    lengths = [(1, kv_length) for kv_length in (1, 15, 16, 17, 32, 33, 100)]
    check(lengths, Shape(16, heads, kv_heads, 16, dtype), device)


@on_devices
@in_dtypes
@pytest.mark.parametrize("heads, kv_heads", GROUPS)
def test_prompt_chunks_with_earlier_blocks(
    heads: int, kv_heads: int, dtype: torch.dtype, device: str
) -> None:
    lengths = [(2, 2), (7, 7), (5, 21), (3, 40), (65, 66)]
    check(lengths, Shape(16, heads, kv_heads, 16, dtype), device)


@on_devices
@in_dtypes
@pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 80, 128])
def test_every_head_dimension(head_dim: int, dtype: torch.dtype, device: str) -> None:
    check([(1, 9), (6, 20), (1, 40)], Shape(8, 4, 2, head_dim, dtype), device)


@on_devices
@pytest.mark.parametrize("block_size", [1, 3, 5, 24, 64])
def test_block_sizes_that_are_no_power_of_two(block_size: int, device: str) -> None:
    check([(1, 1), (1, 37), (9, 30), (1, 72)], Shape(block_size), device)


@on_devices
def test_contexts_at_the_edges_of_a_split(device: str) -> None:
    size = triton_decode.SPLIT_POSITIONS
    check([(1, n) for n in (size - 1, size, size + 1, 2 * size, 2 * size + 1, 3)], Shape(), device)


@on_devices
def test_chunks_at_the_edges_of_a_query_tile(device: str) -> None:
    check([(n, n) for n in (31, 32, 33, 63, 64, 65)] + [(64, 100)], Shape(), device)


@on_devices
def test_many_splits_are_merged_by_what_each_saw(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_decode, "SPLIT_POSITIONS", 16)
    query, pool, segments = batch([(1, 90), (1, 33), (1, 5), (1, 16), (1, 17)], Shape(), device)
    pool.kv[:, :, 0] *= torch.linspace(0.1, 20, len(pool.kv), device=device)[
        :, None, None, None, None
    ]
    want = reference.paged_attention(query, pool.kv, LAYERS - 1, segments)
    with poisoned_memory():
        got = paged_attention(query, pool.kv, LAYERS - 1, segments)
    torch.testing.assert_close(got, want, **tolerance(torch.float32))


@on_devices
def test_padding_gets_zeros_and_changes_nothing_else(device: str) -> None:
    check([(1, 20), (1, 0), (4, 0), (6, 9), (1, 0)], Shape(), device)
    check([(1, 0), (3, 0)], Shape(), device)
    query, pool, segments = batch([(1, 0), (2, 5), (3, 0)], Shape(), device)
    got = paged_attention(query, pool.kv, LAYERS - 1, segments)
    assert got.ne(0).any(1).tolist() == [False, True, True, False, False, False]


@on_devices
def test_an_empty_batch(device: str) -> None:
    check([], Shape(), device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_what_shares_its_batch(device: str) -> None:
    query, pool, segments = batch([(1, 300), (9, 40), (1, 20), (1, 700)], Shape(), device)
    together = paged_attention(query, pool.kv, LAYERS - 1, segments)
    starts = [0, 1, 10, 11, 12]
    for index, item in enumerate(segments.items):
        rows = slice(starts[index], starts[index + 1])
        alone = paged_attention(query[rows], pool.kv, LAYERS - 1, pool.segments([item]))
        assert torch.equal(together[rows], alone)


@on_devices
def test_blocks_behind_two_to_the_thirty_second_element(device: str) -> None:
    shape = Shape(16, 4, 2, 16, torch.bfloat16)
    query, small, segments = batch([(1, 60), (5, 30)], shape, device)
    per_block = small.kv[0].numel()
    first = 2**32 // per_block + 1
    kv = sparse_tensor((first + len(small.kv), *small.kv.shape[1:]), torch.bfloat16, device)
    kv[first:] = small.kv
    kv[: len(small.kv)] = 1.0  # where an address that wraps around would end
    far = [
        Segment(item.query_length, item.kv_length, [block + first for block in item.blocks])
        for item in segments.items
    ]
    got = paged_attention(query, kv, LAYERS - 1, small.segments(far))
    assert torch.equal(got, paged_attention(query, small.kv, LAYERS - 1, segments))


mixes = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda two: (two[0], sum(two))),
    min_size=1,
    max_size=6,
)


@on_devices
@settings(max_examples=20, deadline=None)
@given(lengths=mixes, block_size=st.sampled_from([5, 8, 16]), share=st.sampled_from([1, 2, 3]))
def test_any_mix_of_segments(device: str, lengths: Any, block_size: int, share: int) -> None:
    check(lengths, Shape(block_size, 2 * share, 2, 12), device)


def test_the_launch_indices_of_a_mixed_batch() -> None:
    _, _, segments = batch([(3, 8), (1, 20), (1, 0), (2, 2)], Shape(), "cpu")
    indices = segments.launch
    assert indices.decodes.tolist() == [1, 2]
    assert indices.prompts.tolist() == [0, 3]
    assert indices.query_starts.tolist() == [0, 3, 4, 5]
    assert (indices.longest_decode, indices.longest_prompt) == (20, 3)
    assert indices.tables[1].tolist() == list(segments.items[1].blocks)
