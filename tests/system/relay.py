"""A relay between the processes of a service that can hold messages by kind. Tests only.

Workers dial the relay, which dials the coordinator once for each of them under the same identity.
It rewrites what a decode worker says about where it listens, so that prefill workers dial the relay
too. Everything goes through unchanged unless a rule holds it.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import zmq


@dataclass
class Held:
    """Messages of one kind that are kept back until release."""

    kind: str
    frames: deque[tuple[zmq.Socket[bytes], list[bytes]]] = field(default_factory=deque)
    seen: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float = 20.0) -> None:
        assert self.seen.wait(timeout_s), f"no {self.kind!r} message came"


class _Front:
    """One ROUTER that others dial, and one DEALER towards the real listener per identity."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], bind: str, target: str) -> None:
        self.context = context
        self.target = target
        self.router = context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.set(zmq.ROUTER_HANDOVER, 1)
        self.router.bind(bind)
        self.dealers: dict[bytes, zmq.Socket[bytes]] = {}

    def dealer(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self.dealers:
            dealer = self.context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.IDENTITY, identity)
            dealer.connect(self.target)
            self.dealers[identity] = dealer
        return self.dealers[identity]

    def close(self) -> None:
        for socket in (self.router, *self.dealers.values()):
            socket.close()


class Relay:
    """coordinator: the real endpoint. listen: where workers dial instead."""

    def __init__(self, coordinator: str, listen: str, folder: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = folder
        self._fronts = [_Front(self._context, listen, coordinator)]
        self._rules: dict[str, Held] = {}
        self._release: deque[Held] = deque()
        self._wake, self._woken = self._pair()
        self._stopping = False
        self.counts: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def hold(self, kind: str) -> Held:
        held = Held(kind)
        self._rules[kind] = held
        return held

    def release(self, held: Held) -> None:
        """Let the kept messages go on, in order, and hold no more."""
        self._rules.pop(held.kind, None)
        self._release.append(held)
        self._wake.send(b"")

    def close(self) -> None:
        self._stopping = True
        self._wake.send(b"")
        self._thread.join(10.0)
        self._context.destroy(0)

    def _pair(self) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
        a, b = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        a.bind("inproc://wake")
        b.connect("inproc://wake")
        return a, b

    def _run(self) -> None:
        while not self._stopping:
            poller = zmq.Poller()
            poller.register(self._woken, zmq.POLLIN)
            for front in self._fronts:
                for socket in (front.router, *front.dealers.values()):
                    poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
                self._let_go()
            for front in list(self._fronts):
                self._move(front, ready)
        for front in self._fronts:
            front.close()
        self._woken.close()

    def _let_go(self) -> None:
        while self._release:
            held = self._release.popleft()
            while held.frames:
                socket, frames = held.frames.popleft()
                socket.send_multipart(frames)

    def _move(self, front: _Front, ready: "dict[zmq.Socket[bytes], int]") -> None:
        if front.router in ready:
            identity, frame = front.router.recv_multipart()
            self._pass_on(front.dealer(identity), [self._rewritten(frame)], frame)
        for identity, dealer in list(front.dealers.items()):
            if dealer in ready:
                frame = dealer.recv()
                self._pass_on(front.router, [identity, frame], frame)

    def _pass_on(self, socket: "zmq.Socket[bytes]", frames: list[bytes], frame: bytes) -> None:
        kind = str(msgspec.msgpack.decode(frame)["type"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if held := self._rules.get(kind):
            held.frames.append((socket, frames))
            held.seen.set()
        else:
            socket.send_multipart(frames)

    def _rewritten(self, frame: bytes) -> bytes:
        message = msgspec.msgpack.decode(frame)
        if message["type"] != "register" or not message["peer_endpoint"]:
            return frame
        listen = f"ipc://{self._folder}/relay-{message['worker']}.sock"
        if all(front.target != message["peer_endpoint"] for front in self._fronts):
            self._fronts.append(_Front(self._context, listen, message["peer_endpoint"]))
        return msgspec.msgpack.encode({**message, "peer_endpoint": listen})


@contextmanager
def relay(coordinator: str, listen: str, folder: str) -> Iterator[Relay]:
    between = Relay(coordinator, listen, folder)
    try:
        yield between
    finally:
        between.close()
