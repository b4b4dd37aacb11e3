"""The prefill role: takes prompts, computes them, and pushes them to decode workers.

Joins an EngineCore, a Sender (handoff state) and a worker connector (NIXL); owns none of their
state. It performs effects: every decision is the scheduler's or the sender's.
"""

from typing import assert_never

from ..connector.link import ForEngine
from ..connector.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Confirm,
    GenerationFailed,
    GenerationReleased,
    HeartbeatAnswer,
    LiveGeneration,
    PairHello,
    Peers,
    Prefill,
    PrefillAccepted,
    PrefillComplete,
    Refused,
    Resend,
    Reserve,
    Stop,
)
from ..connector.process import WorkerParts
from ..connector.sender import Sender
from ..runtime.errors import ProtocolError, RequestError
from ..runtime.events import (
    Activated,
    EngineEvent,
    PrefillFinished,
    Received,
    Refuse,
    Released,
    RequestFailed,
    TokensProduced,
)
from ..runtime.types import Generation
from .pairs import PairBook


class PrefillEngine:
    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._connector = parts.connector
        self._sender = Sender(
            parts.geometry,
            parts.clock,
            worker=parts.config.worker,
            drop_queued=parts.connector.drop_queued,
            ack_timeout_s=parts.config.transfer_timeout_s,
        )
        self._core = parts.core(self._sender)
        self._link = parts.link(self, peer_endpoint="")
        self._pairs = PairBook(
            self._hello,
            parts.connector,
            incarnation=parts.incarnation,
            on_message=self._from_decode,
            report=self._link.send,
        )
        self._ticker = parts.ticker(self._tick)
        self._wrong_role = 0

    async def run(self) -> int:
        """Serve until the coordinator says stop, or is silent for too long; the exit code."""
        self._link.connect(self._parts.config.coordinator)
        return await self._link.ended

    def drain(self) -> None:
        self._link.drain()

    def close(self) -> None:
        self._ticker.close()
        self._link.close()
        self._core.shutdown()  # computes no more before the memory it reads goes
        self._pairs.close()
        self._connector.close()

    def statistics(self) -> dict[str, float]:
        return {
            **self._core.statistics(),
            **self._connector.statistics(),
            "pairs": self._pairs.count(),
            "sending": len(self._sender.live()),
            "late_messages": self._sender.late,
            "refused_messages": self._sender.refused,
            "malformed_frames": self._link.malformed + self._pairs.malformed(),
            "wrong_role_messages": self._wrong_role,
        }

    def quarantined_from(self) -> tuple[str, ...]:
        return ()

    def open_pairs(self) -> tuple[str, ...]:
        return self._pairs.open_pairs()

    def handle(self, message: ForEngine) -> None:
        match message:
            case Prefill():
                self._prefill(message)
            case Cancel():
                self._cancel(message.generation)
            case Peers():
                for gone in self._pairs.update(message.peers):
                    for generation in self._sender.on_peer_gone(gone):
                        self._core.cancel(generation)
            case HeartbeatAnswer():
                self._sender.forget_below(message.oldest_live)
                self._pairs.report_refusals()
            case Reserve() | Confirm() | Resend():
                self._wrong_role += 1
            case _:
                assert_never(message)
        self._ticker.wake()

    def forget_all(self) -> None:
        for generation in self._core.live():
            self._sender.cancel(generation)
        self._core.cancel_all()
        self._pairs.report_again()
        self._ticker.wake()

    def _from_decode(self, peer: str, message: Ack | Stop) -> None:
        match message:
            case Ack():
                self._sender.on_ack(peer, message.generation)
            case Stop():
                if self._sender.on_stop(peer, message.generation):
                    self._core.cancel(message.generation)
            case _:
                assert_never(message)
        self._ticker.wake()

    def _prefill(self, ask: Prefill) -> None:
        generation = ask.generation
        if generation in self._core.live():
            self._link.send(PrefillAccepted(generation=generation))
            return
        refusal = self._begin(ask)
        if refusal is None:
            self._link.send(PrefillAccepted(generation=generation))
        else:
            self._link.send(
                Refused(generation=generation, code=refusal.code, reason=refusal.reason)
            )

    def _begin(self, ask: Prefill) -> Refuse | None:
        generation = ask.generation
        if self._sender.is_over(ask.decode, generation):
            return Refuse("closed", f"generation {generation} ended on this worker")
        if not self._pairs.ready(ask.decode):
            return Refuse("pair_closed", f"no open pair with decode worker {ask.decode}")
        try:
            self._connector.check_reservation(ask.decode, ask.reservation)
            self._sender.open(generation, ask.decode, ask.reservation, ask.request.context_tokens)
            self._core.add_prefill(ask.request)
        except (RequestError, ProtocolError) as error:
            self._sender.cancel(generation)
            self._sender.take_stamps(generation)  # no Released will
            return Refuse(error.code, str(error))
        return None

    def _cancel(self, generation: Generation) -> None:
        if generation in self._core.live():
            self._sender.cancel(generation)
            self._core.cancel(generation)
            return
        if generation not in self._sender.closed:
            self._sender.closed.close(generation, None)
        self._link.send(GenerationReleased(generation=generation))

    def _tick(self) -> bool:
        self._sender.tick()
        events = self._core.step()
        for decode, reason in self._sender.take_broken():  # told before any failure that it led to
            self._pairs.break_off(decode, reason)
        for event in events:
            self._report(event)
        for generation, reason in self._sender.take_failures():
            self._core.cancel(generation)
            failed = GenerationFailed(generation=generation, code="transfer_failed", error=reason)
            self._link.send(failed)
        for peer, message in self._sender.take_messages():
            self._pairs.send(peer, message)
        return self._connector.outstanding() or bool(self._sender.live())

    def _report(self, event: EngineEvent) -> None:
        generation = event.generation
        match event:
            case PrefillFinished():
                self._link.send(PrefillComplete(generation=generation, stamps=event.stamps))
            case RequestFailed():
                self._sender.cancel(generation)
                self._link.send(
                    GenerationFailed(generation=generation, code=event.code, error=event.message)
                )
            case Released():
                self._connector.forget(generation)
                stamps = self._sender.take_stamps(generation)
                self._link.send(GenerationReleased(generation=generation, stamps=stamps))
            case TokensProduced() | Received() | Activated():
                raise AssertionError(f"a prefill engine reported {event}")
            case _:
                assert_never(event)

    def live(self) -> tuple[LiveGeneration, ...]:
        return tuple(LiveGeneration(g, phase) for g, phase in self._core.live().items())

    def _hello(self) -> PairHello:
        return PairHello(
            worker=self._parts.config.worker,
            incarnation=self._parts.incarnation,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=self._parts.model.fingerprint,
            pool=self._connector.pool,
            agent_metadata=self._connector.agent_metadata(),
        )
