"""WRITEs on their way out: which wait, which are posted, how many bytes may fly, and until when.

Owns the queue, the bytes in flight, the deadlines and what the next poll reports. Knows no block
and no peer's pool: it is given checked WRITEs.
A sequence is posted at most once, and one that was posted ends only when the transport says so.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..runtime.errors import ProtocolError
from ..runtime.interfaces import Clock
from ..runtime.plans import SendFailure, SendOrder, SendProgress
from ..runtime.types import Generation
from .transport import Finished, Ticket, Transport, Write


@dataclass(frozen=True)
class Outgoing:
    """One order, checked: what it writes and how much that is."""

    order: SendOrder
    write: Write
    num_bytes: int


@dataclass
class Flight:
    """A posted WRITE. late: its deadline passed; it counts as stuck, no more as in flight."""

    item: Outgoing
    deadline_s: float
    late: bool = False


@dataclass
class Report:
    """What has happened since it was last taken."""

    posted: list[SendProgress] = field(default_factory=list)
    sent: list[SendProgress] = field(default_factory=list)
    failed: list[SendFailure] = field(default_factory=list)


@dataclass
class Counts:
    bytes_posted: int = 0
    bytes_sent: int = 0
    writes_posted: int = 0
    writes_done: int = 0
    writes_failed: int = 0


class Outbox:
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
        self._queue: deque[Outgoing] = deque()
        self._flights: dict[Ticket, Flight] = {}
        self._inflight_bytes: Counter[str] = Counter()  # by target
        self._next_sequence: dict[Generation, int] = {}
        self._report = Report()
        self._counts = Counts()

    def claim_sequences(self, orders: Sequence[SendOrder]) -> None:
        """Sequences of a generation only rise, so that none can be posted twice. Raises before any
        is claimed."""
        claimed: dict[Generation, int] = {}
        for order in orders:
            known = self._next_sequence.get(order.generation, 0)
            if order.sequence < claimed.get(order.generation, known):
                raise ProtocolError(
                    f"generation {order.generation}: sequence {order.sequence} was ordered before"
                )
            claimed[order.generation] = order.sequence + 1
        self._next_sequence.update(claimed)

    def queue(self, items: Sequence[Outgoing]) -> None:
        self._queue.extend(items)

    def fail_unposted(self, order: SendOrder, reason: str) -> None:
        self._fail(order, reason, terminal=True)

    def fail_queued(self, target: str, reason: str) -> None:
        """Fail what waits for this target; posted WRITEs run to their end."""
        gone = [item for item in self._queue if item.write.target == target]
        self._queue = deque(item for item in self._queue if item.write.target != target)
        for item in gone:
            self._fail(item.order, reason, terminal=True)

    def drop_queued(self, generation: Generation) -> tuple[int, ...]:
        dropped = [q.order.sequence for q in self._queue if q.order.generation == generation]
        self._queue = deque(q for q in self._queue if q.order.generation != generation)
        return tuple(dropped)

    def start_queued(self) -> None:
        """In order within each target's bound, so that a slow target holds up only itself; a chunk
        larger than the bound goes alone."""
        waiting: deque[Outgoing] = deque()
        full: set[str] = set()
        for item in self._queue:
            target, flying = item.write.target, self._inflight_bytes[item.write.target]
            if target in full or (flying and flying + item.num_bytes > self._max_inflight_bytes):
                full.add(target)
                waiting.append(item)
            else:
                self._start(item)
        self._queue = waiting

    def _start(self, item: Outgoing) -> None:
        self._inflight_bytes[item.write.target] += item.num_bytes
        self._counts.bytes_posted += item.num_bytes
        self._counts.writes_posted += 1
        deadline_s = self._clock.now_s() + self._transfer_timeout_s
        self._flights[self._transport.write(item.write)] = Flight(item, deadline_s)
        self._report.posted.append(self._progress(item))

    def _landed(self, item: Outgoing) -> None:
        self._inflight_bytes[item.write.target] -= item.num_bytes
        self._inflight_bytes = +self._inflight_bytes

    def collect(self) -> None:
        """Take in what has ended, and mark what should have."""
        for finished in self._transport.poll_finished():
            self._settle(finished)
        now_s = self._clock.now_s()
        for flight in self._flights.values():
            if not flight.late and now_s >= flight.deadline_s:
                flight.late = True
                self._landed(flight.item)
                self._counts.writes_failed += 1
                reason = f"no end within {self._transfer_timeout_s:g} s"
                self._fail(flight.item.order, reason, terminal=False)

    def take_report(self) -> Report:
        report, self._report = self._report, Report()
        return report

    def outstanding(self) -> bool:
        """Whether anything waits, flies, or is still to be reported."""
        return bool(self._queue or self._flights or self._report.posted or self._report.failed)

    def in_flight(self, generation: Generation) -> int:
        return sum(f.item.order.generation == generation for f in self._flights.values())

    def busy_targets(self) -> set[str]:
        return {flight.item.write.target for flight in self._flights.values()}

    def forget(self, generation: Generation) -> None:
        self._next_sequence.pop(generation, None)

    def clear_queue(self) -> None:
        self._queue.clear()

    def statistics(self) -> dict[str, float]:
        late = sum(flight.late for flight in self._flights.values())
        return {
            **vars(self._counts),
            "writes_queued": len(self._queue),
            "handles_in_flight": len(self._flights) - late,
            "handles_stuck": late,
            "bytes_in_flight": self._inflight_bytes.total(),
        }

    def _settle(self, finished: Finished) -> None:
        flight = self._flights.pop(finished.ticket)
        item = flight.item
        if flight.late:
            end = finished.error or "done"
            self._fail(item.order, f"ended ({end}) after its deadline", terminal=True)
            return
        self._landed(item)
        if finished.error is not None:
            self._counts.writes_failed += 1
            self._fail(item.order, finished.error, terminal=True)
        else:
            self._counts.writes_done += 1
            self._counts.bytes_sent += item.num_bytes
            self._report.sent.append(self._progress(item))

    def _progress(self, item: Outgoing) -> SendProgress:
        order = item.order
        at_s = self._clock.wall_s()
        return SendProgress(order.generation, order.sequence, item.num_bytes, at_s)

    def _fail(self, order: SendOrder, reason: str, *, terminal: bool) -> None:
        self._report.failed.append(
            SendFailure(order.generation, order.sequence, reason, terminal=terminal)
        )
