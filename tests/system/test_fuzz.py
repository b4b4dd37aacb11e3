"""Nonsense at every socket of a running service: it is counted, and nobody else notices.

While each socket is fed, an ordinary client goes on asking and must get the same tokens every time;
afterwards the same processes run, and nothing is held anywhere.
"""

import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from rlt.connector.codec import Decoder, encode
from rlt.connector.messages import (
    PROTOCOL_VERSION,
    Ack,
    AskStatistics,
    Cancel,
    CancelRequest,
    Chunk,
    ChunkSpec,
    Commit,
    CoordinatorToWorker,
    Deltas,
    Generate,
    GenerationFailed,
    GenerationReleased,
    Heartbeat,
    Hello,
    LiveGeneration,
    Output,
    OutputRow,
    PairHello,
    PairReady,
    PairWelcome,
    PrefillToDecode,
    Register,
    Reserve,
    Reserved,
    Shutdown,
    Stop,
    WriterEnded,
)
from rlt.runtime.events import Reservation
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import AllocationId, Generation, RequestId, SamplingParams, TokenRange

from .service import SMALL, Service, eventually, running
from .two_engines import Side

pytestmark = pytest.mark.system

G = Generation(5)
PROMPT = [5, 6, 7]
LARGE = 9 << 20  # more than a client's frame may have
CORPUS: tuple[msgspec.Struct, ...] = (
    Hello(),
    AskStatistics(ask=1),
    CancelRequest(request_id=RequestId("nobody's")),
    Generate(
        submission=1,
        request=GenerateRequest(
            request_id=RequestId("r" * 1000), prompt_token_ids=(5,) * 1000, deadline_s=1e-9
        ),
    ),
    Deltas(deltas=()),
    Heartbeat(peers_version=0, live=(LiveGeneration(G, "x", 3),), statistics={"x": 1.0}),
    PairReady(decode="decode-0"),
    Output(rows=(OutputRow(generation=G, start_index=0, token_ids=(-1,), exit_depths=(9,)),)),
    GenerationFailed(generation=G, code="x", error="y"),
    GenerationReleased(generation=G),
    Cancel(generation=G),
    Shutdown(),
    Commit(generation=G, allocation=1, chunks=(ChunkSpec(0, 0, TokenRange(0, 3)),)),
    Chunk(generation=G, sequence=0, depth=None, range=TokenRange(2, 1)),
    WriterEnded(generation=G, posted=-1),
    Ack(generation=G),
    Stop(generation=G),
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(1, 1, *SMALL) as service:
        yield service


@pytest.fixture(scope="module")
def side() -> Iterator[Side]:
    """Memory, model and connector of a worker that this test plays."""
    side = Side("fake-0-aa", lambda transport: transport, num_blocks=1024)
    yield side
    side.executor.shutdown()
    side.connector.close()


def endpoints(service: Service) -> dict[str, str]:
    [folder] = service.folder.glob("s-*")
    sockets = {"workers": folder / "workers.sock", "peers": folder / "decode-0.sock"}
    return {"clients": service.address, **{name: f"ipc://{path}" for name, path in sockets.items()}}


@contextmanager
def unharmed(service: Service) -> Iterator[None]:
    """An ordinary client's requests are answered, and alike, for as long as the block runs."""
    processes = service.children()
    stop = threading.Event()
    answers: list[object] = []

    def ask() -> None:
        with service.client() as client:
            while not stop.is_set():
                try:
                    answers.append(client.generate(PROMPT, max_tokens=5, timeout_s=30.0).token_ids)
                except Exception as error:
                    answers.append(error)

    with service.client() as client:
        expected = client.generate(PROMPT, max_tokens=5).token_ids
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
            eventually(lambda: len(answers) > 2, "the others are answered meanwhile", 60.0)
        finally:
            stop.set()
            asking.join()
        assert set(map(str, answers)) == {str(expected)}
        assert service.children() == processes
        eventually(lambda: service.at_rest(client), lambda: f"still held: {service.held}")


@contextmanager
def dial(endpoint: str, identity: bytes | None = None) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 2000)
        if identity is not None:
            socket.set(zmq.IDENTITY, identity)
        socket.connect(endpoint)
        yield socket


def damaged(draw: random.Random) -> list[bytes]:
    """One or more frames: of another direction, cut, changed, random, deep, or too many."""
    frame = bytearray(encode(draw.choice(CORPUS)))
    match draw.randrange(8):
        case 0:
            return [bytes(frame[: draw.randrange(len(frame))])]
        case 1:
            for _ in range(draw.choice((1, 3, 20))):
                frame[draw.randrange(len(frame))] = draw.randrange(256)
        case 2:
            return [draw.randbytes(draw.choice((0, 1, 10, 1000)))]
        case 3:
            return [draw.choice((b"\x91", b"\x81\xa1a")) * 10_000]
        case 4:
            return [bytes(frame)] * draw.choice((2, 3, 20))
        case 5:
            return [b"\xdb\xff\xff\xff\xff" + bytes(frame)]
    return [bytes(frame)]


