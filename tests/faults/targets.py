"""What fuzzers drive: every decoder, and every state machine that hears decoded messages.

Each target takes bytes and returns; it raises only when it has found a fault. Nothing here opens a
connection: hostile messages go straight to the product's own classes, after a trip through the
codec, in between what an honest peer would say.
"""

from collections.abc import Callable
from typing import Any

from rlt.connector import messages
from rlt.connector.codec import encode
from rlt.connector.messages import Chunk, ChunkSpec, Commit, WriterEnded
from rlt.connector.receiver import Receiver
from rlt.connector.sender import Sender
from rlt.coordinator.client_protocol import ClientCore
from rlt.runtime.errors import RltError
from rlt.runtime.events import Reservation
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.plans import Arrival, FinishedRange, SendFailure, SendProgress, TransferFeedback
from rlt.runtime.types import (
    AllocationId,
    Generation,
    RequestId,
    SamplingParams,
    TokenRange,
)

from ..connector.clock import ManualClock
from ..coordinator.workers import GEOMETRY
from ..coordinator.world import SUPERVISOR, World
from .engine_targets import decode_engine, prefill_engine
from .hearing import STEPS, UNIONS, decode, heard
from .making import Draw, Maker, twisted


def decoders(data: bytes) -> None:
    """Any bytes, and any message of any direction: a message of this direction, or malformed."""
    draw = Draw(data)
    maker = Maker(draw)
    name = draw.pick(list(UNIONS))
    decode(name, data)
    made = maker.message(UNIONS[draw.pick(list(UNIONS))])
    try:
        frame = encode(made)
    except OverflowError:
        return
    for direction in UNIONS:
        found = decode(direction, frame)
        assert found is None or encode(found) == frame or made != made, (found, made)
        decode(direction, twisted(frame, draw))


def coordinator(data: bytes) -> None:
    """Hostile workers, supervisors and clients among honest ones; check() after every event."""
    draw = Draw(data)
    maker = Maker(draw)
    world = World(prefill=1, decode=2)
    maker.names += [*world.workers, *(w.name for w in world.workers.values()), SUPERVISOR]
    for _ in range(STEPS):
        if not draw.left:
            break
        maker.generations = [1, *(g for w in world.workers.values() for g in w.live)]
        _coordinator_step(world, maker)
    for _ in range(20):
        world.time_s += 1.0
        _perform(world, world.state.tick(world.now))


def _coordinator_step(world: World, maker: Maker) -> None:
    draw = maker.draw
    match draw.below(6):
        case 0:
            sender = draw.pick([*world.workers, "stranger-1", SUPERVISOR])
            message = heard(maker, "worker to coordinator")
            if message is not None:
                _perform(world, world.state.handle_worker(sender, message, world.now))
        case 1:
            message = heard(maker, "client to coordinator")
            if message is not None:
                _perform(world, world.state.handle_client(b"evil", message, world.now))
        case 2:
            name = f"r{draw.below(100_000)}"
            request = GenerateRequest(
                request_id=RequestId(name), prompt_token_ids=(5, 6, 7), sampling=SAMPLING
            )
            ask = messages.Generate(submission=draw.below(1 << 30), request=request)
            _perform(world, world.state.handle_client(b"good", ask, world.now))
        case 3:
            world.time_s += draw.pick((0.05, 0.6, 5.0))
            _perform(world, world.state.tick(world.now))
        case 4:
            _deliver(world, draw.pick(list(world.workers)))
        case _:
            world.compute()
            world.transfer()
            world.decode()
            for worker in world.workers.values():
                world.to_coordinator[worker.incarnation].append(worker.heartbeat())
                _deliver(world, worker.incarnation)


def _perform(world: World, effects: list[Any]) -> None:
    """What goes to workers goes on their lines; everything must be fit to be sent."""
    for effect in effects:
        if (message := getattr(effect, "message", None)) is not None:
            encode(message)
        incarnation = getattr(effect, "incarnation", None)
        if message is not None and incarnation in world.to_worker:
            world.to_worker[incarnation].append(message)
    world.state.check()


