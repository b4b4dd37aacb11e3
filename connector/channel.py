"""ZeroMQ sockets on the asyncio loop: ROUTER and DEALER, drained in batches, never blocking.

Owns one socket each and its counters. Knows nothing of what messages mean. A socket's descriptor is
edge-triggered: after every receive AND every send the socket must be looked at again, which is why
nobody else may touch it.
"""

import asyncio
import logging
import resource
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from ..runtime.errors import ConfigError
from .codec import MAX_FRAME_BYTES, Decoder, MalformedFrame, encode
from .connection_watch import ConnectionWatch

logger = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out", bound=msgspec.Struct)

BATCH = 256  # messages handled per wake-up before other work of the loop gets its turn,
SLICE_S = 0.02  # or fewer, if they have taken so long
LINGER_MS = 500


class SendResult(Enum):
    SENT = "sent"
    GONE = "gone"  # no such peer (any more)
    FULL = "full"  # its high-water mark is reached


class _Channel(Generic[In]):
    def __init__(
        self,
        kind: int,
        incoming: Any,
        high_water: int,
        receive_high_water: int | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.SNDHWM, high_water)
        self._socket.set(zmq.RCVHWM, receive_high_water or high_water)
        self._socket.set(zmq.MAXMSGSIZE, max_bytes)
        self._decoder: Decoder[In] = Decoder(incoming, max_bytes)
        self._again: asyncio.Handle | None = None
        self.malformed = 0  # frames dropped because no message of this direction was in them
        self.unsent = 0  # sends refused: peer gone or its mark reached
        self._loop.add_reader(self._socket.fileno(), self._drain)

    def _deliver(self, frames: list[bytes]) -> None:
        raise AssertionError("a channel is a RouterChannel or a DealerChannel")

    def _look_again(self) -> None:
        if self._again is None and not self._socket.closed:
            self._again = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        end_s = self._loop.time() + SLICE_S
        for _ in range(BATCH):
            if self._socket.closed:
                return
            if self._loop.time() > end_s:
                break
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._deliver(frames)
            except MalformedFrame as error:
                self._note_malformed(error)
        self._look_again()

    def _note_malformed(self, error: MalformedFrame) -> None:
        """Told at the first, second, fourth, ...: who sends many must not fill the log."""
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:
            logger.warning("dropped a malformed frame (%d so far): %s", self.malformed, error)

    def _send(self, frames: list[bytes]) -> SendResult:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.unsent += 1
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.unsent += 1
            return SendResult.GONE
        finally:
            self._look_again()
        return SendResult.SENT

    def close(self) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        if self._again is not None:
            self._again.cancel()
        self._socket.close()


class RouterChannel(_Channel[In], Generic[In, Out]):
    """Listens; many peers dial in, each known by its ROUTER identity."""

    def __init__(
        self,
        incoming: Any,
        on_message: Callable[[bytes, In], None],
        *,
        high_water: int = 10_000,
        receive_high_water: int | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """high_water: frames on their way to one peer, or from it unless receive_high_water."""
        super().__init__(zmq.ROUTER, incoming, high_water, receive_high_water, max_bytes)
        # A peer that dials again under its identity replaces its dead connection.
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._on_message = on_message
        self._file: str | None = None

    def bind(self, endpoint: str) -> str:
        """Listen at `endpoint`; returns the real one (with tcp's port 0 or * filled in)."""
        _lift_descriptor_limit()
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen at {endpoint}: {error.strerror}; choose another address"
            ) from error
        real = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        if real.startswith("ipc://"):
            self._file = real.removeprefix("ipc://")
        self._look_again()
        return real

    def send(self, peer: bytes, message: Out) -> SendResult:
        return self._send([peer, encode(message)])

    def _deliver(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise MalformedFrame(f"{len(frames)} frames instead of 2")
        self._on_message(frames[0], self._decoder.decode(frames[1]))

    def close(self) -> None:
        super().close()
        if self._file is not None:
            Path(self._file).unlink(missing_ok=True)


class DealerChannel(_Channel[In], Generic[In, Out]):
    """Dials one peer under a fixed identity, and again after every break."""

    def __init__(
        self,
        incoming: Any,
        on_message: Callable[[In], None],
        *,
        identity: bytes,
        on_change: Callable[[bool], None] | None = None,
        high_water: int = 10_000,
    ) -> None:
        """on_change: told when the connection opens and closes, before any message that comes
        later."""
        super().__init__(zmq.DEALER, incoming, high_water)
        self._socket.set(zmq.IDENTITY, identity)
        self._on_message = on_message
        self._on_change = on_change
        self._endpoint = ""
        self._watch = ConnectionWatch(
            self._socket, on_change=self._changed, on_given_up=self._dial_again
        )

    def connect(self, endpoint: str) -> None:
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot dial {endpoint}: {error.strerror}") from error
        self._endpoint = endpoint
        self._look_again()

    def send(self, message: Out) -> SendResult:
        return self._send([encode(message)])

    def _deliver(self, frames: list[bytes]) -> None:
        if self._on_change is not None:
            self._watch.look()
        if len(frames) != 1:
            raise MalformedFrame(f"{len(frames)} frames instead of 1")
        self._on_message(self._decoder.decode(frames[0]))

    def _changed(self, up: bool) -> None:
        if self._on_change is not None:
            self._on_change(up)

    def _dial_again(self) -> None:
        """What was under way is lost, as with any break."""
        logger.warning("the connection to %s was broken by what came from it", self._endpoint)
        self._socket.disconnect(self._endpoint)
        self.connect(self._endpoint)

    def close(self) -> None:
        self._watch.close()
        super().close()


def _lift_descriptor_limit() -> None:
    """libzmq ends the process when it has no descriptor left for who dials in, and the usual soft
    limit is 1024: take all that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
