"""From block numbers to bytes: what a pool looks like, and which pieces of it a chunk is.

Owns the address arithmetic of a transfer. Never touches a tensor, an agent or a socket.
Every number that came from a peer is checked against that peer's pool here, before it becomes an
address.

A pool is seen as one list of entries, numbered: first its whole blocks, then its runs (the K or V
of one layer at one position: the finest contiguous piece), then its hidden rows. Both ends describe
the list by three strides, so it costs nothing to hold; a transfer is two equally long lists of
entry numbers.
"""

from collections.abc import Sequence

import msgspec

from ..runtime.errors import ProtocolError
from ..runtime.types import KVGeometry, TokenRange

ADDRESS_LIMIT = 1 << 64
ENTRY_LIMIT = 1 << 31  # NIXL takes entry numbers as int32


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's registered memory, as its peers need to know it.

    kv_base, hidden_base: addresses in that worker's own memory. memory, device_id: in NIXL's words.
    """

    kv_base: int
    hidden_base: int
    num_blocks: int
    hidden_rows: int
    geometry: KVGeometry
    memory: str = "DRAM"
    device_id: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.geometry.block_bytes

    @property
    def hidden_pool_bytes(self) -> int:
        return self.hidden_rows * self.geometry.hidden_bytes


class Stride(msgspec.Struct, frozen=True):
    """`count` entries of `entry_bytes` each, back to back from `base`."""

    base: int
    entry_bytes: int
    count: int


class Segment(msgspec.Struct, frozen=True, order=True):
    address: int
    num_bytes: int


def strides(pool: PoolDescription) -> tuple[Stride, Stride, Stride]:
    """The pool's entry list: whole blocks, runs, hidden rows, in this order."""
    shape = pool.geometry
    return (
        Stride(pool.kv_base, shape.block_bytes, pool.num_blocks),
        Stride(pool.kv_base, shape.position_bytes, pool.num_blocks * _runs_per_block(shape)),
        Stride(pool.hidden_base, shape.hidden_bytes, pool.hidden_rows),
    )


def check_pool(pool: PoolDescription) -> None:
    """Refuse a description whose numbers cannot be memory."""
    wrong = []
    if not all(n > 0 for n in msgspec.structs.astuple(pool.geometry) if isinstance(n, int)):
        wrong.append(f"{pool.geometry}")
    if pool.num_blocks < 1 or pool.hidden_rows < 1:
        wrong.append(f"{pool.num_blocks} blocks and {pool.hidden_rows} hidden rows")
    if pool.memory not in ("DRAM", "VRAM") or pool.device_id < 0:
        wrong.append(f"memory {pool.memory!r} of device {pool.device_id}")
    for name, base, size in (
        ("kv_base", pool.kv_base, pool.kv_bytes),
        ("hidden_base", pool.hidden_base, pool.hidden_pool_bytes),
    ):
        if base <= 0 or base + size > ADDRESS_LIMIT:
            wrong.append(f"{name} {base} with {size} bytes")
    if sum(stride.count for stride in strides(pool)) > ENTRY_LIMIT:
        wrong.append(f"more than {ENTRY_LIMIT} entries: use a larger block size or fewer blocks")
    if wrong:
        raise ProtocolError("pool description cannot be right: " + "; ".join(wrong))


def check_compatible(mine: PoolDescription, theirs: PoolDescription) -> None:
    """Refuse a pair whose caches are shaped differently; pool sizes may differ."""
    differences = shape_differences(mine.geometry, theirs.geometry)
    if differences:
        raise ProtocolError(f"workers cannot pair: {differences}")
    check_pool(theirs)


def shape_differences(mine: KVGeometry, theirs: KVGeometry) -> str:
    """Every field that differs, with both values; empty when they are equal."""
    return "; ".join(
        f"{name} is {ours!r} here and {other!r} there"
        for name in KVGeometry.__struct_fields__
        if (ours := getattr(mine, name)) != (other := getattr(theirs, name))
    )


def check_blocks(pool: PoolDescription, blocks: Sequence[int]) -> None:
    """Refuse block numbers outside the pool, or one named twice."""
    outside = [block for block in blocks if not 0 <= block < pool.num_blocks]
    if outside:
        raise ProtocolError(f"blocks {outside} are outside a pool of {pool.num_blocks} blocks")
    if len(set(blocks)) != len(blocks):
        raise ProtocolError(f"a block is named twice in {list(blocks)}")


def kv_entries(pool: PoolDescription, span: TokenRange, blocks: Sequence[int]) -> list[int]:
    """Entry numbers of the K/V of positions `span`, held by `blocks` in order.

    A block that the range fills is one entry; of a block that it fills in part, each layer's K and
    V is as many neighbouring entries as there are positions.
    """
    shape = pool.geometry
    size = shape.block_size
    if not 0 <= span.start < span.stop:
        raise ProtocolError(f"positions {span.start}..{span.stop} are no range")
    first = span.start // size
    if len(blocks) != shape.plane_blocks(span.stop) - first:
        raise ProtocolError(
            f"{len(blocks)} blocks of {size} positions cannot cover {span.start}..{span.stop}"
        )
    check_blocks(pool, blocks)
    entries: list[int] = []
    for block, origin in zip(blocks, range(first * size, span.stop, size), strict=True):
        start, stop = max(span.start - origin, 0), min(span.stop - origin, size)
        if stop - start == size:
            entries.append(block)
        else:
            entries.extend(_runs(pool, block, start, stop))
    return entries


def hidden_entry(pool: PoolDescription, row: int) -> int:
    """Entry number of one row of the hidden pool."""
    if not 0 <= row < pool.hidden_rows:
        raise ProtocolError(f"hidden row {row} is outside a pool of {pool.hidden_rows} rows")
    blocks, runs, _ = strides(pool)
    return blocks.count + runs.count + row


def segment_of(pool: PoolDescription, entry: int) -> Segment:
    """The bytes that an entry number stands for."""
    index = entry
    for stride in strides(pool):
        if 0 <= index < stride.count:
            return Segment(stride.base + index * stride.entry_bytes, stride.entry_bytes)
        index -= stride.count
    raise ProtocolError(f"entry {entry} is outside the pool")


def kv_bytes(shape: KVGeometry, span: TokenRange) -> int:
    """Bytes that the K/V of `span` takes in one depth plane."""
    return len(span) * shape.num_layers * 2 * shape.position_bytes


def _runs_per_block(shape: KVGeometry) -> int:
    return shape.num_layers * 2 * shape.block_size


def _runs(pool: PoolDescription, block: int, start: int, stop: int) -> list[int]:
    """Runs of positions start..stop-1 of a block; those of one layer's K or V are neighbours."""
    shape = pool.geometry
    base = pool.num_blocks + block * _runs_per_block(shape)
    return [
        base + half * shape.block_size + offset
        for half in range(shape.num_layers * 2)
        for offset in range(start, stop)
    ]
