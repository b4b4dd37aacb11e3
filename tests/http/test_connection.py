"""What one HTTP connection may take: bytes that are no body, time, a place behind another."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import uvloop
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlt.coordinator.http import connection
from rlt.coordinator.http.server import HttpServer

from ..coordinator.running import Running
from ..coordinator.workers import expected_tokens
from .calls import call, open_stream
from .scripted import front

COMPLETIONS = "/v1/completions"
SHORT_S = 0.5  # for PATIENCE_S
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    b"content-type: application/json\r\n\r\n"
)
WRONG = CHUNKED.replace(b"application/json", b"text/plain")  # answered before its body has come


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, str]]:
    with front() as pair:
        yield pair


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", SHORT_S)


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=10.0) as caller:
        yield caller


def post(body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(raw), raw)
    )


def is_closed_within(caller: socket.socket, seconds: float, trickle: bytes = b"") -> bool:
    """Sends the trickle all the time."""
    caller.settimeout(0.05)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            caller.sendall(trickle)
            if not caller.recv(65536):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    ("sent", "more"),
    [
        (WRONG + b"0\r\n", b"".join(b"x%d: %s\r\n" % (n, b"v" * 1000) for n in range(64))),
        (WRONG + b"0\r\nx: ", b"v" * 65536),
        (WRONG + b"5;", b"v" * 65536),
    ],
    ids=["trailers", "an endless trailer", "an endless chunk extension"],
)
def test_what_is_no_body_is_bounded_behind_the_head_too(
    served: tuple[Running, str], sent: bytes, more: bytes
) -> None:
    with connected(served[1]) as caller:
        caller.sendall(sent)
        assert b" 415 " in caller.recv(4096)
        with pytest.raises(ConnectionError):
            for _ in range(200):
                caller.sendall(more)


def test_a_request_with_trailers_is_served_without_them(served: tuple[Running, str]) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
    ask = CHUNKED + b"%x\r\n%s\r\n0\r\nx-a: b\r\n\r\n" % (len(body), body)
    with connected(served[1]) as caller:
        for _ in range(2):  # the connection stays usable
            caller.sendall(ask)
            assert b" 200 " in caller.recv(65536)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("sent", "trickle"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nx: ", b""),
        (b"GET /health HTTP/1.1\r\nx: ", b"a"),
        (WRONG + b"ffff\r\n", b"a"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
    ],
    ids=["nothing", "half a head", "a slow head", "a slow body, answered", "blank lines"],
)
def test_whoever_does_not_ask_in_time_is_cut(
    served: tuple[Running, str], sent: bytes, trickle: bytes
) -> None:
    with connected(served[1]) as caller:
        caller.sendall(sent)
        assert is_closed_within(caller, 4.0, trickle)


@pytest.mark.usefixtures("short")
def test_whoever_waits_for_an_answer_is_not_cut() -> None:
    with front() as (service, address):
        service.call(lambda: setattr(service.team, "step_s", 0.1))
        start_s = time.monotonic()
        answer = call(
            address, COMPLETIONS, {"prompt": [1], "max_tokens": 15, "return_token_ids": True}
        )
        assert time.monotonic() - start_s > 2 * SHORT_S
        assert tuple(answer.body["choices"][0]["token_ids"]) == expected_tokens((1,), 15)


@pytest.mark.usefixtures("short")
def test_a_reader_who_stalls_for_ever_keeps_nothing_here() -> None:
    with front(client_backlog=50) as (service, address):
        state = service.service.state
        body = {"prompt": [1], "max_tokens": 1000, "n": 8, "return_token_ids": True}
        with open_stream(address, COMPLETIONS, body, receive_buffer=4096):
            service.eventually(lambda: len(service.service.local) == 1)
            service.eventually(lambda: len(service.service.local) == 0, timeout_s=20.0)
            assert state.statistics()["live_requests"] == 0


def test_a_slow_reader_is_not_cut_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    patience_s, pieces, piece = 1.0, 30, 128 << 10
    monkeypatch.setattr(connection, "PATIENCE_S", patience_s)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(bytes(pieces * piece))(scope, receive, send)

    async def read_slowly() -> float:
        server = HttpServer()
        parts = urlsplit(server.bind("127.0.0.1:0"))
        server.start(app)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=4096)
        try:
            start_s = time.monotonic()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(pieces):
                await reader.readexactly(piece)
                await asyncio.sleep(0.1)
            return time.monotonic() - start_s
        finally:
            writer.close()
            await server.close()

    assert uvloop.run(read_slowly()) > 2 * patience_s


def test_a_request_behind_a_running_one_ends_both(caplog: pytest.LogCaptureFixture) -> None:
    with front() as (service, address):
        service.call(lambda: setattr(service.team, "step_s", 0.05))
        state = service.service.state
        ask = post({"prompt": [1], "max_tokens": 1000})
        with connected(address) as caller:
            caller.sendall(ask)
            service.eventually(lambda: state.statistics()["live_requests"] == 1)
            caller.sendall(ask)
            service.eventually(lambda: state.statistics()["live_requests"] == 0, timeout_s=1.0)
            assert is_closed_within(caller, 2.0)
        with connected(address) as caller:
            caller.sendall(ask + ask)
            assert is_closed_within(caller, 2.0)
        service.eventually(lambda: len(service.service.local) == 0)
        assert state.statistics()["live_requests"] == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
