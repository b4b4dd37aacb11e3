"""P's handoff state: what of each generation is posted, what is terminal, and who was told.

Pure: events in; orders, messages and handoff events out. Never touches NIXL, sockets or tensors.
P's blocks are given back (SendEnded) only when D acknowledged, or sending was stopped, AND every
posted handle is terminal; or D's incarnation is gone. No sequence is ever ordered twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ..runtime.errors import ProtocolError
from ..runtime.events import Reservation
from ..runtime.interfaces import Clock, HandoffEvent, SendEnded
from ..runtime.plans import FinishedRange, SendFailure, SendOrder, TransferFeedback
from ..runtime.types import BlockTables, Generation, KVGeometry, Stamp, TokenRange
from .ended_sends import EndedSends
from .handoff import ClosedGenerations, reservation_fault
from .messages import Chunk, ChunkSpec, Commit, PrefillToDecode, WriterEnded

REPEAT_S = 0.5  # an unanswered Commit is sent again after this
ACK_TIMEOUT_S = 30.0  # a Commit unanswered for so long means that the pair does not work


class Phase(Enum):
    WAITING = auto()  # prompt queued: no source blocks yet
    SENDING = auto()  # chunks are ordered as loops finish
    COMMITTED = auto()  # everything posted; Commit is repeated until Ack
    ACKED = auto()  # D has everything; local handles may still run
    STOPPING = auto()  # no new posts; posted handles run to their end
    ENDED = auto()


MOVES = {
    Phase.WAITING: {Phase.SENDING, Phase.STOPPING},
    Phase.SENDING: {Phase.COMMITTED, Phase.STOPPING},
    Phase.COMMITTED: {Phase.ACKED, Phase.STOPPING},
    Phase.ACKED: {Phase.ENDED, Phase.STOPPING},
    Phase.STOPPING: {Phase.ENDED},
    Phase.ENDED: set(),
}


@dataclass
class SendRecord:
    generation: Generation
    peer: str
    reservation: Reservation
    prompt_tokens: int
    phase: Phase = Phase.WAITING
    tables: BlockTables = ()
    hidden_slot: int = 0
    chunks: list[ChunkSpec] = field(default_factory=list)
    gathered_from: int | None = None  # shared: first finished position that is not ordered yet
    complete: bool = False  # fact: every chunk of the prompt is in `chunks`
    handed_over: set[int] = field(default_factory=set)  # to the worker side, which may post them
    posted: set[int] = field(default_factory=set)
    terminal: set[int] = field(default_factory=set)
    unsent_bytes: int = 0  # of chunks whose handle is not DONE
    error: str | None = None
    committed_at_s: float = 0.0
    told_at_s: float = 0.0
    stamps: list[Stamp] = field(default_factory=list)

    def move(self, to: Phase) -> None:
        if to not in MOVES[self.phase]:
            raise ProtocolError(f"generation {self.generation}: {self.phase.name} -> {to.name}")
        self.phase = to


class Sender:
    """Scheduler-side connector of a prefill worker (the SchedulerConnector Protocol)."""

    def __init__(
        self,
        geometry: KVGeometry,
        clock: Clock,
        *,
        worker: str,
        drop_queued: Callable[[Generation], Sequence[int]],
        ack_timeout_s: float = ACK_TIMEOUT_S,
    ) -> None:
        """drop_queued: takes back orders that the worker side has not posted yet."""
        self._geometry = geometry
        self._clock = clock
        self._worker = worker
        self._drop_queued = drop_queued
        self._ack_timeout_s = ack_timeout_s
        self._looked_s = clock.now_s()
        self._records: dict[Generation, SendRecord] = {}
        self._orders: list[SendOrder] = []
        self._messages: list[tuple[str, PrefillToDecode]] = []
        self._events: list[HandoffEvent] = []
        self._failures: list[tuple[Generation, str]] = []
        self._broken: list[tuple[str, str]] = []
        self._ended = EndedSends()
        self._stamps: dict[Generation, tuple[Stamp, ...]] = {}
        self.closed: ClosedGenerations[None] = ClosedGenerations()
        self.late = 0  # messages and results about generations that are not live here
        self.refused = 0  # messages that no honest peer sends

    def open(
        self, generation: Generation, peer: str, reservation: Reservation, prompt: int
    ) -> None:
        """Prefill was accepted: this generation goes to `peer`, `prompt` tokens long."""
        if generation in self._records or self.is_over(peer, generation):
            raise ProtocolError(f"generation {generation} was opened or stopped before")
        fault = reservation_fault(reservation, self._geometry, prompt)
        if fault is not None:
            raise ProtocolError(f"generation {generation}: {fault}")
        self._records[generation] = SendRecord(generation, peer, reservation, prompt)

    def on_prefill_admitted(
        self, generation: Generation, tables: BlockTables, hidden_slot: int
    ) -> None:
        record = self._live(generation)
        if record is None:  # stopped while it waited, and admitted all the same in the same step
            self._events.append(SendEnded(generation, "stopped before it began"))
            return
        if record.phase is not Phase.WAITING:
            return
        record.tables, record.hidden_slot = tables, hidden_slot
        record.move(Phase.SENDING)
        self._stamp(record, "prefill_started")

    def on_ranges_finished(self, ranges: Sequence[FinishedRange]) -> None:
        for finished in ranges:
            record = self._records.get(finished.generation)
            if record is None or record.phase is not Phase.SENDING:
                self.late += 1
                continue
            self._order_finished(record, finished)
            if finished.hidden_ready:
                self._stamp(
                    record, "compute_end", num_bytes=record.unsent_bytes, at_s=finished.at_s
                )
                last = record.prompt_tokens
                self._order(record, None, TokenRange(last - 1, last))
                record.complete = True

    def on_feedback(self, feedback: TransferFeedback) -> None:
        for post in feedback.posted:
            if record := self._live(post.generation):
                self._on_posted(record, post.sequence, post.num_bytes, post.at_s)
        for sent in feedback.sent:
            if record := self._live(sent.generation):
                record.terminal.add(sent.sequence)
                record.unsent_bytes -= self._chunk_bytes(record.chunks[sent.sequence])
                self._advance(record)
        for failure in feedback.failed:
            if record := self._live(failure.generation):
                self._on_failed(record, failure)

    def on_ack(self, peer: str, generation: Generation) -> None:
        record = self._records.get(generation)
        if record is None or record.peer != peer or record.phase is not Phase.COMMITTED:
            self.late += 1
            return
        record.move(Phase.ACKED)
        self._stamp(record, "acked")
        self._advance(record)

    def on_stop(self, peer: str, generation: Generation) -> bool:
        """D wants no more. Answered by WriterEnded once drained; at once if nothing was begun.
        True if this stopped a generation that was to go there."""
        record = self._records.get(generation)
        if record is not None:
            if record.peer != peer:
                self.late += 1
                return False
            self._stop(record, "stopped by the decode worker")
            return True
        if generation not in self.closed and not self._ended.stop_early(peer, generation):
            self.refused += 1
            return False
        posted = self._ended.posted(peer, generation)
        if posted is None:
            self.late += 1
        else:
            self._messages.append((peer, WriterEnded(generation=generation, posted=posted)))
        return False

    def is_over(self, peer: str, generation: Generation) -> bool:
        """Whether it ended here, or was stopped by that peer before it began."""
        return generation in self.closed or self._ended.stopped_early(peer, generation)

    def cancel(self, generation: Generation) -> None:
        if record := self._live(generation):
            self._stop(record, None)

    def forget_below(self, oldest_live: Generation) -> None:
        """What is older will not be asked for again by the coordinator."""
        self.closed.forget_below(oldest_live)
        self._ended.forget_below(oldest_live)

    def on_peer_gone(self, peer: str) -> list[Generation]:
        """That decode incarnation is dead: nobody waits for its bytes, so nothing waits for handles
        to it. Returns the generations that were to go there."""
        stopped = [r for r in self._records.values() if r.peer == peer]
        for record in stopped:
            self._stop(record, f"decode worker {peer} is gone")
            if record.phase is not Phase.ENDED:
                self._end(record)
        return [record.generation for record in stopped]

    def tick(self) -> None:
        """Repeat what was not answered, and give up what was not answered for too long."""
        now = self._clock.now_s()
        stood_still_s, self._looked_s = now - self._looked_s, now
        for record in list(self._records.values()):
            if record.phase is not Phase.COMMITTED:
                continue
            if stood_still_s > self._ack_timeout_s / 2:  # this process did: an Ack may wait unread
                record.committed_at_s += stood_still_s
            if now - record.committed_at_s >= self._ack_timeout_s:
                self._break(record.peer, f"no answer to a commit for {self._ack_timeout_s:g} s")
            elif now - record.told_at_s >= REPEAT_S:
                self._send_commit(record)

    def take_orders(self) -> list[SendOrder]:
        orders, self._orders = self._orders, []
        for order in orders:
            self._records[order.generation].handed_over.add(order.sequence)
        return orders

    def take_events(self) -> list[HandoffEvent]:
        events, self._events = self._events, []
        return events

    def take_messages(self) -> list[tuple[str, PrefillToDecode]]:
        """(decode incarnation, message) pairs to send, in order."""
        messages, self._messages = self._messages, []
        return messages

    def take_failures(self) -> list[tuple[Generation, str]]:
        """Generations whose sending failed while some handle still runs: told early."""
        failures, self._failures = self._failures, []
        return failures

    def take_broken(self) -> list[tuple[str, str]]:
        """(decode incarnation, reason) of pairs that do not work: to be closed, before the failures
        that come of it are told. Everything on its way there has been stopped."""
        broken, self._broken = self._broken, []
        return broken

    def take_stamps(self, generation: Generation) -> tuple[Stamp, ...]:
        """The whole story of an ended generation, once."""
        return self._stamps.pop(generation, ())

    def live(self) -> tuple[Generation, ...]:
        return tuple(self._records)

    def phase(self, generation: Generation) -> Phase | None:
        record = self._records.get(generation)
        return record.phase if record else None

    def check(self) -> None:
        for record in self._records.values():
            if not record.terminal <= record.posted:
                raise ProtocolError(f"generation {record.generation}: ended but never posted")

    def _live(self, generation: Generation) -> SendRecord | None:
        record = self._records.get(generation)
        if record is None:
            self.late += 1
        return record

    def _order(self, record: SendRecord, depth: int | None, positions: TokenRange) -> None:
        spec = ChunkSpec(len(record.chunks), depth, positions)
        record.chunks.append(spec)
        blocks: tuple[int, ...] = ()
        peer_blocks: tuple[int, ...] = ()
        if depth is not None:
            size = self._geometry.block_size
            covering = slice(positions.start // size, self._geometry.plane_blocks(positions.stop))
            blocks = record.tables[depth][covering]
            peer_blocks = record.reservation.tables[depth][covering]
        record.unsent_bytes += self._chunk_bytes(spec)
        self._orders.append(
            SendOrder(
                generation=record.generation,
                peer=record.peer,
                sequence=spec.sequence,
                depth=depth,
                range=positions,
                blocks=blocks,
                peer_blocks=peer_blocks,
                hidden_slot=record.hidden_slot,
                peer_hidden_slot=record.reservation.hidden_slot,
                allocation=record.reservation.allocation,
            )
        )

    def _order_finished(self, record: SendRecord, finished: FinishedRange) -> None:
        """Order what D lacks of a finished range. Layout `shared` finishes one position at a time:
        those are gathered until they fill a block, or the prompt ends."""
        start, stop = (
            max(finished.range.start, record.reservation.cached_tokens),
            finished.range.stop,
        )
        if record.gathered_from is not None:
            start = record.gathered_from
        if start >= stop:
            return
        gathers = self._geometry.layout == "shared" and not finished.hidden_ready
        if gathers and stop % self._geometry.block_size:
            record.gathered_from = start
            return
        record.gathered_from = None
        self._stamp(record, "computed", finished.depth, at_s=finished.at_s)
        self._order(record, finished.depth, TokenRange(start, stop))

    def _chunk_bytes(self, spec: ChunkSpec) -> int:
        if spec.depth is None:
            return self._geometry.hidden_bytes
        per_position = self._geometry.num_layers * 2 * self._geometry.position_bytes
        return per_position * len(spec.range)

    def _on_posted(self, record: SendRecord, sequence: int, num_bytes: int, at_s: float) -> None:
        record.posted.add(sequence)
        spec = record.chunks[sequence]
        name = "hidden_posted" if spec.depth is None else "posted"
        self._stamp(record, name, spec.depth, num_bytes, at_s)
        if record.phase is not Phase.SENDING:
            return
        chunk = Chunk(
            generation=record.generation,
            sequence=sequence,
            depth=spec.depth,
            range=spec.range,
        )
        self._messages.append((record.peer, chunk))
        if record.complete and len(record.posted) == len(record.chunks):
            record.move(Phase.COMMITTED)
            record.committed_at_s = self._clock.now_s()
            self._stamp(record, "committed")
            self._send_commit(record)

    def _send_commit(self, record: SendRecord) -> None:
        record.told_at_s = self._clock.now_s()
        commit = Commit(
            generation=record.generation,
            allocation=record.reservation.allocation,
            chunks=tuple(record.chunks),
            stamps=tuple(record.stamps),
        )
        self._messages.append((record.peer, commit))

    def _on_failed(self, record: SendRecord, failure: SendFailure) -> None:
        record.posted.add(failure.sequence)  # it may have written something: D must not forget it
        if failure.terminal:
            record.terminal.add(failure.sequence)
        self._break(record.peer, failure.reason)
        self._advance(record)

    def _break(self, peer: str, reason: str) -> None:
        """The pair does not work: nothing more is sent there until it was opened anew."""
        self._broken.append((peer, reason))
        for record in [r for r in self._records.values() if r.peer == peer]:
            if record.phase is not Phase.STOPPING:
                self._failures.append((record.generation, reason))
                self._stop(record, reason)

    def _stop(self, record: SendRecord, error: str | None) -> None:
        if record.phase is not Phase.STOPPING:
            record.error = error
            record.move(Phase.STOPPING)
            self._orders = [o for o in self._orders if o.generation != record.generation]
            record.posted |= record.handed_over - set(self._drop_queued(record.generation))
        self._advance(record)

    def _advance(self, record: SendRecord) -> None:
        """End the record once nothing can still read its blocks."""
        if record.phase not in (Phase.ACKED, Phase.STOPPING) or record.terminal != record.posted:
            return
        if record.phase is Phase.STOPPING:
            ended = WriterEnded(generation=record.generation, posted=len(record.posted))
            self._messages.append((record.peer, ended))
        self._end(record)

    def _end(self, record: SendRecord) -> None:
        self._stamp(record, "send_ended")
        record.move(Phase.ENDED)
        del self._records[record.generation]
        self.closed.close(record.generation, None)
        self._ended.end(record.peer, record.generation, len(record.posted))
        self._stamps[record.generation] = tuple(record.stamps)
        self._events.append(SendEnded(record.generation, record.error))

    def _stamp(
        self,
        record: SendRecord,
        event: str,
        depth: int | None = None,
        num_bytes: int | None = None,
        at_s: float | None = None,
    ) -> None:
        at = self._clock.wall_s() if at_s is None else at_s
        record.stamps.append(Stamp(event, at, self._worker, depth, num_bytes))
