"""How requests come in: queued prompts, reservations, and who gets blocks and a slot next.

The Scheduler's helper, called by it alone. Plans no pass and reads no result.
With full admission a request is let in with blocks for all its positions (P: its prompt) over all
planes, so that what runs can never run out; with incremental admission room.py says how many.
"""

from collections import deque

import msgspec

from .admission import ReservationLine, WaitingQueue
from .errors import InvariantBroken, Overloaded, TooLong
from .events import Activated, Refuse, Reservation, Wait
from .interfaces import Clock
from .kv_manager import KVManager, Lease
from .request import Phase, Request, Role
from .request_book import RequestBook, Slots
from .reservations import Reservations
from .room import Room
from .types import BlockTables, EngineRequest, Generation, Stamp


class PrefillAdmitted(msgspec.Struct, frozen=True):
    """P gave the prompt all its blocks and a slot; only what was cached stands in them."""

    generation: Generation
    tables: BlockTables
    cached_tokens: int


class Intake:
    def __init__(
        self,
        *,
        book: RequestBook,
        kv: KVManager,
        slots: Slots,
        room: Room,
        clock: Clock,
        max_positions: int,
        waiting: WaitingQueue,
        line: ReservationLine,
    ) -> None:
        self._book = book
        self._kv = kv
        self._slots = slots
        self._room = room
        self._clock = clock
        self._max_positions = max_positions
        self._waiting = waiting
        self._reservations = Reservations(
            book=book, kv=kv, slots=slots, room=room, clock=clock, line=line
        )
        self._arrivals = 0
        self._blocked_at: tuple[int, int] | None = None  # epochs when nobody could be let in
        self.received: deque[Request] = deque()  # filled by HandoffResults, emptied here

    @property
    def bypasses(self) -> int:
        return self._waiting.bypasses + self._reservations.bypasses

    def add(self, spec: EngineRequest, role: Role) -> None:
        """Queue a prompt. Raises TooLong (it can never fit) or Overloaded (the queue is full)."""
        tokens = _all_tokens(spec, role)
        if (why := self._never_fits(tokens)) is not None:
            raise TooLong(f"generation {spec.generation}: {why}")
        if self._waiting.full:
            raise Overloaded(f"{len(self._waiting)} requests wait already; try later")
        self._arrivals += 1
        request = Request(spec, role, Phase.WAITING, arrival=self._arrivals)
        self._book.open(request)
        self._waiting.add(spec.generation, request.urgency)
        self._blocked_at = None

    def reserve(self, spec: EngineRequest) -> Reservation | Wait | Refuse:
        """Blocks for prompt and output, and a receive slot. Asked again: the same answer."""
        if (answer := self._reservations.known(spec.generation)) is not None:
            return answer
        if (why := self._never_fits(spec.capacity_tokens)) is not None:
            self._reservations.forget(spec.generation)
            return Refuse(TooLong.code, why)
        self._arrivals += 1
        return self._reservations.reserve(spec, self._arrivals)

    def cancel(self, generation: Generation) -> bool:
        """Nothing more is produced; Released follows when everything is back. False if unknown."""
        self._reservations.forget(generation)
        request = self._book.get(generation)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            self._waiting.remove(generation)
            self._blocked_at = None  # it may have been the one that nobody may pass
        self._book.let_go(request)
        return True

    def cancel_all(self) -> None:
        self._reservations.forget_all()
        for request in list(self._book.live()):
            self.cancel(request.generation)

    def admit(self) -> list[PrefillAdmitted]:
        """Received prompts take slots first; then suspended requests come back; then waiting ones
        go in while blocks and slots last."""
        self._activate_received()
        self._room.resume()
        admitted: list[PrefillAdmitted] = []
        while self._waiting and self._blocked_at != self._epochs():
            chosen = None
            if self._slots.capacity().free_slots > 0:
                chosen = self._waiting.next_to_admit(self._fits, self._room.most_urgent_suspended())
            if chosen is None:
                self._blocked_at = self._epochs()
                break
            request = self._start(chosen)
            if request.role is Role.PREFILL:
                allocation = self._kv.allocation(chosen)
                admitted.append(
                    PrefillAdmitted(chosen, allocation.tables, allocation.cached_tokens)
                )
        return admitted

    def _epochs(self) -> tuple[int, int]:
        """What must move before someone who was blocked can be let in."""
        return self._kv.epoch, self._slots.capacity().epoch

    def _fits(self, generation: Generation) -> bool:
        request = self._waiting_request(generation)
        tokens, _ = self._room.first_tokens(request.spec, request.role)
        return self._kv.fits(tokens, request.spec.prompt, self._room.watermark_blocks())

    def _start(self, generation: Generation) -> Request:
        request = self._waiting_request(generation)
        spec, sends = request.spec, request.role is Role.PREFILL
        leases = (Lease.OWNER, Lease.SEND) if sends else (Lease.OWNER,)
        tokens, funded = self._room.first_tokens(spec, request.role)
        allocation = self._kv.allocate(generation, tokens, leases, spec.prompt)
        request.slot = self._slots.admit(generation)
        if allocation is None or request.slot is None:
            raise InvariantBroken(f"generation {generation} was chosen and does not fit")
        self._book.fund(request, funded)
        request.prompt_submitted = allocation.cached_tokens
        request.stamps.append(Stamp("admitted", self._clock.wall_s()))
        self._book.move(request, Phase.PREFILLING)
        return request

    def _waiting_request(self, generation: Generation) -> Request:
        request = self._book.get(generation)
        assert request is not None, f"generation {generation} waits and is not live"
        return request

    def _activate_received(self) -> None:
        while self.received:
            request = min(self.received, key=lambda request: request.urgency)
            if request.phase is Phase.RECEIVED:
                request.slot = self._slots.admit(request.generation)
                if request.slot is None:
                    return
                self._book.move(request, Phase.NEEDS_CODA)
                counts = request.prefill_tokens, request.recurrent_loops
                self._book.emit(Activated(request.generation, *counts))
            self.received.remove(request)

    def _never_fits(self, tokens: int) -> str | None:
        need, there_are = self._kv.blocks_for(tokens), self._kv.total_blocks()
        if tokens > self._max_positions:
            return f"{tokens} positions, the model has {self._max_positions}"
        if need > there_are:
            return f"{tokens} positions need {need} blocks, the pool has {there_are}"
        return None


def _all_tokens(spec: EngineRequest, role: Role) -> int:
    """Positions that a queued request may come to need: P never decodes."""
    return spec.context_tokens if role is Role.PREFILL else spec.capacity_tokens
