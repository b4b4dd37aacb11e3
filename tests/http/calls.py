"""Plain HTTP for tests: what was asked as written, what came back unread by any client library."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.body["error"])


def call(
    address: str,
    path: str,
    body: object = None,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    method: str | None = None,
    timeout_s: float = 20.0,
) -> Answer:
    """body: sent as JSON; raw: sent as it is."""
    sent = raw if raw is not None or body is None else json.dumps(body).encode()
    method = method or ("GET" if sent is None else "POST")
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request(
            method, path, sent, {"content-type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        text = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        return Answer(response.status, found, json.loads(text) if is_json else text)
    finally:
        connection.close()


@contextmanager
def open_stream(
    address: str, path: str, body: dict[str, Any], *, receive_buffer: int | None = None
) -> Iterator[http.client.HTTPResponse]:
    """A streamed answer of which nothing was read beyond its head."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20.0)
    if receive_buffer is not None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(20.0)
        sock.connect((parts.hostname, parts.port))
        connection.sock = sock
    sent = json.dumps({**body, "stream": True}).encode()
    connection.request("POST", path, sent, {"content-type": "application/json"})
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


@contextmanager
def open_later(address: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request that is sent and not waited for; the connection closes with the block."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20.0)
    try:
        connection.request(
            "POST", path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        yield
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each event, [DONE] too."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\n")
