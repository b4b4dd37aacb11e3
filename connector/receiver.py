"""D's handoff state: what of each reservation has arrived, and when its memory may be used again.

Pure: events in; messages and handoff events out. Never touches NIXL, sockets or tensors. A request
is received only on complete evidence: commit known, every sequence notified, ranges cover exactly
what was reserved, the allocation is the current one. Blocks of an unfinished receive come back only
when the writer is known to have ended; else they are quarantined, never reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ..runtime.errors import ProtocolError
from ..runtime.events import Reservation
from ..runtime.interfaces import Clock, HandoffEvent, Quarantined, ReceiveComplete, ReceiveEnded
from ..runtime.plans import Arrival, FinishedRange, SendOrder, TransferFeedback
from ..runtime.types import BlockTables, Generation, KVGeometry, Stamp, TokenRange
from .handoff import ClosedGenerations, coverage_fault
from .messages import Ack, Chunk, Commit, DecodeToPrefill, Stop, WriterEnded

REPEAT_S = 0.5  # an unanswered Stop is sent again after this
SETTLE_S = 10.0  # a writer that ended, and still something it posted has not arrived: give up then


class Phase(Enum):
    RECEIVING = auto()
    STOPPING = auto()  # will not complete; waits for proof that the writer has ended
    RECEIVED = auto()
    ENDED = auto()  # nothing arrives any more and nothing was activated
    QUARANTINED = auto()  # no proof will come in this process's life


MOVES = {
    Phase.RECEIVING: {Phase.RECEIVED, Phase.STOPPING, Phase.ENDED, Phase.QUARANTINED},
    Phase.STOPPING: {Phase.ENDED, Phase.QUARANTINED},
    Phase.RECEIVED: set(),
    Phase.ENDED: set(),
    Phase.QUARANTINED: set(),
}


@dataclass
class ReceiveRecord:
    generation: Generation
    peer: str
    allocation: int
    missing: TokenRange  # positions that D lacks and P must send
    phase: Phase = Phase.RECEIVING
    arrived: dict[int, float] = field(default_factory=dict)  # sequence -> when
    commit: Commit | None = None
    writer_posted: int | None = None  # fact: the writer ended after this many sequences
    writer_ended_s: float = 0.0
    told_at_s: float = 0.0
    stamps: list[Stamp] = field(default_factory=list)

    def move(self, to: Phase) -> None:
        if to not in MOVES[self.phase]:
            raise ProtocolError(f"generation {self.generation}: {self.phase.name} -> {to.name}")
        self.phase = to

    def all_arrived(self, sequences: int) -> bool:
        return all(sequence in self.arrived for sequence in range(sequences))

    def writer_done(self) -> bool:
        """Whether P is known to write no more into this reservation."""
        if self.writer_posted is not None:
            return self.all_arrived(self.writer_posted)
        return self.commit is not None and self.all_arrived(len(self.commit.chunks))


class Receiver:
    """Scheduler-side connector of a decode worker (the SchedulerConnector Protocol)."""

    def __init__(self, geometry: KVGeometry, clock: Clock, *, worker: str) -> None:
        self._geometry = geometry
        self._clock = clock
        self._worker = worker
        self._records: dict[Generation, ReceiveRecord] = {}
        self._messages: list[tuple[str, DecodeToPrefill]] = []
        self._events: list[HandoffEvent] = []
        self._failures: list[tuple[Generation, str]] = []
        self._stamps: dict[Generation, tuple[Stamp, ...]] = {}
        self.closed: ClosedGenerations[Phase] = ClosedGenerations()
        self.late = 0  # messages and notifications about generations that are not live here

    def open(
        self, generation: Generation, peer: str, reservation: Reservation, prompt_tokens: int
    ) -> None:
        """Blocks were reserved: `peer` may write them from now on."""
        if generation in self._records or generation in self.closed:
            raise ProtocolError(f"generation {generation} was opened before")
        record = ReceiveRecord(
            generation,
            peer,
            reservation.allocation,
            TokenRange(reservation.cached_tokens, prompt_tokens),
        )
        self._records[generation] = record
        self._stamp(record, "reserved")

    def on_feedback(self, feedback: TransferFeedback) -> None:
        for arrival in feedback.arrived:
            self._on_arrival(arrival)

    def on_chunk(self, peer: str, chunk: Chunk) -> None:
        """A hint only: it says that a notification is on its way. Commit repeats all of it."""
        if self._live(peer, chunk.generation) is None:
            self.late += 1

    def on_commit(self, peer: str, commit: Commit) -> None:
        record = self._live(peer, commit.generation)
        if record is None:
            self._answer_closed(peer, commit.generation)
        elif commit.allocation != record.allocation:
            self._fail(record, f"commit names allocation {commit.allocation}")
        elif record.commit is None:
            fault = coverage_fault(commit.chunks, self._geometry.num_planes, record.missing)
            record.commit = commit
            if fault is not None:
                self._fail(record, f"commit does not cover the reservation: {fault}")
            self._advance(record)

    def on_writer_ended(self, peer: str, ended: WriterEnded) -> None:
        record = self._live(peer, ended.generation)
        if record is None:
            self.late += 1
            return
        if record.writer_posted is None:
            record.writer_ended_s = self._clock.now_s()
        record.writer_posted = ended.posted
        if record.phase is Phase.RECEIVING and not record.commit:
            self._fail(record, "the prefill worker stopped before it had sent everything")
        self._advance(record)

    def cancel(self, generation: Generation, *, writer_never_started: bool) -> None:
        """The request is not wanted any more. Its blocks come back when the writer has ended."""
        record = self._records.get(generation)
        if record is None:
            return
        if writer_never_started:
            self._close(record, Phase.ENDED, ReceiveEnded(generation))
            return
        self._stop(record)
        self._advance(record)

    def on_peer_gone(self, peer: str) -> None:
        """That prefill incarnation is dead. What is complete stays; the rest is withdrawn, because
        bytes of a dead writer may still be on their way."""
        for record in [r for r in self._records.values() if r.peer == peer]:
            self._advance(record)
            if record.phase in (Phase.RECEIVING, Phase.STOPPING):
                if record.phase is Phase.RECEIVING:
                    reason = f"prefill worker {peer} died before everything had arrived"
                    self._failures.append((record.generation, reason))
                self._close(record, Phase.QUARANTINED, Quarantined(record.generation))

    def tick(self) -> None:
        """Repeat what was not answered; withdraw what will never be proved."""
        now = self._clock.now_s()
        for record in list(self._records.values()):
            if record.phase is not Phase.STOPPING:
                continue
            if record.writer_posted is None:
                if now - record.told_at_s >= REPEAT_S:
                    self._send_stop(record)
            elif now - record.writer_ended_s >= SETTLE_S:
                self._close(record, Phase.QUARANTINED, Quarantined(record.generation))

    def expecting(self) -> bool:
        """Whether notifications may still come."""
        return bool(self._records)

    def on_prefill_admitted(
        self, generation: Generation, tables: BlockTables, hidden_slot: int
    ) -> None:
        raise ProtocolError(f"generation {generation}: a decode worker computes no prompt")

    def on_ranges_finished(self, ranges: Sequence[FinishedRange]) -> None:
        raise ProtocolError("a decode worker computes no prompt")

    def take_orders(self) -> list[SendOrder]:
        return []

    def take_events(self) -> list[HandoffEvent]:
        events, self._events = self._events, []
        return events

    def take_messages(self) -> list[tuple[str, DecodeToPrefill]]:
        """(prefill incarnation, message) pairs to send, in order."""
        messages, self._messages = self._messages, []
        return messages

    def take_failures(self) -> list[tuple[Generation, str]]:
        """Generations that cannot complete, with the reason; their release comes later."""
        failures, self._failures = self._failures, []
        return failures

    def take_stamps(self, generation: Generation) -> tuple[Stamp, ...]:
        """The story of a received or ended generation, once."""
        return self._stamps.pop(generation, ())

    def phase(self, generation: Generation) -> Phase | None:
        record = self._records.get(generation)
        return record.phase if record else None

    def _live(self, peer: str, generation: Generation) -> ReceiveRecord | None:
        record = self._records.get(generation)
        return record if record is not None and record.peer == peer else None

    def _on_arrival(self, arrival: Arrival) -> None:
        record = self._records.get(arrival.generation)
        if record is None or arrival.allocation != record.allocation:
            self.late += 1
            return
        record.arrived.setdefault(arrival.sequence, arrival.at_s)
        self._advance(record)

    def _answer_closed(self, peer: str, generation: Generation) -> None:
        self.late += 1
        if self.closed.outcome(generation) is Phase.RECEIVED:
            self._messages.append((peer, Ack(generation=generation)))
        else:
            self._messages.append((peer, Stop(generation=generation)))

    def _advance(self, record: ReceiveRecord) -> None:
        """Move on if the evidence allows it."""
        if not record.writer_done():
            return
        if record.phase is Phase.RECEIVING and record.commit is not None:
            self._receive(record, record.commit)
        elif record.phase is Phase.STOPPING:
            self._close(record, Phase.ENDED, ReceiveEnded(record.generation))

    def _receive(self, record: ReceiveRecord, commit: Commit) -> None:
        if not record.all_arrived(len(commit.chunks)):
            self._fail(record, "the prefill worker ended before everything had arrived")
            return
        record.stamps.extend(commit.stamps)
        for chunk in commit.chunks:
            name = "hidden_arrived" if chunk.depth is None else "arrived"
            self._stamp(record, name, chunk.depth, record.arrived[chunk.sequence])
        self._stamp(record, "received")
        self._messages.append((record.peer, Ack(generation=record.generation)))
        self._close(record, Phase.RECEIVED, ReceiveComplete(record.generation))

    def _fail(self, record: ReceiveRecord, reason: str) -> None:
        if record.phase is Phase.RECEIVING:
            self._failures.append((record.generation, reason))
            self._stop(record)

    def _stop(self, record: ReceiveRecord) -> None:
        if record.phase is Phase.RECEIVING:
            record.move(Phase.STOPPING)
            if not record.writer_done():
                self._send_stop(record)

    def _send_stop(self, record: ReceiveRecord) -> None:
        record.told_at_s = self._clock.now_s()
        self._messages.append((record.peer, Stop(generation=record.generation)))

    def _close(self, record: ReceiveRecord, phase: Phase, event: HandoffEvent) -> None:
        record.move(phase)
        del self._records[record.generation]
        self.closed.close(record.generation, phase)
        self._stamps[record.generation] = tuple(record.stamps)
        self._events.append(event)

    def _stamp(
        self,
        record: ReceiveRecord,
        event: str,
        depth: int | None = None,
        at_s: float | None = None,
    ) -> None:
        at = self._clock.wall_s() if at_s is None else at_s
        record.stamps.append(Stamp(event, at, self._worker, depth))
