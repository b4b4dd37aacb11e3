"""The memory of one worker, watched: what lands where, and what stands there when it is used.

Owns three of the properties: nothing is written into memory of another generation or of nobody,
nothing is sent from memory that was given away, and nothing is activated on incomplete evidence.
"""

from typing import Any

from rlt.connector.geometry import PoolDescription
from rlt.connector.transport import unpack_notice
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.kv_manager import Lease
from rlt.runtime.types import Generation

from ..runtime.simulated_executor import Entry, SimulatedExecutor
from .records import Broken

Content = tuple[tuple[int, Entry | None], ...]  # of one entry: offset (-1: hidden), what stands


class WatchedMemory:
    def __init__(
        self, executor: SimulatedExecutor, pool: PoolDescription, core: EngineCore
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._core = core

    @property
    def _kv(self) -> Any:
        return self._core._scheduler._kv

    def _owners(self) -> dict[int, tuple[Generation, Any]]:
        """Who holds which block."""
        return {
            block: (generation, grant)
            for generation, grant in self._kv._grants.items()
            for row in grant.rows
            for block in row
        }

    def content(self, entry: int) -> Content:
        """What stands at one entry of the pool, if its place is held by somebody."""
        block, offsets = self._place(entry)
        if block is None:
            return ((-1, self._executor.memory.hidden.get(offsets[0])),)  # type: ignore[arg-type]
        return tuple((at, self._executor.memory.kv.get((block, at))) for at in offsets)

    def _place(self, entry: int) -> tuple[int | None, tuple[int, ...]]:
        """(block, offsets), or (None, (hidden row,))."""
        size, blocks = self._pool.geometry.block_size, self._pool.num_blocks
        if entry < blocks:
            return entry, tuple(range(size))
        runs = self._pool.geometry.num_layers * 2 * size
        entry -= blocks
        if entry < blocks * runs:
            return entry // runs, (entry % size,)
        return None, (entry - blocks * runs,)

    def land(self, content: tuple[tuple[int, Content], ...], packed: bytes) -> None:
        """Bytes of a WRITE land, whoever holds the memory now."""
        notice = unpack_notice(packed)
        assert notice is not None
        generation, owners = notice.generation, self._owners()
        for entry, stands in content:
            block, offsets = self._place(entry)
            if any(found is None or found[0] != generation for _, found in stands):
                raise Broken(f"source of generation {generation} was given away: sends {stands}")
            if block is None:
                row = offsets[0]
                if self._executor._receive_slots.get(generation) != row:
                    holders = {s: g for g, s in self._executor._receive_slots.items()}
                    raise Broken(
                        f"a WRITE of generation {generation} lands in hidden row {row} "
                        f"of {holders.get(row, 'nobody')}"
                    )
                self._executor.memory.hidden[row] = stands[0][1]  # type: ignore[assignment]
                continue
            owner, grant = owners.get(block, (None, None))
            if owner != generation or grant.id != notice.allocation:
                whose = owner or "nobody"
                raise Broken(
                    f"a WRITE of generation {generation} lands in block {block} of {whose}"
                )
            if not grant.leases.keys() & {Lease.RECEIVE, Lease.QUARANTINE}:
                raise Broken(f"a WRITE of generation {generation} lands after it was received")
            for (_, entry_content), offset in zip(stands, offsets, strict=True):
                assert entry_content is not None
                self._executor.memory.kv[block, offset] = entry_content

    def check_received(self, generation: Generation) -> None:
        """Every chunk's bytes are there when D says that it has received everything."""
        request = self._core._scheduler._book.get(generation)
        allocation, size = self._kv.allocation(generation), self._pool.geometry.block_size
        for table in allocation.tables:
            for position in range(request.spec.context_tokens):
                found = self._executor.memory.kv.get((table[position // size], position % size))
                if found is None or found[:2] != (generation, position):
                    raise Broken(f"{generation} was activated with {found} at {position}")
        row = self._executor._receive_slots[generation]
        found_hidden = self._executor.memory.hidden.get(row)
        if found_hidden is None or found_hidden[0] != generation:
            raise Broken(f"{generation} was activated with hidden state {found_hidden}")

    def forget(self) -> None:
        """What stands in memory that nobody holds can make no difference."""
        memory, owners = self._executor.memory, self._owners()
        memory.kv = {
            place: entry
            for place, entry in sorted(memory.kv.items())
            if place[0] in owners and owners[place[0]][0] == entry[0]
        }
        rows = {*self._executor._slots.values(), *self._executor._receive_slots.values()}
        memory.hidden = {r: held for r, held in sorted(memory.hidden.items()) if r in rows}
        memory.tokens = {r: held for r, held in sorted(memory.tokens.items()) if r in rows}
