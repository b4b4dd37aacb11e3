"""What an engine does with failures at awkward moments: nothing stays behind, and nobody hangs."""

import asyncio
from typing import Any, TypeVar

import pytest

from rlt.connector import messages
from rlt.connector.transport import Notice, Notification, pack_notice
from rlt.decode.engine import DecodeEngine
from rlt.prefill.engine import PrefillEngine
from rlt.runtime.errors import TransportError
from rlt.runtime.events import Reservation
from rlt.runtime.types import (
    AllocationId,
    EngineRequest,
    ExitSettings,
    Generation,
    SamplingParams,
    TokenRange,
)

from ..runtime.simulated_executor import SimulatedExecutor
from .lone_engine import NoChannel, begin, end, parts_of, run

P = messages.Peer(worker="p0", incarnation="p0-1", role="prefill", endpoint="")
D = messages.Peer(worker="d0", incarnation="d0-1", role="decode", endpoint="inproc://d")
T = TypeVar("T")


def said(kind: type[T]) -> list[T]:
    return [message for message in NoChannel.said if isinstance(message, kind)]


def request(generation: int, prompt_tokens: int = 6) -> EngineRequest:
    return EngineRequest(
        generation=Generation(generation),
        prompt=tuple(range(3, 3 + prompt_tokens)),
        sampling=SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        exit=ExitSettings(0.5, 1, 4),
    )


def prefill(asked: EngineRequest) -> messages.Prefill:
    blocks = 12 * asked.generation
    return messages.Prefill(
        generation=asked.generation,
        request=asked,
        decode=D.incarnation,
        reservation=Reservation(
            allocation=AllocationId(asked.generation),
            tables=tuple(tuple(range(blocks + 3 * d, blocks + 3 * d + 3)) for d in range(4)),
            hidden_slot=asked.generation,
        ),
    )


def paired(engine: PrefillEngine, pool: Any) -> None:
    begin(engine, D)
    welcome = messages.PairWelcome(incarnation=D.incarnation, pool=pool, agent_metadata=b"agent")
    engine._pairs._handle(D.incarnation, welcome)


def tick(engine: PrefillEngine | DecodeEngine, times: int) -> None:
    for _ in range(times):
        engine._tick()
        engine._core.check()


@pytest.mark.parametrize("fault", ["a failed WRITE", "no Ack"])
def test_a_request_that_waits_at_p_while_its_pair_breaks_leaves_nothing_behind(fault: str) -> None:
    """The one that sends frees, in the step in which it fails, what the one that waits needs."""

    async def scenario() -> None:
        parts, transport, clock = parts_of("prefill", SimulatedExecutor(num_slots=1))
        engine = PrefillEngine(parts)
        try:
            paired(engine, transport.pool)
            transport.held = fault == "a failed WRITE"
            for generation in (1, 2):
                engine._link._handle(prefill(request(generation)))
            tick(engine, 12)
            assert set(engine._core.live().values()) == {"sending", "waiting"}
            if fault == "a failed WRITE":
                transport.held, transport.error = False, "gone"
            else:
                assert len(said(messages.Commit)) == 1
                for _ in range(40):
                    clock.advance(1.0)
                    tick(engine, 1)
            tick(engine, 20)
            assert engine._core.live() == {}
            left = engine.statistics()
            assert (left["slots_free"], left["leases_send"]) == (1, 0)
            assert left["blocks_free"] == left["blocks_total"]
            released = {message.generation for message in said(messages.GenerationReleased)}
            assert released == {1, 2}
        finally:
            end(engine)

    run(scenario())


def test_requests_that_p_refuses_are_not_remembered() -> None:
    async def scenario() -> None:
        parts, transport, _ = parts_of("prefill")
        engine = PrefillEngine(parts)
        try:
            paired(engine, transport.pool)
            refused = [request(generation, prompt_tokens=0) for generation in (1, 2, 3)]
            for asked in refused:
                engine._link._handle(prefill(asked))
            assert len(said(messages.Refused)) == 3
            assert [engine._sender.take_stamps(asked.generation) for asked in refused] == [()] * 3
        finally:
            end(engine)

    run(scenario())


def test_a_prefill_worker_that_has_no_agent_yet_says_hello_once_it_has() -> None:
    async def scenario() -> None:
        parts, transport, _ = parts_of("prefill")
        engine = PrefillEngine(parts)
        try:
            transport.refuses = TransportError("cannot make agent p0")
            begin(engine, D)
            assert not said(messages.PairHello) and not engine._link.ended.done()
            transport.refuses = None
            async with asyncio.timeout(5):
                while not said(messages.PairHello):
                    await asyncio.sleep(0.01)
        finally:
            end(engine)

    run(scenario())


def test_a_request_that_fails_at_d_is_not_listed_any_more_with_what_it_produced() -> None:
    """A coordinator that missed the failure learns of it from the next heartbeat."""

    async def scenario() -> None:
        executor = SimulatedExecutor()
        parts, transport, _ = parts_of("decode", executor)
        engine = DecodeEngine(parts)
        try:
            begin(engine, P)
            engine._pairs._handle(
                P.incarnation.encode(),
                messages.PairHello(
                    worker=P.worker,
                    incarnation=P.incarnation,
                    protocol_version=messages.PROTOCOL_VERSION,
                    fingerprint=parts.model.fingerprint,
                    pool=transport.pool,
                    agent_metadata=b"agent",
                ),
            )
            asked = request(1)
            reserve = messages.Reserve(generation=Generation(1), request=asked, prefill="p0-1")
            engine._link._handle(reserve)
            tick(engine, 2)
            reservation = said(messages.Reserved)[0].reservation
            written(executor, reservation, asked)
            arrive(engine, transport, reservation, asked)
            while not said(messages.Output):
                tick(engine, 1)
            executor.fail_next_pass = "out of memory"
            tick(engine, 10)
            assert [failed.code for failed in said(messages.GenerationFailed)] == ["pass_failed"]
            assert said(messages.GenerationReleased) and engine.live() == ()
            last = [type(m) for m in NoChannel.said][-2:]
            assert last == [messages.GenerationFailed, messages.GenerationReleased]
        finally:
            end(engine)

    run(scenario())


def written(executor: SimulatedExecutor, at: Reservation, asked: EngineRequest) -> None:
    """What P's WRITEs would have left in D's memory."""
    for table in at.tables:
        for position in range(len(asked.prompt)):
            entry = (asked.generation, position, 0)
            executor.memory.kv[table[position // 2], position % 2] = entry
    executor.memory.hidden[at.hidden_slot] = (asked.generation, 0)


def arrive(engine: DecodeEngine, transport: Any, at: Reservation, asked: EngineRequest) -> None:
    """All that P would have sent."""
    prompt = TokenRange(0, len(asked.prompt))
    chunks = [messages.ChunkSpec(depth, depth, prompt) for depth in range(4)]
    chunks.append(messages.ChunkSpec(4, None, TokenRange(prompt.stop - 1, prompt.stop)))
    for chunk in chunks:
        notice = Notice(asked.generation, at.allocation, chunk.sequence)
        transport.notices.append(Notification("p0-1", "p0-1", pack_notice(notice)))
    commit = messages.Commit(
        generation=asked.generation, allocation=at.allocation, chunks=tuple(chunks)
    )
    engine._pairs._handle(P.incarnation.encode(), commit)
