"""How pairs open between real sockets: who is answered, and what a peer cannot break.

Prefill's PairBook and decode's PairDesk, each with a WorkerConnector over a scripted wire.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq

from rlt.connector.codec import Decoder, encode
from rlt.connector.messages import (
    PROTOCOL_VERSION,
    Ack,
    Commit,
    DecodeToPrefill,
    PairClosed,
    PairHello,
    PairReady,
    PairRefused,
    PairWelcome,
    Peer,
    PrefillToDecode,
    Stop,
)
from rlt.connector.nixl_transport import describe
from rlt.connector.worker_connector import WorkerConnector
from rlt.decode.pairs import MOST_HELLO_BYTES, MOST_STRANGERS, PairDesk, PeerChange
from rlt.prefill.pairs import REPEAT_S, PairBook
from rlt.runtime.clock import SystemClock
from rlt.runtime.errors import TransportError
from rlt.runtime.plans import SendOrder
from rlt.runtime.types import Generation, TokenRange

from .pools import canary_pools, geometry
from .scripted_transport import ScriptedTransport, Wire

P, D = "prefill-0-aa", "decode-0-bb"
Ends = Callable[[str], WorkerConnector]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def connector(wire: Wire) -> Ends:
    def make(name: str) -> WorkerConnector:
        shape = geometry()
        pools = canary_pools(shape, blocks=4, rows=1)
        transport = ScriptedTransport(wire, describe(pools.kv, pools.hidden, shape), name)
        return WorkerConnector(
            transport, clock=SystemClock(), max_inflight_bytes=1 << 20, transfer_timeout_s=1.0
        )

    return make


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlt-p") as path:
        yield Path(path)


def peer(incarnation: str, endpoint: str = "") -> Peer:
    return Peer(worker=incarnation[:-3], incarnation=incarnation, role="", endpoint=endpoint)


def hello(connector: WorkerConnector, incarnation: str = P, **changes: object) -> PairHello:
    fields = {
        "worker": incarnation[:-3],
        "incarnation": incarnation,
        "protocol_version": PROTOCOL_VERSION,
        "fingerprint": "f",
        "pool": connector.pool,
        "agent_metadata": connector.agent_metadata(),
    }
    return PairHello(**{**fields, **changes})  # type: ignore[arg-type]


async def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within 5 s: {what}")


# D's side


@dataclass
class Desk:
    """A PairDesk, and whoever dials it by hand."""

    desk: PairDesk
    endpoint: str
    heard: list[tuple[str, object]]
    context: "zmq.Context[zmq.Socket[bytes]]"
    sockets: ExitStack

    def dial(self, identity: str) -> "zmq.Socket[bytes]":
        socket = self.sockets.enter_context(self.context.socket(zmq.DEALER))
        socket.set(zmq.IDENTITY, identity.encode())
        socket.set(zmq.LINGER, 0)
        socket.connect(self.endpoint)
        return socket


def at_desk(
    connector: WorkerConnector, folder: Path, act: Callable[[Desk], Awaitable[None]]
) -> None:
    async def run() -> None:
        heard: list[tuple[str, object]] = []
        pairs = PairDesk(
            connector,
            incarnation=D,
            fingerprint="f",
            on_message=lambda who, message: heard.append((who, message)),
        )
        with zmq.Context() as context, closing(pairs), ExitStack() as sockets:
            endpoint = pairs.listen(f"ipc://{folder}/d.sock")
            await act(Desk(pairs, endpoint, heard, context, sockets))

    asyncio.run(run())


async def answer(socket: "zmq.Socket[bytes]") -> DecodeToPrefill:
    await until(lambda: bool(socket.poll(0)), "an answer")
    return Decoder[DecodeToPrefill](DecodeToPrefill).decode(socket.recv())


def test_only_who_the_coordinator_lists_is_welcomed_and_only_as_long(
    connector: Ends, folder: Path
) -> None:
    """An expelled writer that says hello again must not get an agent that faces it: its memory
    may have been given to others."""
    mine, theirs = connector(D), connector(P)

    async def act(at: Desk) -> None:
        socket = at.dial(P)
        socket.send(encode(hello(theirs)))
        await until(lambda: at.desk.strangers == 1, "the stranger is counted")
        assert at.desk.count() == 0
        assert at.desk.update((peer(P),)) == PeerChange(gone=(), new=(P,))
        first = await answer(socket)
        assert isinstance(first, PairWelcome), "it said hello before it was listed"
        socket.send(encode(hello(theirs)))
        assert await answer(socket) == first, "a pair that is opened anew finds the same agent"
        assert at.desk.update(()) == PeerChange(gone=(P,), new=())
        socket.send(encode(hello(theirs)))
        await until(lambda: at.desk.strangers == 2, "the expelled one is a stranger")
        assert at.desk.count() == 0

    at_desk(mine, folder, act)


def test_hellos_of_strangers_are_remembered_up_to_a_bound(connector: Ends, folder: Path) -> None:
    mine, theirs = connector(D), connector(P)
    fat = hello(theirs, fingerprint="x" * MOST_HELLO_BYTES)

    async def act(at: Desk) -> None:
        names = [f"prefill-{number}-aa" for number in range(MOST_STRANGERS + 1)]
        for name in names:
            at.dial(name).send(encode(hello(theirs, incarnation=name)))
        await until(lambda: at.desk.strangers == len(names), "all of them")
        fat_one = at.dial("fat")
        fat_one.send(encode(fat))
        await until(lambda: at.desk.refused == 1, "and the fat one")
        assert len(at.desk._hellos) == MOST_STRANGERS and "fat" not in at.desk._hellos

    at_desk(mine, folder, act)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"protocol_version": 99}, "99"),
        ({"fingerprint": "g"}, "fingerprint"),
        ({"agent_metadata": b"no metadata"}, "metadata"),
        ({"incarnation": "prefill-9-zz"}, "prefill-9-zz"),
    ],
)
def test_a_pair_that_does_not_match_is_refused_by_name(
    connector: Ends, folder: Path, changes: dict[str, object], word: str
) -> None:
    mine, theirs = connector(D), connector(P)

    async def act(at: Desk) -> None:
        at.desk.update((peer(P),))
        socket = at.dial(P)
        socket.send(encode(hello(theirs, **changes)))
        refused = await answer(socket)
        assert isinstance(refused, PairRefused) and word in refused.reason

    at_desk(mine, folder, act)


def test_a_wire_that_does_not_work_is_no_refusal_and_the_next_hello_tries_again(
    wire: Wire, connector: Ends, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = connector(D), connector(P)

    async def act(at: Desk) -> None:
        at.desk.update((peer(P),))
        socket = at.dial(P)
        for _ in range(3):
            wire.ends[D].fault = TransportError("no route")
            socket.send(encode(hello(theirs)))
            await until(lambda: wire.ends[D].fault is None, "it was tried")
        socket.send(encode(hello(theirs)))
        assert isinstance(await answer(socket), PairWelcome)
        assert not socket.poll(0)
        assert caplog.text.count("no route") == 1

    at_desk(mine, folder, act)


def test_what_strangers_send_is_passed_on_under_their_own_name_or_counted(
    connector: Ends, folder: Path
) -> None:
    async def act(at: Desk) -> None:
        socket = at.dial("somebody")
        commit = Commit(generation=Generation(1), allocation=1, chunks=())
        for frame in (b"", b"\xc1", encode(Ack(generation=Generation(1))), encode(commit)):
            socket.send(frame)
        await until(lambda: bool(at.heard), "the good one")
        assert at.heard == [("somebody", commit)] and at.desk.malformed == 3

    at_desk(connector(D), folder, act)


# P's side


@dataclass
class Book:
    """A PairBook, and a decode worker played by hand."""

    book: PairBook
    router: "zmq.Socket[bytes]"
    endpoint: str
    told: list[PairReady | PairClosed] = field(default_factory=list)
    heard: list[tuple[str, object]] = field(default_factory=list)

    async def hello(self) -> PairHello:
        await until(lambda: bool(self.router.poll(0)), "a hello")
        _, frame = self.router.recv_multipart()
        said = Decoder[PrefillToDecode](PrefillToDecode).decode(frame)
        assert isinstance(said, PairHello)
        return said

    def say(self, message: DecodeToPrefill) -> None:
        self.router.send_multipart([P.encode(), encode(message)])


def with_book(
    connector: WorkerConnector, folder: Path, act: Callable[[Book], Awaitable[None]]
) -> None:
    async def run() -> None:
        told: list[PairReady | PairClosed] = []
        heard: list[tuple[str, object]] = []
        book = PairBook(
            lambda: hello(connector),
            connector,
            incarnation=P,
            on_message=lambda who, message: heard.append((who, message)),
            report=told.append,
        )
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router, closing(book):
            endpoint = f"ipc://{folder}/d.sock"
            router.bind(endpoint)
            await act(Book(book, router, endpoint, told, heard))

    asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["", "garbage", "tcp://", "ipc:///" + "x" * 200])
def test_a_decode_worker_at_an_address_that_cannot_be_dialled_is_a_refused_pair(
    connector: Ends, folder: Path, endpoint: str
) -> None:
    """It is the decode worker's own word: whatever it is, the prefill worker goes on."""

    async def act(at: Book) -> None:
        at.book.update((peer(D, endpoint),))
        [closed] = at.told
        assert isinstance(closed, PairClosed) and closed.refused and "dial" in closed.reason
        assert not at.book.ready(D)
        assert at.book.update(()) == [D]

    with_book(connector(P), folder, act)


