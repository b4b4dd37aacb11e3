"""Worker-side half of a connector: which WRITEs wait, which are out, and until when.

Owns the queue, the bytes in flight, the deadlines and the peers' pools. Never touches a tensor or a
message; which chunks make a request complete is the scheduler side's business.
A sequence is posted at most once, and one that was posted is reported ended only by the transport.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..runtime.errors import ProtocolError
from ..runtime.interfaces import Clock
from ..runtime.plans import Arrival, SendFailure, SendOrder, SendProgress, TransferFeedback
from ..runtime.types import Generation
from .geometry import PoolDescription, check_compatible, hidden_entry, kv_bytes, kv_entries
from .transport import Finished, Notice, Ticket, Transport, Write, pack_notice, unpack_notice


@dataclass(frozen=True)
class Queued:
    order: SendOrder
    write: Write
    num_bytes: int


@dataclass
class Flight:
    """A posted WRITE. late: its deadline passed; it counts as stuck, no more as in flight."""

    item: Queued
    deadline_s: float
    late: bool = False


@dataclass
class Counts:
    bytes_posted: int = 0
    bytes_sent: int = 0
    writes_posted: int = 0
    writes_done: int = 0
    writes_failed: int = 0
    notifications_received: int = 0
    notifications_malformed: int = 0


@dataclass
class Outbox:
    """What the next poll reports."""

    posted: list[SendProgress] = field(default_factory=list)
    sent: list[SendProgress] = field(default_factory=list)
    failed: list[SendFailure] = field(default_factory=list)


class WorkerConnector:
    """The WorkerConnector Protocol, for both roles: a target is a worker that this one writes to,
    a source one that writes here."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Clock,
        max_inflight_bytes: int,
        transfer_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._max_inflight_bytes = max_inflight_bytes
        self._transfer_timeout_s = transfer_timeout_s
        self._targets: dict[str, PoolDescription] = {}
        self._leaving: set[str] = set()  # removed targets whose handles have not all ended
        self._sources: dict[str, bytes] = {}  # metadata of the agent that faces each
        self._queue: deque[Queued] = deque()
        self._flights: dict[Ticket, Flight] = {}
        self._inflight_bytes = 0
        self._next_sequence: dict[Generation, int] = {}
        self._outbox = Outbox()
        self._counts = Counts()

    @property
    def pool(self) -> PoolDescription:
        return self._transport.pool

    def agent_metadata(self) -> bytes:
        """Of the agent that writes from here: what a target needs to accept this worker."""
        return self._transport.agent_metadata()

    def add_peer(self, incarnation: str, metadata: bytes, pool: PoolDescription) -> None:
        """Pair with a target. metadata: what its accept_peer answered."""
        check_compatible(self.pool, pool)
        if incarnation not in self._targets:
            self._transport.add_target(incarnation, metadata, pool)
            self._targets[incarnation] = pool

    def accept_peer(self, incarnation: str, metadata: bytes, pool: PoolDescription) -> bytes:
        """Pair with a source; the metadata of the agent made for it. Asked again, same answer."""
        check_compatible(self.pool, pool)
        if incarnation not in self._sources:
            self._sources[incarnation] = self._transport.add_source(incarnation, metadata)
        return self._sources[incarnation]

    def remove_peer(self, incarnation: str) -> None:
        """Queued orders to it fail; posted ones run to their end. An agent that faced it is gone
        when this returns."""
        if self._sources.pop(incarnation, None) is not None:
            self._transport.remove_source(incarnation)
        if self._targets.pop(incarnation, None) is not None:
            self._leaving.add(incarnation)
            gone = [item for item in self._queue if item.order.peer == incarnation]
            self._queue = deque(item for item in self._queue if item.order.peer != incarnation)
            for item in gone:
                self._fail(item.order, f"decode worker {incarnation} is gone", terminal=True)
            self._let_targets_go()

    def post(self, orders: Sequence[SendOrder]) -> None:
        """Queue orders and start what the bound allows. A wrong block number or a repeated sequence
        raises before any of them is queued; a peer that has gone fails its orders."""
        items = [self._checked(order) for order in orders if order.peer in self._targets]
        self._claim_sequences(orders)
        self._queue.extend(items)
        for order in orders:
            if order.peer not in self._targets:
                self._fail(order, f"no pair with decode worker {order.peer}", terminal=True)
        self._start_queued()

    def poll(self) -> TransferFeedback:
        for finished in self._transport.poll_finished():
            self._settle(finished)
        self._mark_late()
        self._let_targets_go()
        self._start_queued()
        arrived = self._arrivals()
        out, self._outbox = self._outbox, Outbox()
        return TransferFeedback(tuple(out.posted), tuple(out.sent), tuple(out.failed), arrived)

    def outstanding(self) -> bool:
        """Whether WRITEs are queued or posted, or feedback waits. Says nothing about receiving."""
        return bool(self._queue or self._flights or self._outbox.posted or self._outbox.failed)

    def in_flight(self, generation: Generation) -> int:
        """Posted WRITEs of this generation that have not ended, late ones included."""
        return sum(f.item.order.generation == generation for f in self._flights.values())

    def drop_queued(self, generation: Generation) -> tuple[int, ...]:
        """Take back what is not posted yet; posted WRITEs run to their end."""
        dropped = [q.order.sequence for q in self._queue if q.order.generation == generation]
        self._queue = deque(q for q in self._queue if q.order.generation != generation)
        return tuple(dropped)

    def forget(self, generation: Generation) -> None:
        """Nothing more will be ordered for this generation, which has nothing queued or posted."""
        self._next_sequence.pop(generation, None)

    def statistics(self) -> dict[str, float]:
        late = sum(flight.late for flight in self._flights.values())
        return {
            **vars(self._counts),
            "writes_queued": len(self._queue),
            "handles_in_flight": len(self._flights) - late,
            "handles_stuck": late,
            "bytes_in_flight": self._inflight_bytes,
        }

    def close(self) -> None:
        self._queue.clear()
        self._transport.close()

    def _checked(self, order: SendOrder) -> Queued:
        mine, theirs = self.pool, self._targets[order.peer]
        if order.depth is None:
            local = [hidden_entry(mine, order.hidden_slot)]
            remote = [hidden_entry(theirs, order.peer_hidden_slot)]
            num_bytes = mine.geometry.hidden_bytes
        else:
            local = kv_entries(mine, order.range, order.blocks)
            remote = kv_entries(theirs, order.range, order.peer_blocks)
            num_bytes = kv_bytes(mine.geometry, order.range)
        notice = pack_notice(Notice(order.generation, order.allocation, order.sequence))
        return Queued(order, Write(order.peer, local, remote, notice), num_bytes)

    def _claim_sequences(self, orders: Sequence[SendOrder]) -> None:
        """Sequences of a generation only rise, so that none can be posted twice."""
        claimed: dict[Generation, int] = {}
        for order in orders:
            known = self._next_sequence.get(order.generation, 0)
            if order.sequence < claimed.get(order.generation, known):
                raise ProtocolError(
                    f"generation {order.generation}: sequence {order.sequence} was ordered before"
                )
            claimed[order.generation] = order.sequence + 1
        self._next_sequence.update(claimed)

    def _start_queued(self) -> None:
        """In order, within the bound; a chunk larger than the bound goes alone."""
        while self._queue:
            num_bytes = self._queue[0].num_bytes
            if self._inflight_bytes and self._inflight_bytes + num_bytes > self._max_inflight_bytes:
                return
            item = self._queue.popleft()
            self._inflight_bytes += num_bytes
            self._counts.bytes_posted += num_bytes
            self._counts.writes_posted += 1
            deadline_s = self._clock.now_s() + self._transfer_timeout_s
            self._flights[self._transport.write(item.write)] = Flight(item, deadline_s)
            self._outbox.posted.append(self._progress(item))

    def _settle(self, finished: Finished) -> None:
        flight = self._flights.pop(finished.ticket)
        order = flight.item.order
        if not flight.late:
            self._inflight_bytes -= flight.item.num_bytes
        if flight.late:
            end = finished.error or "done"
            self._fail(order, f"ended ({end}) after its deadline", terminal=True)
        elif finished.error is not None:
            self._counts.writes_failed += 1
            self._fail(order, finished.error, terminal=True)
        else:
            self._counts.writes_done += 1
            self._counts.bytes_sent += flight.item.num_bytes
            self._outbox.sent.append(self._progress(flight.item))

    def _mark_late(self) -> None:
        now_s = self._clock.now_s()
        for flight in self._flights.values():
            if not flight.late and now_s >= flight.deadline_s:
                flight.late = True
                self._inflight_bytes -= flight.item.num_bytes
                self._counts.writes_failed += 1
                reason = f"no end within {self._transfer_timeout_s:g} s"
                self._fail(flight.item.order, reason, terminal=False)

    def _let_targets_go(self) -> None:
        busy = {flight.item.order.peer for flight in self._flights.values()}
        for target in self._leaving - busy:
            self._leaving.discard(target)
            self._transport.remove_target(target)

    def _arrivals(self) -> tuple[Arrival, ...]:
        arrived: list[Arrival] = []
        for told in self._transport.poll_notifications():
            notice = unpack_notice(told.payload)
            if notice is None or told.sender != told.source:
                self._counts.notifications_malformed += 1
                continue
            self._counts.notifications_received += 1
            at_s = self._clock.wall_s()
            arrived.append(Arrival(notice.generation, notice.allocation, notice.sequence, at_s))
        return tuple(arrived)

    def _progress(self, item: Queued) -> SendProgress:
        order = item.order
        at_s = self._clock.wall_s()
        return SendProgress(order.generation, order.sequence, item.num_bytes, at_s)

    def _fail(self, order: SendOrder, reason: str, *, terminal: bool) -> None:
        self._outbox.failed.append(
            SendFailure(order.generation, order.sequence, reason, terminal=terminal)
        )
