"""Blocks of KV memory: which are free, who holds the others, why, and what in them may be read.

Owns the free list, every block table, its leases and its valid lengths. Never touches a tensor.
A block returns to the free list only when the last lease on its allocation has ended; a quarantine
lease never ends.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .errors import InvariantBroken
from .types import AllocationId, BlockTables, Generation, KVGeometry, TokenRange


class Lease(StrEnum):
    """Why blocks may not be reused yet."""

    OWNER = "owner"  # the request lives
    PASS = "pass"  # a pass in flight reads or writes them
    RECEIVE = "receive"  # a peer may write them
    SEND = "send"  # handles may read them
    QUARANTINE = "quarantine"  # no proof will come that the writer has ended


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One grant. Its id is never given again, though its blocks will be."""

    id: AllocationId
    generation: Generation
    tokens: int
    tables: BlockTables


class KVUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot; epoch moves whenever blocks return to the free list."""

    epoch: int
    blocks_total: int
    blocks_free: int
    blocks_quarantined: int
    allocations: int
    leases: dict[str, int]


@dataclass(slots=True)
class _Grant:
    allocation: Allocation
    num_blocks: int
    valid: list[int]  # per depth: positions 0..valid-1 may be read
    leases: Counter[Lease] = field(default_factory=Counter)


class KVManager:
    def __init__(self, *, num_blocks: int, geometry: KVGeometry) -> None:
        self._num_blocks = num_blocks
        self._geometry = geometry
        self._free: deque[int] = deque(range(num_blocks))
        self._grants: dict[Generation, _Grant] = {}
        self._granted = 0
        self._quarantined = 0
        self._epoch = 0

    def blocks_for(self, tokens: int) -> int:
        return self._geometry.blocks(tokens)

    def usable_blocks(self) -> int:
        """Blocks that are free or will be: what a request may hope for."""
        return self._num_blocks - self._quarantined

    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(
        self, generation: Generation, tokens: int, leases: Iterable[Lease]
    ) -> Allocation | None:
        """Blocks for `tokens` positions over all planes, or None if they are not free now."""
        if generation in self._grants:
            raise InvariantBroken(f"generation {generation} already holds blocks")
        per_plane, depths = self._geometry.plane_blocks(tokens), self._geometry.num_depths
        if per_plane * depths > len(self._free):
            return None
        self._granted += 1
        allocation = Allocation(
            id=AllocationId(self._granted),
            generation=generation,
            tokens=tokens,
            tables=tuple(
                tuple(self._free.popleft() for _ in range(per_plane)) for _ in range(depths)
            ),
        )
        grant = _Grant(allocation, per_plane * depths, [0] * depths)
        grant.leases.update(leases)
        self._grants[generation] = grant
        return allocation

    def allocation(self, generation: Generation) -> Allocation:
        return self._grant(generation).allocation

    def lease(self, generation: Generation, reason: Lease) -> None:
        self._grant(generation).leases[reason] += 1

    def leases(self, generation: Generation) -> frozenset[Lease]:
        """The reasons that hold now; empty when the generation holds nothing."""
        grant = self._grants.get(generation)
        return frozenset(grant.leases) if grant else frozenset()

    def end_lease(self, generation: Generation, reason: Lease) -> None:
        grant = self._grant(generation)
        if grant.leases[reason] < 1 or reason is Lease.QUARANTINE:
            raise InvariantBroken(f"generation {generation} has no {reason} lease to end")
        grant.leases[reason] -= 1
        grant.leases = +grant.leases
        if not grant.leases:
            del self._grants[generation]
            self._free.extend(block for row in grant.allocation.tables for block in row)
            self._epoch += 1

    def quarantine(self, generation: Generation, replaces: Lease) -> int:
        """Turn a lease that nobody will end into a quarantine; returns the blocks withdrawn."""
        grant = self._grant(generation)
        grant.leases[Lease.QUARANTINE] += 1
        self._quarantined += grant.num_blocks
        self.end_lease(generation, replaces)
        return grant.num_blocks

    def quarantined_blocks(self, generation: Generation) -> int:
        grant = self._grants.get(generation)
        return grant.num_blocks if grant and Lease.QUARANTINE in grant.leases else 0

    def plane_row(self, generation: Generation, depth: int, stop: int) -> tuple[int, ...]:
        """The block row of one plane that covers positions 0..stop-1."""
        row = self._grant(generation).allocation.tables[depth]
        return row[: self._geometry.plane_blocks(stop)]

    def valid_tokens(self, generation: Generation, depth: int) -> int:
        return self._grant(generation).valid[depth]

    def mark_valid(self, generation: Generation, depth: int, positions: TokenRange) -> None:
        """K/V of (depth, positions) are written. Validity grows without gaps."""
        grant = self._grant(generation)
        if positions.start != grant.valid[depth] or positions.stop > grant.allocation.tokens:
            raise InvariantBroken(
                f"generation {generation} depth {depth}: {positions.start}..{positions.stop} "
                f"written, valid were {grant.valid[depth]} of {grant.allocation.tokens}"
            )
        grant.valid[depth] = positions.stop

    def mark_prompt_valid(self, generation: Generation, prompt: TokenRange) -> None:
        """A peer wrote the whole prompt into every plane."""
        for depth in range(self._geometry.num_depths):
            self.mark_valid(generation, depth, prompt)

    def usage(self) -> KVUsage:
        leases = Counter(dict.fromkeys(Lease, 0))
        for grant in self._grants.values():
            leases.update(grant.leases)
        return KVUsage(
            epoch=self._epoch,
            blocks_total=self._num_blocks,
            blocks_free=len(self._free),
            blocks_quarantined=self._quarantined,
            allocations=len(self._grants),
            leases={reason.value: leases[reason] for reason in Lease},
        )

    def check(self) -> None:
        """Every block is free or granted, once; every grant has a reason to stand."""
        held = [b for g in self._grants.values() for row in g.allocation.tables for b in row]
        if sorted([*self._free, *held]) != list(range(self._num_blocks)):
            raise InvariantBroken(f"{self._num_blocks} blocks: some are lost or held twice")
        for generation, grant in self._grants.items():
            if not grant.leases or min(grant.leases.values()) < 1:
                raise InvariantBroken(f"generation {generation} holds blocks without a lease")
            if max(grant.valid) > grant.allocation.tokens:
                raise InvariantBroken(f"generation {generation}: valid beyond its allocation")
        withdrawn = sum(self.quarantined_blocks(generation) for generation in self._grants)
        if withdrawn != self._quarantined:
            raise InvariantBroken(f"{self._quarantined} blocks quarantined, {withdrawn} found")

    def _grant(self, generation: Generation) -> _Grant:
        grant = self._grants.get(generation)
        if grant is None:
            raise InvariantBroken(f"generation {generation} holds no blocks")
        return grant