def test_the_first_answer_to_a_hello_stands(connector: Ends, folder: Path) -> None:
    mine, theirs = connector(P), connector(D)

    async def act(at: Book) -> None:
        at.book.update((peer(D, at.endpoint),))
        said = await at.hello()
        metadata = theirs.accept_peer(P, said.agent_metadata, said.pool)
        welcome = PairWelcome(incarnation=D, pool=theirs.pool, agent_metadata=metadata)
        refused = PairRefused(incarnation=D, reason="changed its mind")
        other = msgspec.structs.replace(welcome, incarnation="decode-0-cc")
        for answer in (other, welcome, refused, welcome, Stop(generation=Generation(1))):
            at.say(answer)
        await until(lambda: bool(at.heard), "the Stop after them")
        assert at.told == [PairReady(decode=D)] and at.book.ready(D)

    with_book(mine, folder, act)


def test_a_pair_that_breaks_is_closed_and_opened_anew_once_its_writes_have_ended(
    folder: Path,
) -> None:
    wire, shape = Wire(), geometry()
    ends = []
    for name in (P, D):
        pools = canary_pools(shape, blocks=4, rows=1)
        end = ScriptedTransport(wire, describe(pools.kv, pools.hidden, shape), name, held=True)
        made = WorkerConnector(
            end, clock=SystemClock(), max_inflight_bytes=1 << 20, transfer_timeout_s=9.0
        )
        ends.append((end, made))
    (p_end, mine), (_, theirs) = ends

    async def act(at: Book) -> None:
        at.book.update((peer(D, at.endpoint),))
        said = await at.hello()
        metadata = theirs.accept_peer(P, said.agent_metadata, said.pool)
        welcome = PairWelcome(incarnation=D, pool=theirs.pool, agent_metadata=metadata)
        at.say(welcome)
        await until(lambda: at.book.ready(D), "the pair")
        order = SendOrder(
            generation=Generation(1),
            peer=D,
            sequence=0,
            depth=None,
            range=TokenRange(0, 1),
            blocks=(),
            peer_blocks=(),
            hidden_slot=0,
            peer_hidden_slot=0,
            allocation=1,
        )
        mine.post([order])
        at.book.break_off(D, "cut")
        at.book.break_off(D, "cut again")
        assert at.told == [PairReady(decode=D), PairClosed(decode=D, reason="cut")]
        assert not at.book.ready(D)
        at.say(welcome)  # the answer to a hello of before
        at.say(Stop(generation=Generation(1)))
        await until(lambda: bool(at.heard), "the Stop after it")
        await asyncio.sleep(2 * REPEAT_S)
        assert not at.book.ready(D) and not at.router.poll(0), "its WRITE still runs"
        [ticket] = p_end.running
        p_end.finish(ticket)
        mine.poll()
        await at.hello()
        at.say(msgspec.structs.replace(welcome, agent_metadata=b"not now"))
        await at.hello()  # it matched once: what fails now may work later
        at.say(welcome)
        await until(lambda: at.book.ready(D), "the pair again")
        at.book.report_again()
        assert at.told[2:] == [PairReady(decode=D)] * 2

    with_book(mine, folder, act)


