"""D's handoff state: what of each reservation has arrived, and when its memory may be used again.

Pure: events in; messages and handoff events out. Never touches NIXL, sockets or tensors. A request
is received only on complete evidence: commit known, every sequence notified, ranges cover exactly
what was reserved, the allocation is the current one. Memory of an unfinished receive comes back
only when the writer is known to have ended or is fenced; until then it is quarantined.
"""

from collections.abc import Sequence

from ..runtime.errors import ProtocolError
from ..runtime.events import Reservation
from ..runtime.interfaces import (
    Clock,
    HandoffEvent,
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
)
from ..runtime.plans import Arrival, FinishedRange, SendOrder, TransferFeedback
from ..runtime.types import BlockTables, Generation, KVGeometry, Stamp, TokenRange
from .handoff import ClosedGenerations, coverage_fault
from .messages import Ack, Chunk, Commit, DecodeToPrefill, Stop, WriterEnded
from .receive_record import Phase, ReceiveRecord

REPEAT_S = 0.5  # an unanswered Stop is sent again after this
SETTLE_S = 10.0  # for so long a request that is over waits for the proof that its writer has ended


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
        self.refused = 0  # messages and notifications that no honest peer sends
        self._quarantines = 0  # over all time

    def open(
        self, generation: Generation, peer: str, reservation: Reservation, prompt_tokens: int
    ) -> None:
        """Blocks were reserved: `peer` may write them from now on."""
        if generation in self._records or generation in self.closed:
            raise ProtocolError(f"generation {generation} was opened before")
        missing = TokenRange(reservation.cached_tokens, prompt_tokens)
        record = ReceiveRecord(
            generation,
            peer,
            reservation.allocation,
            missing,
            max_chunks=self._geometry.num_planes * len(missing) + 1,
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
        elif not record.believable(commit):
            self.refused += 1
            self._fail(record, "commit has more chunks or stamps than there can be")
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
        elif not len(record.arrived) <= ended.posted <= record.max_chunks:
            self.refused += 1
        elif record.writer_posted is None:
            record.writer_posted = ended.posted
            if record.commit is None:
                self._fail(record, "the prefill worker stopped before it had sent everything")
            self._advance(record)

    def cancel(self, generation: Generation, *, writer_never_started: bool) -> None:
        """The request is not wanted any more. Its memory comes back when the writer has ended."""
        record = self._records.get(generation)
        if record is None:
            return
        if writer_never_started:
            self._end(record)
            return
        self._stop(record)
        self._advance(record)

    def on_peer_gone(self, peer: str) -> None:
        """That prefill incarnation is not listed any more, and the agent that faced it destroyed.
        What is complete stays; the rest is withdrawn until the writer is known to be dead too."""
        for record in self._from(peer):
            record.agent_destroyed = True
            self._advance(record)
            self._fail(record, f"prefill worker {peer} died before everything had arrived")
            self._advance(record)
            if record.phase is Phase.STOPPING:
                self._quarantine(record)

    def on_peer_back(self, peer: str) -> None:
        """It is listed again, after a coordinator that did not know it: it can be asked again, and
        another agent may face it."""
        for record in self._from(peer):
            record.agent_destroyed = False

    def on_writer_dead(self, peer: str) -> None:
        """The process of that prefill incarnation is reaped: it posts nothing any more. Bytes of it
        may still wait where the agent that faced it would read them."""
        for record in self._from(peer):
            record.writer_dead = True
            self._advance(record)

    def tick(self) -> None:
        """Repeat what was not answered; let requests go that wait for proof too long."""
        now = self._clock.now_s()
        for record in list(self._records.values()):
            if record.phase is Phase.RECEIVING:
                continue
            if record.phase is Phase.STOPPING and now - record.stopped_at_s >= SETTLE_S:
                self._quarantine(record)
            if record.writer_posted is None and now - record.told_at_s >= REPEAT_S:
                self._send_stop(record)

    def expecting(self) -> bool:
        """Whether notifications may still come."""
        return any(not record.agent_destroyed for record in self._records.values())

    def quarantined_from(self) -> tuple[str, ...]:
        """Incarnations that could still write what is withdrawn."""
        withdrawn = [r for r in self._records.values() if r.phase is Phase.QUARANTINED]
        return tuple(sorted({record.peer for record in withdrawn}))

    def statistics(self) -> dict[str, float]:
        withdrawn = sum(r.phase is Phase.QUARANTINED for r in self._records.values())
        return {
            "late_messages": self.late,
            "quarantines": self._quarantines,
            "quarantines_live": withdrawn,
        }

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

    def _from(self, peer: str) -> list[ReceiveRecord]:
        return [record for record in self._records.values() if record.peer == peer]

    def _live(self, peer: str, generation: Generation) -> ReceiveRecord | None:
        record = self._records.get(generation)
        return record if record is not None and record.peer == peer else None

    def _on_arrival(self, arrival: Arrival) -> None:
        record = self._live(arrival.source, arrival.generation)
        if record is None or arrival.allocation != record.allocation:
            self.late += 1
        elif not 0 <= arrival.sequence < record.max_chunks:
            self.refused += 1
        else:
            record.arrived.setdefault(arrival.sequence, arrival.at_s)
            self._advance(record)

    def _answer_closed(self, peer: str, generation: Generation) -> None:
        self.late += 1
        if generation in self._records:  # another peer's
            return
        if self.closed.outcome(generation) is Phase.RECEIVED:
            self._messages.append((peer, Ack(generation=generation)))
        else:
            self._messages.append((peer, Stop(generation=generation)))

    def _advance(self, record: ReceiveRecord) -> None:
        """Move on as far as the evidence allows."""
        if record.phase is Phase.RECEIVING and record.commit is not None:
            if record.complete():
                self._receive(record, record.commit)
            elif record.writer_done():
                self._fail(record, "the prefill worker ended before everything had arrived")
        if record.phase in (Phase.STOPPING, Phase.QUARANTINED) and record.writer_done():
            self._end(record)

    def _receive(self, record: ReceiveRecord, commit: Commit) -> None:
        record.stamps.extend(commit.stamps)
        for chunk in commit.chunks:
            name = "hidden_arrived" if chunk.depth is None else "arrived"
            self._stamp(record, name, chunk.depth, record.arrived[chunk.sequence])
        self._stamp(record, "received")
        self._messages.append((record.peer, Ack(generation=record.generation)))
        self._close(record, Phase.RECEIVED)
        self._let_go(record, ReceiveComplete(record.generation))

    def _fail(self, record: ReceiveRecord, reason: str) -> None:
        if record.phase is Phase.RECEIVING:
            self._failures.append((record.generation, reason))
            self._stop(record)

    def _stop(self, record: ReceiveRecord) -> None:
        if record.phase is Phase.RECEIVING:
            record.move(Phase.STOPPING)
            record.stopped_at_s = self._clock.now_s()
            if not record.writer_done():
                self._send_stop(record)

    def _send_stop(self, record: ReceiveRecord) -> None:
        if not record.agent_destroyed:
            record.told_at_s = self._clock.now_s()
            self._messages.append((record.peer, Stop(generation=record.generation)))

    def _quarantine(self, record: ReceiveRecord) -> None:
        """The request does not wait any longer; its memory does, and so does the record."""
        record.move(Phase.QUARANTINED)
        self._quarantines += 1
        self.closed.close(record.generation, Phase.QUARANTINED)
        self._let_go(record, Quarantined(record.generation))

    def _end(self, record: ReceiveRecord) -> None:
        withdrawn = record.phase is Phase.QUARANTINED
        self._close(record, Phase.ENDED)
        if withdrawn:
            self._events.append(QuarantineEnded(record.generation))
        else:
            self._let_go(record, ReceiveEnded(record.generation))

    def _close(self, record: ReceiveRecord, phase: Phase) -> None:
        record.move(phase)
        del self._records[record.generation]
        self.closed.close(record.generation, phase)

    def _let_go(self, record: ReceiveRecord, event: HandoffEvent) -> None:
        """The request hears its end; from here on only memory is at stake."""
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
