"""The live requests of one engine, and the single place where a request ends.

Owned and driven by the Scheduler; nobody else writes it. Decides nothing about what runs.
A request ends once: its owner lease goes at once, its slots and Released follow when the last lease
that others hold has ended too.
"""

from collections.abc import ValuesView
from typing import Protocol

from .errors import InvariantBroken, ProtocolError
from .events import EngineEvent, Released, RequestFailed
from .interfaces import Capacity, SuspendReceipt
from .kv_manager import KVManager, Lease
from .request import Phase, Request, Role
from .story import Story
from .types import BlockTables, Generation

DECODING = frozenset(
    {
        *(Phase.NEEDS_CODA, Phase.NEEDS_PRELUDE, Phase.NEEDS_LOOP),
        *(Phase.AWAITS_SCORE, Phase.AWAITS_RESULT),
    }
)
EXECUTING = DECODING | {Phase.PREFILLING}


class Slots(Protocol):
    """The part of the Executor that hands out rows of hidden[]."""

    def capacity(self) -> Capacity: ...
    def admit(self, generation: Generation) -> int | None: ...
    def admit_receive(self, generation: Generation) -> int | None: ...
    def end_receive(self, generation: Generation) -> None: ...
    def release(self, generation: Generation) -> None: ...
    def complete(self, generation: Generation) -> None: ...
    def suspend(self, generation: Generation, tables: BlockTables) -> SuspendReceipt: ...
    def restore(self, generation: Generation, tables: BlockTables) -> int | None: ...
    def discard(self, generation: Generation) -> None: ...