def test_a_wire_that_does_not_work_at_first_is_tried_again_with_the_next_hello(
    wire: Wire, connector: Ends, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = connector(P), connector(D)

    async def act(at: Book) -> None:
        at.book.update((peer(D, at.endpoint),))
        for attempt in range(3):
            said = await at.hello()
            metadata = theirs.accept_peer(P, said.agent_metadata, said.pool)
            wire.ends[P].fault = TransportError("no route") if attempt < 2 else None
            at.say(PairWelcome(incarnation=D, pool=theirs.pool, agent_metadata=metadata))
        await until(lambda: at.book.ready(D), "the pair")
        assert at.told == [PairReady(decode=D)]
        assert caplog.text.count("no route") == 1

    with_book(mine, folder, act)


def test_a_welcome_that_does_not_fit_is_a_refused_pair(connector: Ends, folder: Path) -> None:
    mine, theirs = connector(P), connector(D)

    async def act(at: Book) -> None:
        at.book.update((peer(D, at.endpoint),))
        await at.hello()
        at.say(PairWelcome(incarnation=D, pool=theirs.pool, agent_metadata=b"\xff" * 99))
        await until(lambda: bool(at.told), "a word to the coordinator")
        [closed] = at.told
        assert isinstance(closed, PairClosed) and closed.refused
        assert not at.book.ready(D)
        at.book.report_again()
        assert at.told == [closed] * 2

    with_book(mine, folder, act)
