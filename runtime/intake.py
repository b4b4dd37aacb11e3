"""How requests come in: queued prompts, reservations, and who gets blocks and a slot next.

The Scheduler's helper, called by it alone. Plans no pass and reads no result.
A request is let in with everything it will ever need: blocks for all its positions (P: its prompt)
over all planes, so that what runs can never run out.
"""

from collections import deque

import msgspec

from .admission import WaitingQueue
from .errors import InvariantBroken, Overloaded, TooLong
from .events import Activated, Refuse, Reservation, Wait
from .interfaces import Clock
from .kv_manager import KVManager, Lease
from .request import Phase, Request, Role
from .request_book import RequestBook, Slots
from .types import BlockTables, EngineRequest, Generation, Stamp


class PrefillAdmitted(msgspec.Struct, frozen=True):
    """P gave the prompt all its blocks and a slot; nothing of it has run yet."""

    generation: Generation
    tables: BlockTables


class Intake:
    def __init__(
        self,
        *,
        book: RequestBook,
        kv: KVManager,
        slots: Slots,
        clock: Clock,
        max_positions: int,
        waiting: WaitingQueue,
    ) -> None:
        self._book = book
        self._kv = kv
        self._slots = slots
        self._clock = clock
        self._max_positions = max_positions
        self._waiting = waiting
        self.received: deque[Request] = deque()  # filled by HandoffResults, emptied here

    @property
    def bypasses(self) -> int:
        return self._waiting.bypasses

    def add(self, spec: EngineRequest, role: Role) -> None:
        """Queue a prompt. Raises TooLong (it can never fit) or Overloaded (the queue is full)."""
        tokens = _prompt_tokens(spec, role)
        if (why := self._never_fits(tokens)) is not None:
            raise TooLong(f"generation {spec.generation}: {why}")
        if self._waiting.full:
            raise Overloaded(f"{len(self._waiting)} requests wait already; try later")
        self._book.open(Request(spec, role, Phase.WAITING))
        self._waiting.add(spec.generation, self._kv.blocks_for(tokens))

    def reserve(self, spec: EngineRequest) -> Reservation | Wait | Refuse:
        """Blocks for prompt and output, and a receive slot. Asked again: the same answer."""
        known = self._book.get(spec.generation)
        if known is not None:
            if known.reservation is None or known.over:
                return Refuse("protocol", f"generation {spec.generation} is {known.phase} here")
            return known.reservation
        if (why := self._never_fits(spec.capacity_tokens)) is not None:
            return Refuse(TooLong.code, why)
        if self._slots.capacity().free_receive_slots < 1:
            return Wait("every receive slot is taken")
        leases = (Lease.OWNER, Lease.RECEIVE)
        allocation = self._kv.allocate(spec.generation, spec.capacity_tokens, leases)
        if allocation is None:
            return Wait(f"{self._kv.blocks_for(spec.capacity_tokens)} blocks are not free")
        slot = self._slots.admit_receive(spec.generation)
        if slot is None:
            raise InvariantBroken("the executor counted a free receive slot and then had none")
        reservation = Reservation(
            allocation=allocation.id, tables=allocation.tables, hidden_slot=slot
        )
        request = Request(spec, Role.DECODE, Phase.RECEIVING)
        request.receive_slot, request.reservation = slot, reservation
        self._book.open(request)
        return reservation

    def cancel(self, generation: Generation) -> bool:
        """Nothing more is produced; Released follows when everything is back. False if unknown."""
        request = self._book.get(generation)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            self._waiting.remove(generation)
        self._book.let_go(request)
        return True

    def admit(self) -> list[PrefillAdmitted]:
        """Received prompts take slots first; then waiting ones while blocks and slots last."""
        self._activate_received()
        admitted: list[PrefillAdmitted] = []
        while self._waiting:
            free_slots = self._slots.capacity().free_slots
            chosen = self._waiting.next_to_admit(self._kv.free_blocks(), free_slots)
            if chosen is None:
                break
            self._start(chosen)
            request = self._book.get(chosen)
            if request is not None and request.role is Role.PREFILL:
                admitted.append(PrefillAdmitted(chosen, self._kv.allocation(chosen).tables))
        return admitted

    def _start(self, generation: Generation) -> None:
        request = self._book.get(generation)
        assert request is not None, f"generation {generation} waits and is not live"
        sends = request.role is Role.PREFILL
        leases = (Lease.OWNER, Lease.SEND) if sends else (Lease.OWNER,)
        tokens = _prompt_tokens(request.spec, request.role)
        if self._kv.allocate(generation, tokens, leases) is None:
            raise InvariantBroken(f"generation {generation} was chosen and its blocks are not free")
        request.slot = self._slots.admit(generation)
        if request.slot is None:
            raise InvariantBroken("the executor counted a free slot and then had none")
        request.stamps.append(Stamp("admitted", self._clock.wall_s()))
        self._book.move(request, Phase.PREFILLING)

    def _activate_received(self) -> None:
        while self.received:
            request = self.received[0]
            if request.phase is Phase.RECEIVED:
                request.slot = self._slots.admit(request.generation)
                if request.slot is None:
                    return
                self._book.move(request, Phase.NEEDS_CODA)
                counts = request.prefill_tokens, request.recurrent_loops
                self._book.emit(Activated(request.generation, *counts))
            self.received.popleft()

    def fail_hopeless(self) -> None:
        """Blocks were withdrawn: whoever waits for more than what is left would wait for ever."""
        for generation in self._waiting.larger_than(self._kv.usable_blocks()):
            self._waiting.remove(generation)
            request = self._book.get(generation)
            if request is not None:
                self._book.fail(request, TooLong.code, "blocks were withdrawn: too few are left")

    def _never_fits(self, tokens: int) -> str | None:
        need, usable = self._kv.blocks_for(tokens), self._kv.usable_blocks()
        if tokens > self._max_positions:
            return f"{tokens} positions, the model has {self._max_positions}"
        if need > usable:
            return f"{tokens} positions need {need} blocks, the pool has {usable}"
        return None


def _prompt_tokens(spec: EngineRequest, role: Role) -> int:
    """Positions that a queued request takes blocks for: P never decodes."""
    return len(spec.prompt) if role is Role.PREFILL else spec.capacity_tokens
