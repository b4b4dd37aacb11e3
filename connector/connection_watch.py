"""Hears from ZeroMQ when a dialling socket's connection opens and closes. Polls nothing.

Owns the socket's monitor. look() before a message is handled, and whoever hears of a message has
heard before it of every break that lies before it.
"""

import asyncio
import struct
from collections.abc import Callable

import zmq

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = zmq.EVENT_DISCONNECTED
_HEAD = struct.Struct("=hi")  # event, value


class ConnectionWatch:
    """on_change: called on the loop, with True once messages can pass, and False when they cannot
    any more."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_change: Callable[[bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched = socket
        self._on_change = on_change
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_UP | _DOWN)
        self._loop.add_reader(self._monitor.fileno(), self.look)
        self.look()  # else its descriptor might never say anything

    def look(self) -> None:
        while not self._monitor.closed:
            try:
                head, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, _ = _HEAD.unpack(head)
            if event in (_UP, _DOWN):
                self._on_change(event == _UP)

    def close(self) -> None:
        if not self._monitor.closed:
            self._loop.remove_reader(self._monitor.fileno())
            self._watched.disable_monitor()
            self._monitor.close(linger=0)
