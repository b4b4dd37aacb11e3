"""The supervisor's line to the coordinator: says who lives and who is reaped, hears whom to kill.

Owns one ZeroMQ socket and what could not be sent yet. Never kills anyone itself. The socket's
descriptor is edge-triggered: after every send and receive it is looked at until nothing is left.
"""

import secrets
from collections.abc import Callable
from typing import assert_never

import zmq

from ..connector.codec import Decoder, MalformedFrame, encode
from ..connector.messages import (
    CoordinatorToSupervisor,
    Expel,
    Supervise,
    SuperviseAnswer,
    Supervised,
    SupervisorToCoordinator,
    WorkerExited,
)
from ..runtime.errors import ConfigError
from .loop import Loop
from .reaped import REMEMBERED, Reaped

SUPERVISE_S = 1.0
LINGER_MS = 500
MAX_FRAME_BYTES = 1 << 16
BATCH = 256  # frames per wake-up, so that signals and children get their turn
PROBE_MS, SILENT_MS = 5000, 15_000  # a peer that vanished without a word is noticed, and redialled
UNHEARD_BEATS = (
    3  # so many in a row that could not be sent: ZeroMQ may have given the connection up
)


class SupervisorLink:
    """children: every worker process that is not reaped yet. expel: kill that incarnation, if it is
    one of them. answered: the coordinator has, which is that process."""

    def __init__(
        self,
        endpoint: str,
        loop: Loop,
        *,
        children: Callable[[], tuple[Supervised, ...]],
        expel: Callable[[str], None],
        answered: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._children = children
        self._expel = expel
        self._answered = answered
        self._reaped = Reaped()
        self._unsent: dict[str, WorkerExited] = {}
        self._decoder: Decoder[CoordinatorToSupervisor] = Decoder(
            CoordinatorToSupervisor, MAX_FRAME_BYTES
        )
        self.malformed = 0
        self._context = zmq.Context()
        self._endpoint = endpoint
        self._unheard = 0
        self._socket = _dial(self._context, endpoint)
        loop.watch(self._socket.fileno(), self._look)
        self._supervise()

    def exited(self, exited: WorkerExited) -> None:
        """Told to the coordinator now, or once it can be reached."""
        self._reaped.add(exited)
        self._unsent[exited.incarnation] = exited
        if len(self._unsent) > REMEMBERED:
            del self._unsent[next(iter(self._unsent))]
        self._look()

    def close(self) -> None:
        self._loop.cancel("supervise")
        self._loop.cancel("look")
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def _supervise(self) -> None:
        """Lost without harm while the coordinator is away: the next one says it all again."""
        heard = self._send(Supervise(children=self._children()))
        self._unheard = 0 if heard else self._unheard + 1
        if self._unheard == UNHEARD_BEATS:
            self._dial_again()
        self._look()
        self._loop.after("supervise", SUPERVISE_S, self._supervise)

    def _dial_again(self) -> None:
        """After a frame that it could not read ZeroMQ never does; sooner than ZeroMQ otherwise."""
        self._unheard = 0
        self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def _look(self) -> None:
        for _ in range(BATCH):
            events = self._socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN:
                self._receive()
            elif not (events & zmq.POLLOUT and self._unsent and self._send_oldest()):
                return
        self._loop.after("look", 0.0, self._look)

    def _receive(self) -> None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            message = self._decoder.decode(b"".join(frames))
        except MalformedFrame:
            self.malformed += 1
            return
        match message:
            case Expel(incarnation=incarnation):
                self._take_expel(incarnation)
            case SuperviseAnswer(pid=pid):
                self._answered(pid)
            case _:
                assert_never(message)

    def _take_expel(self, incarnation: str) -> None:
        known = self._reaped.get(incarnation)
        if known is not None:
            self._unsent[incarnation] = known
        else:
            self._expel(incarnation)

    def _send_oldest(self) -> bool:
        incarnation = next(iter(self._unsent))
        if not self._send(self._unsent[incarnation]):
            return False
        del self._unsent[incarnation]
        return True

    def _send(self, message: SupervisorToCoordinator) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _dial(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, f"supervisor-{secrets.token_hex(8)}".encode())
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a coordinator that is away
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HEARTBEAT_IVL, PROBE_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        context.term()
        raise ConfigError(f"cannot dial {endpoint}: {error.strerror}") from error
    return socket
