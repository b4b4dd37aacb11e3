"""Hears from ZeroMQ when a dialling socket's connection opens and closes. Polls nothing.

Owns the socket's monitor. look() before a message is handled, and whoever hears of a message has
heard before it of every break that lies before it. ZeroMQ dials again by itself, but not after an
oversized or a broken frame: it gives the connection up without a word, and the socket is deaf and
dumb from then on. Whoever dialled hears that here.
"""

import asyncio
import struct
from collections.abc import Callable

import zmq

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = zmq.EVENT_DISCONNECTED
_DIALS = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECTED
_HEAD = struct.Struct("=hi")  # event, value
GIVEN_UP_S = 0.5  # a closed connection that is not dialled again after this never is; usually 1 ms


class ConnectionWatch:
    """on_change: called on the loop, with True once messages can pass, and False when they cannot
    any more. on_given_up: it closed, and ZeroMQ does not dial again."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        *,
        on_change: Callable[[bool], None],
        on_given_up: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched = socket
        self._on_change = on_change
        self._on_given_up = on_given_up
        self._down = False  # and nothing has been heard of another attempt
        self._verdict: asyncio.TimerHandle | None = None
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_UP | _DOWN | _DIALS)
        self._loop.add_reader(self._monitor.fileno(), self.look)
        self.look()  # else its descriptor might never say anything

    def look(self) -> None:
        while not self._monitor.closed:
            try:
                head, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, _ = _HEAD.unpack(head)
            self._wait_for_dial(event)
            if event in (_UP, _DOWN):
                self._on_change(event == _UP)

    def close(self) -> None:
        if not self._monitor.closed:
            self._wait_for_dial(_UP)
            self._loop.remove_reader(self._monitor.fileno())
            self._watched.disable_monitor()
            self._monitor.close(linger=0)

    def _wait_for_dial(self, event: int) -> None:
        """Begins with the break, ends with any other event."""
        if self._verdict is not None:
            self._verdict.cancel()
            self._verdict = None
        self._down = event == _DOWN
        if self._down:
            self._verdict = self._loop.call_later(GIVEN_UP_S, self._judge)

    def _judge(self) -> None:
        self._verdict = None
        self.look()
        if self._down and self._verdict is None and not self._monitor.closed:
            self._on_given_up()