@pytest.mark.parametrize("name", ["clients", "workers", "peers"])
def test_nonsense_is_counted_and_harms_nobody(service: Service, name: str) -> None:
    draw = random.Random(name)
    before = malformed(service)
    with unharmed(service):
        for peer in range(20):
            with dial(
                endpoints(service)[name], draw.choice((None, b"\xff\x00%d" % peer))
            ) as socket:
                for _ in range(200):
                    socket.send_multipart(damaged(draw))
        with dial(endpoints(service)[name]) as socket:
            socket.send(bytes(LARGE))
    eventually(lambda: malformed(service) >= before + 1000, "they are counted")


def malformed(service: Service) -> float:
    with service.client() as client:
        workers = service.workers(client).values()
        counted: Any = client.statistics()
    return float(counted["malformed_frames"] + sum(w["malformed_frames"] for w in workers))


def test_a_client_that_asks_and_asks_and_takes_nothing_harms_nobody(service: Service) -> None:
    with unharmed(service), dial(service.address) as socket:
        for number in range(300):
            request = GenerateRequest(
                request_id=RequestId(f"r{number}"),
                prompt_token_ids=(5, 6),
                sampling=SamplingParams(max_tokens=10),
            )
            for _ in range(2):
                socket.send(encode(Generate(submission=number, request=request)))
            socket.send(encode(AskStatistics(ask=number)))


# A worker that is none

PROMISED = Reservation(
    allocation=AllocationId(1), tables=((1,), (2,), (3,), (4,)), hidden_slot=1, cached_tokens=0
)
IMPOSSIBLE: tuple[dict[str, object], ...] = (
    {"tables": ()},
    {"tables": ((1,),)},
    {"tables": ((10**6,),) * 4},
    {"tables": ((-1,),) * 4},
    {"hidden_slot": -1},
    {"hidden_slot": 10**9},
    {"allocation": -1},
    {"cached_tokens": 3},
    {"cached_tokens": -5},
)


class FakeDecode:
    """Registers, opens a real pair, and promises what it does not have."""

    def __init__(self, side: Side, dialled: str, listen: str) -> None:
        self._side = side
        self._incarnation = "fake-0-aa"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers = self._context.socket(zmq.ROUTER)
        self._peers.bind(listen)
        self._link = self._context.socket(zmq.DEALER)
        self._link.set(zmq.IDENTITY, self._incarnation.encode())
        self._link.connect(dialled)
        register = Register(
            worker="fake-0",
            incarnation=self._incarnation,
            role="decode",
            pid=1,
            protocol_version=PROTOCOL_VERSION,
            model=side.executor.capabilities().model,
            pool=side.connector.pool,
            limits=side.executor.admission_limits(),
            peer_endpoint=listen,
        )
        self._link.send(encode(register))

    def promise(self, impossible: Iterable[dict[str, object]]) -> None:
        """Answer one Reserve with each of them."""
        for changes in impossible:
            ask = self._next_reserve()
            promised = msgspec.structs.replace(PROMISED, **changes)
            self._link.send(encode(Reserved(generation=ask.generation, reservation=promised)))

    def _next_reserve(self) -> Reserve:
        decoder: Decoder[CoordinatorToWorker] = Decoder(CoordinatorToWorker)
        end_s = time.monotonic() + 30.0
        while time.monotonic() < end_s:
            if self._peers.poll(10):
                self._welcome(*self._peers.recv_multipart())
            if self._link.poll(10):
                match decoder.decode(self._link.recv()):
                    case Reserve() as ask:
                        return ask
                    case Cancel(generation=generation):
                        self._link.send(encode(GenerationReleased(generation=generation)))
        raise AssertionError("nobody asks it any more")

    def _welcome(self, identity: bytes, frame: bytes) -> None:
        decoder: Decoder[PrefillToDecode] = Decoder(PrefillToDecode)
        hello = decoder.decode(frame)
        if isinstance(hello, PairHello):
            pool, connector = self._side.connector.pool, self._side.connector
            metadata = connector.accept_peer(hello.incarnation, hello.agent_metadata, hello.pool)
            welcome = PairWelcome(incarnation=self._incarnation, pool=pool, agent_metadata=metadata)
            self._peers.send_multipart([identity, encode(welcome)])

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_a_decode_worker_that_promises_the_impossible_gets_nothing_and_the_others_serve(
    service: Service, side: Side
) -> None:
    with unharmed(service), tempfile.TemporaryDirectory(prefix="rlt-f") as folder:
        fake = FakeDecode(side, endpoints(service)["workers"], f"ipc://{folder}/fake.sock")
        with closing(fake):
            fake.promise(IMPOSSIBLE)
        with service.client() as client:
            eventually(lambda: "fake-0" not in service.workers(client), "it is gone")
