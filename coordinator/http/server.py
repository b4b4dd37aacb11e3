"""The listening socket and uvicorn, inside the coordinator's own event loop.

Owns the socket, the server's task and its end. Signals are the coordinator's business. The default
address is a known port, or any free one where that is taken; a named address is had or refused.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from ...runtime.errors import ConfigError
from .connection import Connection

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
BACKLOG = 2048
SEND_BUFFER_BYTES = 128 << 10  # the kernel's share of a slow reader's backlog
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
CLOSE_S = 2.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """bind() first; serve() until close()."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self, address: str) -> str:
        """address: HOST:PORT, or auto. Returns the URL. Raises ConfigError."""
        if address == "auto":
            try:
                self._socket = _listener("127.0.0.1", DEFAULT_PORT)
            except OSError:
                self._socket = _listener("127.0.0.1", 0)
        else:
            host, _, port = address.rpartition(":")
            try:
                self._socket = _listener(host.strip("[]"), int(port))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen at http {address}: {error.strerror or error}; choose another "
                    "address, or port 0 for any free one"
                ) from error
        host, port_number = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port_number}" if ":" in host else f"http://{host}:{port_number}"

    def start(self, app: ASGIApp) -> None:
        assert self._socket is not None
        config = uvicorn.Config(
            app,
            loop="none",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(CLOSE_S),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Responses that run get a moment to end; then everything is cut."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=2 * CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()


def _listener(host: str, port: int) -> socket.socket:
    """Listens at once, so that nobody else can have the port between the two steps."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
