"""The decode role: reserves, receives prompts over NIXL, generates, reports tokens.

Joins an EngineCore, a Receiver (handoff state) and a worker connector (NIXL); owns none of their
state. It performs effects: every decision is the scheduler's or the receiver's.
"""

import logging
from typing import assert_never

from ..connector.config import EXIT_RESTART
from ..connector.link import ForEngine
from ..connector.messages import (
    Cancel,
    Chunk,
    Commit,
    Confirm,
    GenerationFailed,
    GenerationReleased,
    HeartbeatAnswer,
    LiveGeneration,
    MustWait,
    Output,
    OutputRow,
    Peers,
    Prefill,
    Refused,
    RequestActivated,
    RequestReceived,
    Resend,
    Reserve,
    Reserved,
    WriterEnded,
)
from ..connector.process import WorkerParts
from ..connector.receive_record import Phase
from ..connector.receiver import Receiver
from ..runtime.events import (
    Activated,
    EngineEvent,
    PrefillFinished,
    Received,
    Refuse,
    Released,
    RequestFailed,
    Reservation,
    TokensProduced,
    Wait,
)
from ..runtime.types import Stamp
from .outputs import OutputLog
from .pairs import PairDesk

logger = logging.getLogger(__name__)

FENCING_S = 5.0  # a dead writer is reaped, and this worker told, well within this time


