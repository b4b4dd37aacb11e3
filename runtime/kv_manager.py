"""Blocks of KV memory: who holds which, why, and what in them may be read.

Owns every block table, its leases and its valid lengths, and the pool that they come from. Never
touches a tensor.
A block is granted again only when the last lease on its allocation has ended and no other table
reads it; a quarantine lease ends only by the proof that its writer writes no more.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .block_pool import BlockPool
from .errors import InvariantBroken
from .interfaces import BlockWatch
from .kv_grants import Allocation, Grant, KVUsage, Lease
from .types import AllocationId, Generation, KVGeometry, TokenRange

__all__ = ["Allocation", "KVManager", "KVUsage", "Lease"]


@dataclass(slots=True)
class _Suspended:
    """What must hold again when a suspended request gets blocks."""

    tokens: int
    columns: int
    valid: list[int]
    prompt: tuple[int, ...]


class KVManager:
    def __init__(
        self,
        *,
        num_blocks: int,
        geometry: KVGeometry,
        prefix_cache: bool = False,
        watch: BlockWatch | None = None,
    ) -> None:
        """watch: is told of every block that becomes free or is granted."""
        self._num_blocks = num_blocks
        self._geometry = geometry
        self._pool = BlockPool(num_blocks, geometry, caching=prefix_cache, watch=watch)
        self._grants: dict[Generation, Grant] = {}
        self._suspended: dict[Generation, _Suspended] = {}
        self._granted = 0
        self._quarantined = 0
        self._leases = dict.fromkeys(Lease, 0)  # of all grants

    # What is there.

    @property
    def epoch(self) -> int:
        """Moves whenever free_blocks() may have grown."""
        return self._pool.epoch

    def blocks_for(self, tokens: int) -> int:
        return self._geometry.blocks(tokens)

    def total_blocks(self) -> int:
        """What a request may hope for: quarantines end."""
        return self._num_blocks

    def usable_blocks(self) -> int:
        """Blocks that nobody withdrew."""
        return self._num_blocks - self._quarantined

    def free_blocks(self) -> int:
        """Blocks that can be granted now; pages that nobody uses are evicted for it."""
        return self._pool.grantable()

    def takes(self, tokens: int, prompt: tuple[int, ...] = ()) -> int:
        """By how much allocate() would lower free_blocks()."""
        return self._pool.takes(tokens, prompt)

    def holders(self) -> int:
        """Live requests that hold blocks."""
        return self._leases[Lease.OWNER]

    def fits(self, tokens: int, prompt: tuple[int, ...], keep: int) -> bool:
        """Whether allocate() would leave at least `keep` blocks free. The pages of the prompt are
        looked up only where they decide."""
        free = self.free_blocks() - keep
        if self.blocks_for(tokens) <= free:
            return True
        return free >= self._geometry.num_planes and self.takes(tokens, prompt) <= free

    def usage(self) -> KVUsage:
        return KVUsage(
            epoch=self.epoch,
            blocks_total=self._num_blocks,
            blocks_free=self.free_blocks(),
            blocks_quarantined=self._quarantined,
            blocks_cached=self._pool.idle_blocks(),
            allocations=len(self._grants),
            suspended=len(self._suspended),
            prefix_hits=self._pool.hits,
            prefix_hit_tokens=self._pool.hits * self._geometry.block_size,
            prefix_evictions=self._pool.evictions,
            leases={reason.value: self._leases[reason] for reason in Lease},
        )

    # Tables come, grow and go.

    def allocate(
        self,
        generation: Generation,
        tokens: int,
        leases: Iterable[Lease],
        prompt: tuple[int, ...] = (),
    ) -> Allocation | None:
        """Blocks for `tokens` positions over all planes, or None if they are not free now.

        prompt: whatever of its beginning is cached is shared, except its last token.
        """
        self._refuse_second(generation)
        if self.takes(tokens, prompt) > self.free_blocks():
            return None
        grant = self._new_grant(tokens, prompt)
        self._pool.share_prefix(grant)
        grant.valid = [grant.hits * self._geometry.block_size] * self._geometry.num_planes
        self._pool.extend(grant, self._geometry.plane_blocks(tokens))
        return self._enter(generation, grant, leases)

    def grow(self, generation: Generation, tokens: int) -> bool:
        """Room for positions 0..tokens-1; False, and nothing changed, if it is not free now."""
        grant = self._grant(generation)
        if tokens > grant.tokens:
            columns = self._geometry.plane_blocks(tokens)
            if (columns - grant.columns) * self._geometry.num_planes > self.free_blocks():
                return False
            self._pool.extend(grant, columns)
            grant.tokens = columns * self._geometry.block_size
        return True

    def truncate(self, generation: Generation, tokens: int, *, give_back: bool = False) -> None:
        """Positions >= tokens hold nothing any more. give_back: their columns are free again, which
        no pass in flight may contradict. Shared columns are never cut."""
        grant = self._grant(generation)
        if tokens < len(grant.pages) * self._geometry.block_size:
            raise InvariantBroken(f"generation {generation}: {tokens} cuts into a shared page")
        grant.valid = [min(valid, tokens) for valid in grant.valid]
        if not give_back or tokens >= grant.tokens:
            return
        if grant.leases.keys() != {Lease.OWNER}:
            raise InvariantBroken(
                f"generation {generation}: blocks cannot go back under {sorted(grant.leases)}"
            )
        grant.tokens = tokens
        self._pool.put_back(grant.cut(self._geometry.plane_blocks(tokens)))

    def suspend(self, generation: Generation) -> None:
        """Its blocks are free again; what they held is remembered until resume or forget."""
        grant = self._grant(generation)
        if grant.leases != {Lease.OWNER: 1}:
            raise InvariantBroken(
                f"generation {generation} cannot be suspended under {sorted(grant.leases)}"
            )
        self._suspended[generation] = _Suspended(
            grant.tokens, grant.columns, grant.valid, grant.prompt
        )
        self.end_lease(generation, Lease.OWNER)

    def resume(self, generation: Generation) -> Allocation | None:
        """As many blocks as it had, all its own, as valid as they were: the snapshot is written
        into every one of them. None if they are not free now."""
        self._refuse_second(generation)
        saved = self._suspended[generation]
        if saved.columns * self._geometry.num_planes > self.free_blocks():
            return None
        del self._suspended[generation]
        grant = self._new_grant(saved.tokens, saved.prompt)
        grant.valid = saved.valid
        self._pool.extend(grant, saved.columns)
        return self._enter(generation, grant, (Lease.OWNER,))

    def forget(self, generation: Generation) -> None:
        """A suspended request will not be resumed; without effect if it is not suspended."""
        self._suspended.pop(generation, None)

    def allocation(self, generation: Generation) -> Allocation:
        grant = self._grant(generation)
        return Allocation(
            id=grant.id,
            generation=generation,
            tokens=grant.tokens,
            tables=tuple(tuple(row) for row in grant.rows),
            cached_tokens=grant.hits * self._geometry.block_size,
        )

    def columns(self, generation: Generation) -> int:
        """Block columns that it holds, or held when it was suspended."""
        saved = self._suspended.get(generation)
        return saved.columns if saved else self._grant(generation).columns

    def granted_tokens(self, generation: Generation) -> int:
        return self._grant(generation).tokens

    # Why blocks are kept.

    def lease(self, generation: Generation, reason: Lease) -> None:
        self._add_leases(self._grant(generation), (reason,))

    def leases(self, generation: Generation) -> frozenset[Lease]:
        """The reasons that hold now; empty when the generation holds nothing."""
        grant = self._grants.get(generation)
        return frozenset(grant.leases) if grant else frozenset()

    def end_lease(self, generation: Generation, reason: Lease) -> None:
        grant = self._grant(generation)
        if reason not in grant.leases or reason is Lease.QUARANTINE:
            raise InvariantBroken(f"generation {generation} has no {reason} lease to end")
        self._drop_lease(generation, reason)

    def quarantine(self, generation: Generation) -> int:
        """Nothing proves that its writer (RECEIVE) has ended: withdraw what that may still touch,
        which is all but what was cached. Returns how many blocks that is."""
        grant = self._grant(generation)
        if Lease.RECEIVE not in grant.leases:
            raise InvariantBroken(f"generation {generation} has no writer to be afraid of")
        self._pool.leave_pages(grant)
        grant.withdrawn = len(grant.own_blocks())
        self._quarantined += grant.withdrawn
        self._add_leases(grant, (Lease.QUARANTINE,))
        self._drop_lease(generation, Lease.RECEIVE)
        return grant.withdrawn

    def end_quarantine(self, generation: Generation) -> None:
        """Its writer is known to write no more, and the request ended when it was withdrawn."""
        grant = self._grant(generation)
        if grant.leases != {Lease.QUARANTINE: 1}:
            raise InvariantBroken(
                f"generation {generation}: no quarantine to end under {sorted(grant.leases)}"
            )
        self._quarantined -= grant.withdrawn
        self._drop_lease(generation, Lease.QUARANTINE)

    def _drop_lease(self, generation: Generation, reason: Lease) -> None:
        grant = self._grants[generation]
        self._leases[reason] -= 1
        grant.leases[reason] -= 1
        if grant.leases[reason]:
            return
        del grant.leases[reason]
        if not grant.leases:
            del self._grants[generation]
            self._pool.take_back(grant)

    def quarantined_blocks(self, generation: Generation) -> int:
        grant = self._grants.get(generation)
        return grant.withdrawn if grant else 0

    # What may be read, and by whom.

    def plane_row(self, generation: Generation, depth: int, stop: int) -> tuple[int, ...]:
        """The block row of a depth's plane that covers positions 0..stop-1."""
        row = self._grant(generation).rows[self._geometry.plane(depth)]
        return tuple(row[: self._geometry.plane_blocks(stop)])

    def block(self, generation: Generation, depth: int, column: int) -> int:
        return self._grant(generation).rows[self._geometry.plane(depth)][column]

    def valid_tokens(self, generation: Generation, depth: int) -> int:
        return self._grant(generation).valid[self._geometry.plane(depth)]

    def mark_valid(self, generation: Generation, depth: int, positions: TokenRange) -> None:
        """K/V of (depth, positions) are written. Validity grows without gaps."""
        grant = self._grant(generation)
        plane = self._geometry.plane(depth)
        if positions.start != grant.valid[plane] or positions.stop > grant.tokens:
            raise InvariantBroken(
                f"generation {generation} depth {depth}: {positions.start}..{positions.stop} "
                f"written, valid were {grant.valid[plane]} of {grant.tokens}"
            )
        grant.valid[plane] = positions.stop

    def mark_prompt_valid(self, generation: Generation, prompt: TokenRange) -> None:
        """A peer wrote what was not cached of the prompt, in every plane."""
        grant = self._grant(generation)
        if prompt.stop > grant.tokens:
            raise InvariantBroken(f"generation {generation}: received more than it has blocks for")
        grant.valid = [max(valid, prompt.stop) for valid in grant.valid]

    def publish(self, generation: Generation, stop: int) -> None:
        """Prompt positions 0..stop-1 ran at full depth: share every full column of them."""
        grant = self._grant(generation)
        if min(grant.valid) < min(stop, len(grant.prompt)):
            raise InvariantBroken(f"generation {generation}: published before it was written")
        self._pool.publish(grant, stop)

    def check(self) -> None:
        """Every block is free, cached or granted, once; every grant has a reason to stand."""
        self._pool.check(self._grants.values())
        leases: Counter[Lease] = Counter()
        for generation, grant in self._grants.items():
            if fault := grant.fault(self._geometry):
                raise InvariantBroken(f"generation {generation}: {fault}")
            leases.update(grant.leases)
        if leases != Counter(self._leases):
            raise InvariantBroken(f"leases held are {leases}, counted {self._leases}")
        withdrawn = sum(grant.withdrawn for grant in self._grants.values())
        if withdrawn != self._quarantined:
            raise InvariantBroken(f"{self._quarantined} blocks quarantined, {withdrawn} found")
        if both := self._suspended.keys() & self._grants.keys():
            raise InvariantBroken(f"suspended and holding blocks: {sorted(both)}")

    def _new_grant(self, tokens: int, prompt: tuple[int, ...]) -> Grant:
        self._granted += 1
        planes = self._geometry.num_planes
        rows: list[list[int]] = [[] for _ in range(planes)]
        return Grant(AllocationId(self._granted), tokens, rows, prompt, [0] * planes)

    def _enter(self, generation: Generation, grant: Grant, leases: Iterable[Lease]) -> Allocation:
        self._grants[generation] = grant
        self._add_leases(grant, leases)
        return self.allocation(generation)

    def _add_leases(self, grant: Grant, leases: Iterable[Lease]) -> None:
        for reason in leases:
            grant.leases[reason] = grant.leases.get(reason, 0) + 1
            self._leases[reason] += 1

    def _refuse_second(self, generation: Generation) -> None:
        if generation in self._grants:
            raise InvariantBroken(f"generation {generation} already holds blocks")

    def _grant(self, generation: Generation) -> Grant:
        grant = self._grants.get(generation)
        if grant is None:
            raise InvariantBroken(f"generation {generation} holds no blocks")
        return grant
