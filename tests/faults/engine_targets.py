"""Whole engines for fuzzers, over a simulated executor and a transport that moves nothing."""

from typing import Any

from rlt.connector import messages
from rlt.connector.codec import encode
from rlt.connector.messages import Peer
from rlt.connector.transport import Notice, Notification, pack_notice
from rlt.decode.engine import DecodeEngine
from rlt.prefill.engine import PrefillEngine
from rlt.runtime.events import Reservation
from rlt.runtime.types import (
    AllocationId,
    EngineRequest,
    ExitSettings,
    Generation,
    SamplingParams,
)

from .hearing import STEPS, decode, heard
from .lone_engine import begin, end, parts_of, run
from .making import Draw, Maker, twisted


def decode_engine(data: bytes) -> None:
    """D's engine between a hostile coordinator and a hostile prefill worker."""
    run(_decode_engine(Draw(data)))


async def _decode_engine(draw: Draw) -> None:
    parts, transport, clock = parts_of("decode")
    engine = DecodeEngine(parts)
    maker = Maker(draw)
    try:
        begin(engine, Peer(worker="p0", incarnation="p0-1", role="prefill", endpoint=""))
        for _ in range(STEPS):
            if not draw.left:
                break
            live = list(engine._core.live())
            maker.generations = [1, 2, *live]
            match draw.below(5):
                case 0 | 1:
                    _hear(engine, maker)
                case 2:
                    message = heard(maker, "prefill to decode")
                    if message is not None:
                        engine._pairs._handle(draw.pick((b"p0-1", b"p0-1", b"\xff")), message)
                case 3:
                    notice = Notice(
                        Generation(draw.pick(maker.generations)), draw.below(4), draw.below(12)
                    )
                    payload = pack_notice(notice) if draw.below(5) else b"?"
                    transport.notices.append(Notification("p0-1", "p0-1", payload))
                    engine._tick()
                case _:
                    clock.advance(draw.pick((0.1, 1.0, 11.0)))
                    engine._tick()
            engine._core.check()
            engine.statistics()
    finally:
        end(engine)


def prefill_engine(data: bytes) -> None:
    """P's engine between a hostile coordinator and a hostile decode worker."""
    run(_prefill_engine(Draw(data)))


async def _prefill_engine(draw: Draw) -> None:
    parts, transport, clock = parts_of("prefill")
    engine = PrefillEngine(parts)
    maker = Maker(draw)
    try:
        begin(engine, Peer(worker="d0", incarnation="d0-1", role="decode", endpoint="inproc://d"))
        welcome = messages.PairWelcome(
            incarnation="d0-1", pool=transport.pool, agent_metadata=b"agent"
        )
        if draw.below(4):
            engine._pairs._handle("d0-1", welcome)
        for _ in range(STEPS):
            if not draw.left:
                break
            maker.generations = [1, 2, *engine._core.live()]
            match draw.below(4):
                case 0 | 1:
                    _hear(engine, maker)
                case 2:
                    message = heard(maker, "decode to prefill")
                    if message is not None and "d0-1" in engine._pairs._pairs:
                        engine._pairs._handle("d0-1", message)
                case _:
                    clock.advance(draw.pick((0.1, 1.0, 11.0)))
                    engine._tick()
            engine._core.check()
            engine.statistics()
    finally:
        end(engine)


def _hear(engine: Any, maker: Maker) -> None:
    """From the coordinator: made at random, or a plausible ask, twisted or not."""
    message = _ask(maker) if maker.draw.below(3) else heard(maker, "coordinator to worker")
    if message is None or engine._link.ended.done():
        return
    engine._link._handle(message)


def _ask(maker: Maker) -> Any:
    draw = maker.draw
    request = EngineRequest(
        generation=Generation(draw.below(6) + 1),
        prompt=tuple(range(3, 3 + draw.below(12))),
        sampling=SamplingParams(max_tokens=1 + draw.below(8), seed=1),
        exit=ExitSettings(0.5, 1, 4),
    )
    reserve = messages.Reserve(generation=request.generation, request=request, prefill="p0-1")
    prefill = messages.Prefill(
        generation=request.generation,
        request=request,
        decode="d0-1",
        reservation=Reservation(
            allocation=AllocationId(1),
            tables=tuple(tuple(range(d * 6, d * 6 + 6)) for d in range(4)),
            hidden_slot=1,
        ),
    )
    frame = encode(draw.pick((reserve, prefill)))
    return decode("coordinator to worker", twisted(frame, draw) if draw.chance(2) else frame)