def _deliver(world: World, incarnation: str) -> None:
    while world.to_worker[incarnation]:
        message = world.to_worker[incarnation].popleft()
        try:
            answers = world.workers[incarnation].handle(message)
        except (AssertionError, KeyError):
            continue  # the script was asked what an honest coordinator would not ask
        world.to_coordinator[incarnation].extend(answers)
    while world.to_coordinator[incarnation]:
        message = world.to_coordinator[incarnation].popleft()
        _perform(world, world.state.handle_worker(incarnation, message, world.now))


SAMPLING = SamplingParams()
RESERVATION = Reservation(
    allocation=AllocationId(7),
    tables=tuple((depth * 2, depth * 2 + 1) for depth in range(GEOMETRY.num_depths)),
    hidden_slot=1,
)
PROMPT = 20
G = Generation(1)


def receiver(data: bytes) -> None:
    """A hostile prefill worker: memory comes back only by proof, and in the end all of it does."""
    draw = Draw(data)
    maker = Maker(draw)
    clock = ManualClock()
    d = Receiver(GEOMETRY, clock, worker="d0")
    maker.generations = [1, 2, 3]
    for generation in (1, 2):
        d.open(Generation(generation), "p0-1", RESERVATION, PROMPT)
    arrived: set[int] = set()
    for _ in range(STEPS):
        if not draw.left:
            break
        peer = draw.pick(("p0-1", "p0-1", "p1-1"))
        match draw.below(8):
            case 0 | 1 | 2:
                match _to_receiver(maker) if draw.below(3) else heard(maker, "prefill to decode"):
                    case Chunk() as chunk:
                        d.on_chunk(peer, chunk)
                    case Commit() as commit:
                        d.on_commit(peer, commit)
                    case WriterEnded() as ended:
                        d.on_writer_ended(peer, ended)
            case 3 | 4:
                sequence = draw.pick((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1 << 31))
                generation = Generation(draw.pick(maker.generations))
                allocation = draw.pick((7, 7, 7, 8))
                told = Arrival(generation, allocation, sequence, 0.0, peer)
                d.on_feedback(TransferFeedback(arrived=(told,)))
                if (generation, allocation, peer) == (G, 7, "p0-1"):
                    arrived.add(sequence)
            case 5:
                d.cancel(Generation(draw.pick(maker.generations)), writer_never_started=False)
            case 6:
                clock.advance(draw.pick((0.1, 1.0, 11.0)))
                d.tick()
            case _:
                _peer_event(d, draw)
        for _, answer in d.take_messages():
            encode(answer)
        for event in d.take_events():
            if type(event).__name__ == "ReceiveComplete" and event.generation == G:
                assert len(arrived & set(range(100))) >= GEOMETRY.num_depths + 1, "nothing came"
        d.take_failures()
    d.on_peer_gone("p0-1")
    d.on_writer_dead("p0-1")
    d.tick()
    assert not d.quarantined_from() and not d.expecting(), "its memory never comes back"


def _to_receiver(maker: Maker) -> Any:
    """What P would say of all that it posted, twisted or not."""
    ranges = [(depth, TokenRange(0, PROMPT)) for depth in range(GEOMETRY.num_depths)]
    specs = [*ranges, (None, TokenRange(PROMPT - 1, PROMPT))]
    chunks = tuple(ChunkSpec(n, depth, span) for n, (depth, span) in enumerate(specs))
    generation = Generation(maker.draw.pick(maker.generations))
    said = maker.draw.pick(
        (
            Commit(generation=generation, allocation=7, chunks=chunks),
            WriterEnded(generation=generation, posted=maker.draw.below(6)),
        )
    )
    frame = encode(said)
    return decode(
        "prefill to decode", twisted(frame, maker.draw) if maker.draw.chance(3) else frame
    )