class RequestBook:
    def __init__(self, kv: KVManager, slots: Slots) -> None:
        self._kv = kv
        self._slots = slots
        self._story = Story()
        self._live: dict[Generation, Request] = {}
        self._executing: dict[Generation, Request] = {}
        self._suspended: dict[Generation, Request] = {}
        self._events: list[EngineEvent] = []
        self._withdrawn: set[Generation] = set()
        self._funded_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def withdrawn_slots(self) -> int:
        """Receive slots of requests that ended while a peer may still write there."""
        return len(self._withdrawn)

    def live(self) -> ValuesView[Request]:
        return self._live.values()

    def executing(self) -> ValuesView[Request]:
        """Requests that passes are planned for, in the order in which they started."""
        return self._executing.values()

    def suspended(self) -> ValuesView[Request]:
        return self._suspended.values()

    @property
    def funded_bytes(self) -> int:
        """Snapshot bytes that are set aside for live requests."""
        return self._funded_bytes

    def get(self, generation: Generation) -> Request | None:
        return self._live.get(generation)

    def story(self, generation: Generation) -> str:
        return self._story.last(generation)

    def open(self, request: Request) -> None:
        if request.generation in self._live:
            raise ProtocolError(f"generation {request.generation} is live already")
        self._live[request.generation] = request
        self._story.note(request.generation, request.phase)

    def move(self, request: Request, to: Phase) -> None:
        request.move(to)
        self._story.note(request.generation, to)
        if to in EXECUTING:
            self._executing[request.generation] = request
        else:
            self._executing.pop(request.generation, None)

    def fund(self, request: Request, num_bytes: int) -> None:
        """Set snapshot bytes aside for it, until it ends."""
        self._funded_bytes += num_bytes - request.funded
        request.funded = num_bytes

    def suspend(self, request: Request) -> None:
        """Its blocks and its slot are taken; a snapshot keeps what they held."""
        request.slot, request.suspended_in = None, request.phase
        self.move(request, Phase.SUSPENDED)
        self._suspended[request.generation] = request

    def resume(self, request: Request, slot: int) -> None:
        """It goes on where it was suspended."""
        assert request.suspended_in is not None, f"{request.generation} was never suspended"
        del self._suspended[request.generation]
        request.slot = slot
        self.move(request, request.suspended_in)
        request.suspended_in = None

    def emit(self, event: EngineEvent) -> None:
        self._events.append(event)

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def fail(self, request: Request, code: str, message: str) -> None:
        """The request ends with a named error; without effect if it is over already."""
        if not request.over:
            self.emit(RequestFailed(request.generation, code, message))
            self.let_go(request)

    def let_go(self, request: Request) -> None:
        """Nothing more is planned for it. It ends now, or when the last lease of others ends."""
        if request.over:
            return
        leases = self._kv.leases(request.generation)
        if leases <= {Lease.OWNER, Lease.QUARANTINE}:
            self._end(request)
        else:
            self._kv.end_lease(request.generation, Lease.OWNER)
            self.move(request, Phase.CANCELLING)

    def settle(self, request: Request) -> None:
        """Call after a lease has ended: a request that only waited for it ends."""
        others = self._kv.leases(request.generation) - {Lease.QUARANTINE}
        if request.phase is Phase.CANCELLING and not others:
            self._end(request)

    def _end(self, request: Request) -> None:
        generation = request.generation
        if Lease.OWNER in self._kv.leases(generation):
            self._kv.end_lease(generation, Lease.OWNER)
        if self._suspended.pop(generation, None) is not None:
            self._slots.discard(generation)
            self._kv.forget(generation)
        self.move(request, Phase.ENDED)
        self._give_slots_back(request)
        self.fund(request, 0)
        del self._live[generation]
        self.emit(Released(generation, self._kv.quarantined_blocks(generation)))

    def _give_slots_back(self, request: Request) -> None:
        if request.withdrawn:
            self._withdrawn.add(request.generation)
        elif request.receive_slot is not None:
            self._slots.end_receive(request.generation)
        if request.slot is not None and request.completed:
            self._slots.complete(request.generation)
        elif request.slot is not None:
            self._slots.release(request.generation)

    def end_withdrawn(self, generation: Generation) -> None:
        """Nobody writes into its receive slot any more."""
        self._withdrawn.remove(generation)
        self._slots.end_receive(generation)

    def check(self) -> None:
        """Phases, leases and slots of every live request agree; so do the bytes set aside."""
        if self._funded_bytes != sum(request.funded for request in self._live.values()):
            raise InvariantBroken(f"{self._funded_bytes} snapshot bytes set aside, not the sum")
        for request in self._live.values():
            leases = self._kv.leases(request.generation)
            if not _agrees(request, leases):
                raise InvariantBroken(
                    f"generation {request.generation} ({request.role}, {request.phase}) holds "
                    f"{sorted(leases)}, slot {request.slot}, receive slot {request.receive_slot}; "
                    f"story: {self.story(request.generation)}"
                )


def _agrees(request: Request, leases: frozenset[Lease]) -> bool:
    match request.phase:
        case Phase.WAITING:
            return not leases and request.slot is None
        case Phase.PREFILLING | Phase.SENDING:
            return request.slot is not None and leases - {Lease.PASS} == _held(request)
        case Phase.RECEIVING:
            return leases == {Lease.OWNER, Lease.RECEIVE} and request.receive_slot is not None
        case Phase.RECEIVED:
            return leases == {Lease.OWNER} and request.receive_slot is not None
        case Phase.NEEDS_CODA | Phase.NEEDS_PRELUDE | Phase.NEEDS_LOOP:
            return leases - {Lease.PASS} == {Lease.OWNER} and request.slot is not None
        case Phase.AWAITS_SCORE | Phase.AWAITS_RESULT:
            return leases == _held(request) | {Lease.PASS} and request.slot is not None
        case Phase.SUSPENDED:
            return not leases and request.slot is None and request.receive_slot is None
        case Phase.CANCELLING:
            return bool(leases - {Lease.QUARANTINE}) and Lease.OWNER not in leases
        case Phase.ENDED:
            return False


def _held(request: Request) -> frozenset[Lease]:
    """What a request that executes holds whether or not a pass is in flight."""
    sends = request.role is Role.PREFILL
    return frozenset({Lease.OWNER, Lease.SEND} if sends else {Lease.OWNER})
