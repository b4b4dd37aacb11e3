"""What one generation holds of the KV pool: its block columns, which of them are shared, and why.

Owned by the KV manager, which alone changes it. Never touches a tensor.
A column is one block per plane. The first columns of a grant may be pages of the prefix cache;
those are read by others too and are never written or cut.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .prefix_cache import Page
from .types import AllocationId, BlockTables, Generation, KVGeometry


class Lease(StrEnum):
    """Why blocks may not be reused yet."""

    OWNER = "owner"  # the request lives
    PASS = "pass"  # a pass in flight reads or writes them
    RECEIVE = "receive"  # a peer may write them
    SEND = "send"  # handles may read them
    QUARANTINE = "quarantine"  # nothing proves yet that the writer has ended


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One grant as it stands. Its id is never given again, though its blocks will be.

    tokens: positions that may be written. The first cached_tokens are there already, in columns
    that are shared.
    """

    id: AllocationId
    generation: Generation
    tokens: int
    tables: BlockTables
    cached_tokens: int = 0


class KVUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot; epoch moves whenever blocks can be granted that could not be before.

    blocks_free: what can be granted now, blocks_cached included: those hold pages that nobody uses.
    """

    epoch: int
    blocks_total: int
    blocks_free: int
    blocks_quarantined: int
    blocks_cached: int
    allocations: int
    suspended: int
    prefix_hits: int  # pages, over all time
    prefix_hit_tokens: int
    prefix_evictions: int
    leases: dict[str, int]


@dataclass(slots=True)
class Grant:
    id: AllocationId
    tokens: int
    rows: list[list[int]]  # [plane][column] -> block
    prompt: tuple[int, ...]  # what of it may be shared
    valid: list[int]  # [plane]: positions 0..valid-1 may be read
    hits: int = 0  # columns that were cached when it was granted
    pages: list[Page] = field(default_factory=list)  # of the first columns: what they hold
    leases: dict[Lease, int] = field(default_factory=dict)
    withdrawn: int = 0  # blocks that its quarantine took out of use

    @property
    def columns(self) -> int:
        return len(self.rows[0])

    def column(self, index: int) -> tuple[int, ...]:
        return tuple(row[index] for row in self.rows)

    def is_shared(self, index: int) -> bool:
        """Whether the cache owns this column, for which the grant then counts as a reference.
        Where another table published the same page first, the column stays this grant's own."""
        return index < len(self.pages) and self.pages[index].blocks[0] == self.rows[0][index]

    def shared_pages(self) -> list[Page]:
        return [page for index, page in enumerate(self.pages) if self.is_shared(index)]

    def own_blocks(self) -> list[int]:
        return [
            row[index]
            for index in range(self.columns)
            if not self.is_shared(index)
            for row in self.rows
        ]

    def fault(self, geometry: KVGeometry) -> str | None:
        """What in it contradicts itself, or None."""
        if not self.leases or min(self.leases.values()) < 1:
            return "it holds blocks without a lease"
        if len({len(row) for row in self.rows}) != 1:
            return "its planes differ in length"
        if Lease.QUARANTINE in self.leases:
            return None
        if self.columns != geometry.plane_blocks(self.tokens):
            return f"{self.columns} columns for {self.tokens} positions"
        if max(self.valid) > self.tokens:
            return "it is valid beyond its allocation"
        if min(self.valid) < len(self.pages) * geometry.block_size:
            return "a page of it is not valid"
        return None

    def cut(self, columns: int) -> list[int]:
        """Drop all but the first columns; the blocks of the others."""
        dropped = [block for row in self.rows for block in row[columns:]]
        for row in self.rows:
            del row[columns:]
        return dropped