def _peer_event(d: Receiver, draw: Draw) -> None:
    match draw.below(6):
        case 0:
            d.on_peer_gone("p0-1")
        case 1:
            d.on_writer_dead("p0-1")
        case 2:
            d.on_peer_back("p0-1")
        case _:
            pass


def sender(data: bytes) -> None:
    """A hostile decode worker: blocks come back once, after every WRITE has ended."""
    draw = Draw(data)
    clock = ManualClock()
    queued: dict[int, list[int]] = {1: []}

    def drop(generation: Generation) -> list[int]:
        dropped, queued[generation] = queued.get(generation, []), []
        return dropped

    p = Sender(GEOMETRY, clock, worker="p0", drop_queued=drop)
    p.open(G, "d0-1", RESERVATION, PROMPT)
    maker = Maker(draw)
    maker.generations = [1, 2]
    depth, posted, ended, ends = 0, set[int](), set[int](), 0
    admitted = too_late = False  # too late: it was over by then, and is told so once more
    for _ in range(STEPS):
        if not draw.left:
            break
        peer = draw.pick(("d0-1", "d0-1", "d1-1"))
        match draw.below(8):
            case 0 | 1:
                message = heard(maker, "decode to prefill")
                if isinstance(message, messages.Ack):
                    p.on_ack(peer, message.generation)
                elif isinstance(message, messages.Stop):
                    p.on_stop(peer, message.generation)
            case 2 if not admitted:
                admitted, too_late = True, ends > 0
                p.on_prefill_admitted(G, RESERVATION.tables, 2)
            case 3 if depth < GEOMETRY.num_depths:
                last = depth == GEOMETRY.num_depths - 1
                done = FinishedRange(G, depth, TokenRange(0, PROMPT), last, 0.0)
                p.on_ranges_finished([done])
                depth += 1
            case 4:
                queued[1] += [order.sequence for order in p.take_orders()]
                if queued[1]:
                    posted.add(sequence := queued[1].pop(0))
                    progress = SendProgress(G, sequence, 10, 0.0)
                    p.on_feedback(TransferFeedback(posted=(progress,)))
            case 5 if posted - ended:
                sequence = min(posted - ended)
                ended.add(sequence)
                failed = draw.chance(6)
                p.on_feedback(
                    TransferFeedback(failed=(SendFailure(G, sequence, "x", terminal=True),))
                    if failed
                    else TransferFeedback(sent=(SendProgress(G, sequence, 10, 0.0),))
                )
            case 6:
                p.cancel(Generation(draw.pick((1, 2))))
            case _:
                clock.advance(1.0)
                p.tick()
        p.check()
        for _, answer in p.take_messages():
            encode(answer)
        for event in p.take_events():
            ends += 1
            assert event.generation == G and posted == ended, "ended too early"
            assert ends <= 1 + too_late, "ended twice"
        p.take_failures()


def client(data: bytes) -> None:
    """A hostile coordinator against the client's protocol core."""
    draw = Draw(data)
    maker = Maker(draw)
    core = ClientCore()
    maker.names += ["r0", "r1"]
    for _ in range(STEPS):
        if not draw.left:
            break
        match draw.below(5):
            case 0:
                name = RequestId(draw.pick(("r0", "r1")))
                try:
                    core.submit(GenerateRequest(request_id=name, prompt_token_ids=(5,)))
                except RltError:
                    pass
            case 1:
                core.cancel(RequestId(draw.pick(("r0", "r1"))))
            case 2:
                core.ask_statistics()
            case _:
                message = heard(maker, "coordinator to client")
                try:
                    if message is not None:
                        core.receive(message)
                except RltError:
                    core.lose_service("it talks nonsense")
    core.lose_service("over")
    assert core.active() == ()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "decoders": decoders,
    "coordinator": coordinator,
    "receiver": receiver,
    "sender": sender,
    "client": client,
    "decode_engine": decode_engine,
    "prefill_engine": prefill_engine,
}