class DecodeEngine:
    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._connector = parts.connector
        self._receiver = Receiver(parts.geometry, parts.clock, worker=parts.config.worker)
        self._core = parts.core(self._receiver)
        self._outputs = OutputLog()
        self._new_rows: list[OutputRow] = []
        self._pairs = PairDesk(
            parts.connector,
            incarnation=parts.incarnation,
            fingerprint=parts.model.fingerprint,
            on_message=self._from_prefill,
        )
        self._link = parts.link(self, peer_endpoint=self._pairs.listen(parts.config.listen))
        self._ticker = parts.ticker(self._tick)
        self._wrong_role = 0
        self._unhealthy = False
        self._too_much_since_s: float | None = None  # is quarantined

    async def run(self) -> int:
        """Serve until the coordinator says stop, or is silent for too long; the exit code."""
        self._link.connect(self._parts.config.coordinator)
        return await self._link.ended

    def drain(self) -> None:
        self._link.drain()

    def close(self) -> None:
        self._ticker.close()
        self._link.close()
        self._core.shutdown()
        self._pairs.close()
        self._connector.close()

    def statistics(self) -> dict[str, float]:
        return {
            **self._core.statistics(),
            **self._connector.statistics(),
            "pairs": self._pairs.count(),
            "unconfirmed": len(self._outputs),
            **self._receiver.statistics(),
            "refused_messages": self._receiver.refused + self._pairs.refused,
            "strangers": self._pairs.strangers,
            "malformed_frames": self._link.malformed + self._pairs.malformed,
            "wrong_role_messages": self._wrong_role,
        }

    def quarantined_from(self) -> tuple[str, ...]:
        return self._receiver.quarantined_from()

    def open_pairs(self) -> None:
        """A prefill worker tells of them."""
        return None

    def handle(self, message: ForEngine) -> None:
        match message:
            case Reserve():
                self._reserve(message)
            case Cancel():
                self._cancel(message)
            case Confirm():
                for row in message.rows:
                    self._outputs.confirm(row.generation, row.outputs)
            case Resend():
                if rows := self._outputs.since(message.generation, message.start_index):
                    self._link.send(Output(rows=rows))
            case Peers():
                self._note_peers(message)
            case HeartbeatAnswer():
                self._receiver.closed.forget_below(message.oldest_live)
                for dead in message.dead:
                    self._receiver.on_writer_dead(dead)
            case Prefill():
                self._wrong_role += 1
            case _:
                assert_never(message)
        self._ticker.wake()

    def _note_peers(self, message: Peers) -> None:
        self._receiver.on_feedback(self._connector.poll())  # what agents heard goes with them
        change = self._pairs.update(message.peers)
        for gone in change.gone:
            self._receiver.on_peer_gone(gone)
        for new in change.new:
            self._receiver.on_peer_back(new)

    def forget_all(self) -> None:
        for generation in self._core.live():
            self._receiver.cancel(generation, writer_never_started=False)
        self._core.cancel_all()
        self._outputs = OutputLog()
        self._new_rows = []
        self._ticker.wake()

    def _from_prefill(self, peer: str, message: Chunk | Commit | WriterEnded) -> None:
        match message:
            case Chunk():
                self._receiver.on_chunk(peer, message)
            case Commit():
                self._receiver.on_commit(peer, message)
            case WriterEnded():
                self._receiver.on_writer_ended(peer, message)
            case _:
                assert_never(message)
        self._ticker.wake()

    def _reserve(self, ask: Reserve) -> None:
        generation = ask.generation
        if generation in self._receiver.closed and generation not in self._core.live():
            reason = f"generation {generation} ended on this worker"
            self._link.send(Refused(generation=generation, code="closed", reason=reason))
            return
        if generation not in self._core.live() and (answer := self._turned_away(ask)):
            self._link.send(answer)
            return
        match self._core.reserve(ask.request):
            case Reservation() as reservation:
                if generation not in self._receiver.closed and not self._receiver.phase(generation):
                    context_tokens = ask.request.context_tokens
                    self._receiver.open(generation, ask.prefill, reservation, context_tokens)
                self._link.send(Reserved(generation=generation, reservation=reservation))
            case Wait(reason):
                self._link.send(MustWait(generation=generation, reason=reason))
            case Refuse(code, reason):
                self._receiver.closed.close(generation, Phase.ENDED)
                self._link.send(Refused(generation=generation, code=code, reason=reason))

    def _turned_away(self, ask: Reserve) -> MustWait | Refused | None:
        """Why nothing new is reserved, whatever is free."""
        if self._unhealthy:
            reason = "too much memory is quarantined: this worker will be started again"
            return MustWait(generation=ask.generation, reason=reason)
        if not self._pairs.listed(ask.prefill):
            reason = f"prefill worker {ask.prefill} is not known here"
            return Refused(generation=ask.generation, code="pair_closed", reason=reason)
        return None

    def _cancel(self, ask: Cancel) -> None:
        generation = ask.generation
        self._outputs.forget(generation)
        self._new_rows = [row for row in self._new_rows if row.generation != generation]
        self._receiver.cancel(generation, writer_never_started=ask.writer_never_started)
        if generation in self._core.live():
            self._core.cancel(generation)
            return
        self._core.cancel(generation)  # it may wait for a reservation
        if generation not in self._receiver.closed:
            self._receiver.closed.close(generation, Phase.ENDED)
        self._link.send(GenerationReleased(generation=generation))

    def _tick(self) -> bool:
        self._receiver.tick()
        for event in self._core.step():
            self._report(event)
        for generation, reason in self._receiver.take_failures():
            self._core.cancel(generation)
            failed = GenerationFailed(generation=generation, code="transfer_failed", error=reason)
            self._link.send(failed)
        for peer, message in self._receiver.take_messages():
            self._pairs.send(peer, message)
        self._send_outputs()
        self._mind_quarantine()
        return self._receiver.expecting() or self._connector.outstanding()

    def _mind_quarantine(self) -> None:
        """Too much of it for too long, and only a new process has all of its memory again."""
        withdrawn = self._core.withdrawn_share() if self._receiver.quarantined_from() else 0.0
        now_s = self._parts.clock.now_s()
        if withdrawn <= self._parts.config.max_quarantined:
            self._too_much_since_s = None
        elif self._too_much_since_s is None:
            self._too_much_since_s = now_s
        elif not self._unhealthy and now_s - self._too_much_since_s > FENCING_S:
            self._unhealthy = True
            logger.error("%.0f%% of this worker is quarantined: it has to go", withdrawn * 100)
            self.drain()
        if self._unhealthy and not self.live():
            self._link.end(EXIT_RESTART)

    def _send_outputs(self) -> None:
        """One frame per step for all rows; always before the release of any of them is told."""
        if self._new_rows:
            self._link.send(Output(rows=tuple(self._new_rows)))
            self._new_rows = []

    def _report(self, event: EngineEvent) -> None:
        generation = event.generation
        match event:
            case TokensProduced():
                self._note_tokens(event)
            case Received():
                stamps = self._receiver.take_stamps(generation)
                self._link.send(RequestReceived(generation=generation, stamps=stamps))
            case Activated():
                self._link.send(
                    RequestActivated(
                        generation=generation,
                        stamps=(
                            Stamp(
                                "activated", self._parts.clock.wall_s(), self._parts.config.worker
                            ),
                        ),
                        prefill_tokens=event.prefill_tokens,
                        recurrent_loops=event.recurrent_loops,
                    )
                )
            case RequestFailed():
                self._send_outputs()
                self._outputs.forget(generation)  # else heartbeats would list it as still here
                self._link.send(
                    GenerationFailed(generation=generation, code=event.code, error=event.message)
                )
            case Released():
                self._send_outputs()
                self._link.send(
                    GenerationReleased(
                        generation=generation,
                        stamps=self._receiver.take_stamps(generation),
                        quarantined_blocks=event.quarantined_blocks,
                    )
                )
            case PrefillFinished():
                raise AssertionError(f"a decode engine reported {event}")
            case _:
                assert_never(event)

    def _note_tokens(self, event: TokensProduced) -> None:
        row = OutputRow(
            generation=event.generation,
            start_index=event.start_index,
            token_ids=event.token_ids,
            exit_depths=event.exit_depths,
            logprobs=event.logprobs,
            finish_reason=event.finish_reason,
        )
        self._outputs.add(row)
        self._new_rows.append(row)

    def live(self) -> tuple[LiveGeneration, ...]:
        running = self._core.live()
        rows = [LiveGeneration(g, phase, self._outputs.outputs(g)) for g, phase in running.items()]
        rows += [
            LiveGeneration(g, "unconfirmed", self._outputs.outputs(g))
            for g in self._outputs
            if g not in running
        ]
        return tuple(rows)
