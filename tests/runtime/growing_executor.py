"""The simulated executor, with snapshots, and with prompts whose K/V several requests may read.

An entry of a prompt position is owned by the tokens up to it, so whoever has the same beginning may
read it; a generated position belongs to its generation alone.
"""

from typing import Any

import msgspec

from rlt.runtime.errors import CapacityError
from rlt.runtime.interfaces import AdmissionLimits, SuspendReceipt
from rlt.runtime.types import BlockTables, EngineRequest, Generation

from .simulated_executor import Entry, SimulatedExecutor, _rows_of, _take, mix


class _Snapshot(msgspec.Struct):
    kv: list[list[dict[int, Entry]]]  # [plane][column]: offset -> entry
    hidden: tuple[Generation, int] | None
    token: tuple[Generation, int, int] | None
    chunk: list[int] | None
    num_bytes: int


class GrowingExecutor(SimulatedExecutor):
    """real_bytes: what snapshots may really take; snapshot_bytes: what the engine is told."""

    def __init__(
        self, *, snapshot_bytes: int = 1 << 30, real_bytes: int | None = None, **more: Any
    ) -> None:
        super().__init__(**more)
        self._snapshot_bytes = snapshot_bytes
        self._real_bytes = snapshot_bytes if real_bytes is None else real_bytes
        self._prompts: dict[Generation, tuple[int, ...]] = {}
        self.snapshots: dict[Generation, _Snapshot] = {}
        self.suspended: list[Generation] = []  # in order
        self.restored: list[Generation] = []

    def know(self, request: EngineRequest) -> EngineRequest:
        self._prompts[request.generation] = request.prompt
        return request

    def admission_limits(self) -> AdmissionLimits:
        limits = super().admission_limits()
        return msgspec.structs.replace(limits, snapshot_bytes=self._snapshot_bytes)

    def suspend(self, generation: Generation, tables: BlockTables) -> SuspendReceipt:
        assert all(generation not in _rows_of(plan) for plan in self._queued), "pass in flight"
        assert generation not in self._receive_slots, "its hidden state is in a receive slot"
        blocks = [block for row in tables for block in row]
        size = len(blocks) * self._geometry.block_bytes + self._geometry.hidden_bytes
        if size + sum(s.num_bytes for s in self.snapshots.values()) > self._real_bytes:
            raise CapacityError("no room for a snapshot")
        slot = self._slots.pop(generation)
        kv = [[self._entries(block) for block in row] for row in tables]
        self.snapshots[generation] = _Snapshot(
            kv,
            self.memory.hidden.get(slot),
            self.memory.tokens.get(slot),
            self._chunks.pop(generation, None),
            size,
        )
        self._epoch += 1
        self.suspended.append(generation)
        return SuspendReceipt(generation, slot, len(blocks), size)

    def restore(self, generation: Generation, tables: BlockTables) -> int | None:
        snapshot = self.snapshots[generation]
        assert [len(row) for row in tables] == [len(row) for row in snapshot.kv]
        slot = _take(self._slots, generation, range(self._limits.num_slots))
        if slot is None:
            return None
        del self.snapshots[generation]
        for row, columns in zip(tables, snapshot.kv, strict=True):
            for block, entries in zip(row, columns, strict=True):
                for offset, entry in entries.items():
                    self.memory.kv[block, offset] = entry
        if snapshot.hidden is not None:
            self.memory.hidden[slot] = snapshot.hidden
        if snapshot.token is not None:
            self.memory.tokens[slot] = snapshot.token
        if snapshot.chunk is not None:
            self._chunks[generation] = snapshot.chunk
        self._epoch += 1
        self.restored.append(generation)
        return slot

    def discard(self, generation: Generation) -> None:
        if self.snapshots.pop(generation, None) is not None:
            self._epoch += 1

    def _entries(self, block: int) -> dict[int, Entry]:
        places = ((offset, (block, offset)) for offset in range(self._geometry.block_size))
        return {o: self.memory.kv[place] for o, place in places if place in self.memory.kv}

    def _owner(self, generation: Generation, position: int) -> Generation:
        prompt = self._prompts[generation]
        if position >= len(prompt):
            return generation
        return Generation(-1 - mix(*prompt[: position + 1]))

    def _attend(
        self,
        generation: Generation,
        blocks: tuple[int, ...],
        position: int,
        depth: int,
        state: int,
    ) -> int:
        size = self._geometry.block_size
        column, offset = divmod(position, size)
        owner = self._owner(generation, position)
        self.memory.kv[blocks[column], offset] = (owner, position, mix(state, depth))
        for earlier in range(position + 1):
            column, offset = divmod(earlier, size)
            found, written_for, value = self.memory.kv[blocks[column], offset]
            assert (found, written_for) == (self._owner(generation, earlier), earlier), (
                f"generation {generation} at {position}, depth {depth} reads {earlier}: "
                f"found an entry of {found}, position {written_for}"
            )
            state = mix(state, value)
        return state
