"""D's promises: blocks and a receive slot for prompts that a peer will write.

The Scheduler's helper, called by the intake alone. Sends nothing and moves no request on.
Asked again, the answer is the same. Whoever must wait is remembered, so that smaller ones cannot
pass it for ever.
"""

from .admission import ReservationLine
from .errors import InvariantBroken
from .events import Refuse, Reservation, Wait
from .interfaces import Clock
from .kv_manager import KVManager, Lease
from .preemption import Urgency
from .request import Phase, Request, Role
from .request_book import RequestBook, Slots
from .room import Room
from .types import EngineRequest, Generation


class Reservations:
    def __init__(
        self,
        *,
        book: RequestBook,
        kv: KVManager,
        slots: Slots,
        room: Room,
        clock: Clock,
        line: ReservationLine,
    ) -> None:
        self._book = book
        self._kv = kv
        self._slots = slots
        self._room = room
        self._clock = clock
        self._line = line

    @property
    def bypasses(self) -> int:
        return self._line.bypasses

    def forget(self, generation: Generation) -> None:
        """It will not be asked for again."""
        self._line.forget(generation)

    def forget_all(self) -> None:
        self._line.clear()

    def known(self, generation: Generation) -> Reservation | Refuse | None:
        """What was answered before, or None."""
        known = self._book.get(generation)
        if known is None:
            return None
        if known.reservation is None or known.over:
            return Refuse("protocol", f"generation {generation} is {known.phase} here")
        return known.reservation

    def reserve(self, spec: EngineRequest, arrival: int) -> Reservation | Wait:
        """For a generation that is not live and could fit."""
        generation, now_s = spec.generation, self._clock.now_s()
        urgency = self._line.urgency(generation) or (spec.priority, arrival)
        why = self._must_wait(spec, urgency, now_s)
        if why is not None:
            self._line.wait(generation, urgency, now_s)
            return Wait(why)
        self._line.granted(generation, urgency)
        return self._grant(spec, urgency[1])

    def _must_wait(self, spec: EngineRequest, urgency: Urgency, now_s: float) -> str | None:
        capacity = self._slots.capacity()
        if capacity.free_receive_slots < 1:
            return "every receive slot is taken"
        if capacity.unsettled:
            return "blocks that were just freed are still being read"
        suspended = self._room.most_urgent_suspended()
        if suspended is not None and suspended < urgency:
            return "suspended requests come back first"
        if self._line.held_back(urgency, now_s):
            return "an earlier reservation was passed as often as is allowed"
        tokens, _ = self._room.first_tokens(spec, Role.DECODE)
        if not self._kv.fits(tokens, spec.prompt, self._room.watermark_blocks()):
            return f"{self._kv.blocks_for(tokens)} blocks are not free"
        return None

    def _grant(self, spec: EngineRequest, arrival: int) -> Reservation:
        generation = spec.generation
        tokens, funded = self._room.first_tokens(spec, Role.DECODE)
        leases = (Lease.OWNER, Lease.RECEIVE)
        allocation = self._kv.allocate(generation, tokens, leases, spec.prompt)
        slot = self._slots.admit_receive(generation)
        if allocation is None or slot is None:
            raise InvariantBroken("blocks and a slot were counted as free and then were not")
        reservation = Reservation(
            allocation=allocation.id,
            tables=allocation.tables,
            hidden_slot=slot,
            cached_tokens=allocation.cached_tokens,
        )
        request = Request(spec, Role.DECODE, Phase.RECEIVING, arrival=arrival)
        request.receive_slot, request.reservation = slot, reservation
        self._book.open(request)
        self._book.fund(request, funded)
        return reservation
