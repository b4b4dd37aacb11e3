"""Block numbers to bytes: every position's bytes once, nothing else, and no number trusted."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.connector.geometry import (
    PoolDescription,
    Segment,
    check_compatible,
    check_pool,
    hidden_entry,
    kv_bytes,
    kv_entries,
    segment_of,
)
from rlt.runtime.errors import ProtocolError
from rlt.runtime.types import KVGeometry, TokenRange

from .pools import geometry

KV_BASE = 1 << 20
HIDDEN_BASE = 1 << 40


def pool(shape: KVGeometry, blocks: int = 8, rows: int = 3) -> PoolDescription:
    return PoolDescription(
        kv_base=KV_BASE,
        hidden_base=HIDDEN_BASE,
        num_blocks=blocks,
        hidden_rows=rows,
        geometry=shape,
    )


@st.composite
def chunks(draw: st.DrawFn) -> tuple[PoolDescription, TokenRange, list[int]]:
    size = draw(st.integers(1, 9))
    shape = geometry(
        draw(st.sampled_from(["float32", "bfloat16"])),
        block_size=size,
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 2)),
    )
    start = draw(st.integers(0, 30))
    span = TokenRange(start, start + draw(st.integers(1, 30)))
    need = -(-span.stop // size) - span.start // size
    here = pool(shape, blocks=need + draw(st.integers(0, 4)))
    blocks = draw(st.permutations(range(here.num_blocks)))[:need]
    return here, span, list(blocks)


@given(chunks())
def test_the_segments_of_a_range_tile_exactly_the_bytes_of_its_positions(
    chunk: tuple[PoolDescription, TokenRange, list[int]],
) -> None:
    here, span, blocks = chunk
    shape = here.geometry
    covered: list[int] = []
    for entry in kv_entries(here, span, blocks):
        segment = segment_of(here, entry)
        assert segment.num_bytes % shape.position_bytes == 0
        covered += range(segment.address, segment.address + segment.num_bytes, shape.position_bytes)
    first = span.start // shape.block_size
    expected = {
        KV_BASE
        + blocks[position // shape.block_size - first] * shape.block_bytes
        + (half * shape.block_size + position % shape.block_size) * shape.position_bytes
        for position in range(span.start, span.stop)
        for half in range(shape.num_layers * 2)
    }
    assert len(covered) == len(set(covered))
    assert set(covered) == expected
    assert len(covered) * shape.position_bytes == kv_bytes(shape, span)
    assert KV_BASE <= min(covered) and max(covered) < KV_BASE + here.kv_bytes


@given(chunks())
def test_both_ends_list_equal_sizes_in_equal_order(
    chunk: tuple[PoolDescription, TokenRange, list[int]],
) -> None:
    here, span, blocks = chunk
    there = pool(here.geometry, blocks=here.num_blocks + 5)
    other = [block + 5 for block in reversed(blocks)]
    mine = [segment_of(here, entry).num_bytes for entry in kv_entries(here, span, blocks)]
    theirs = [segment_of(there, entry).num_bytes for entry in kv_entries(there, span, other)]
    assert mine == theirs


def test_a_full_block_is_one_descriptor_and_a_partial_one_neighbouring_runs() -> None:
    here = pool(geometry(block_size=4, layers=1))
    entries = kv_entries(here, TokenRange(2, 8), [5, 3])
    runs, whole = entries[:-1], entries[-1]
    assert segment_of(here, whole) == Segment(
        KV_BASE + 3 * here.geometry.block_bytes, here.geometry.block_bytes
    )
    keys, values = runs[:2], runs[2:]
    assert keys == [keys[0], keys[0] + 1]
    assert values == [keys[0] + 4, keys[0] + 5]


def test_hidden_rows_are_entries_of_the_same_list() -> None:
    here = pool(geometry())
    size = here.geometry.hidden_bytes
    assert segment_of(here, hidden_entry(here, 2)) == Segment(HIDDEN_BASE + 2 * size, size)


@pytest.mark.parametrize("blocks", [[0, 8], [-1, 0], [3, 3], [0], [0, 1, 2], []])
def test_blocks_outside_the_pool_repeated_or_of_the_wrong_number_are_refused(
    blocks: list[int],
) -> None:
    with pytest.raises(ProtocolError, match="block"):
        kv_entries(pool(geometry()), TokenRange(0, 8), blocks)


@pytest.mark.parametrize("span", [TokenRange(4, 4), TokenRange(5, 4), TokenRange(-1, 3)])
def test_an_empty_or_negative_range_is_refused(span: TokenRange) -> None:
    with pytest.raises(ProtocolError, match="no range"):
        kv_entries(pool(geometry()), span, [0])


@pytest.mark.parametrize("row", [-1, 3])
def test_a_hidden_row_outside_the_pool_is_refused(row: int) -> None:
    with pytest.raises(ProtocolError, match="hidden row"):
        hidden_entry(pool(geometry()), row)


def test_an_entry_past_the_list_is_refused() -> None:
    here = pool(geometry())
    with pytest.raises(ProtocolError, match="outside"):
        segment_of(here, hidden_entry(here, here.hidden_rows - 1) + 1)


def test_every_mismatch_of_a_pair_is_named() -> None:
    mine = pool(geometry("float32", block_size=4))
    theirs = pool(geometry("bfloat16", block_size=8))
    with pytest.raises(ProtocolError) as refused:
        check_compatible(mine, theirs)
    assert "dtype is 'float32' here and 'bfloat16' there" in str(refused.value)
    assert "block_size is 4 here and 8 there" in str(refused.value)
    assert "head_dim" not in str(refused.value)


def test_pools_of_other_sizes_pair() -> None:
    check_compatible(pool(geometry(), blocks=8), pool(geometry(), blocks=800, rows=40))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_base", 0),
        ("hidden_base", (1 << 64) - 8),
        ("num_blocks", 0),
        ("num_blocks", 1 << 31),
        ("hidden_rows", -2),
        ("memory", "FILE"),
        ("device_id", -1),
        ("geometry", msgspec.structs.replace(geometry(), block_size=0)),
        ("geometry", msgspec.structs.replace(geometry(), num_layers=-1, num_depths=-1)),
    ],
)
def test_a_description_that_cannot_be_memory_is_refused(field: str, value: object) -> None:
    here = pool(geometry())
    with pytest.raises(ProtocolError, match="cannot be right"):
        check_pool(msgspec.structs.replace(here, **{field: value}))


def test_a_description_survives_the_wire() -> None:
    here = pool(geometry())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=PoolDescription) == here
