"""The coordinator's end of a supervisor's link, as a test plays it."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq

from rlt.connector.codec import Decoder, encode
from rlt.connector.messages import (
    Expel,
    Supervise,
    SuperviseAnswer,
    Supervised,
    SupervisorToCoordinator,
    WorkerExited,
)

T = TypeVar("T", Supervise, WorkerExited)


class FakeCoordinator:
    """Listens while the block runs; may be opened again at the same place."""

    def __init__(self, base: Path) -> None:
        self.endpoint = f"ipc://{base}/workers.sock"
        self._decoder: Decoder[SupervisorToCoordinator] = Decoder(SupervisorToCoordinator)
        self.supervisor = b""

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def hear(self, within_s: float = 10.0) -> SupervisorToCoordinator | None:
        if not self._socket.poll(within_s * 1000):
            return None
        self.supervisor, frame = self._socket.recv_multipart()
        return self._decoder.decode(frame)

    def wait(self, kind: type[T], within_s: float = 15.0) -> T:
        """The next message of this kind."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            message = self.hear(end_s - time.monotonic())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {within_s} s")

    def wait_child(self, name: str, *, other_than: str = "") -> Supervised:
        """The child of that name, once it is another incarnation than that one."""
        end_s = time.monotonic() + 15.0
        while time.monotonic() < end_s:
            for child in self.wait(Supervise).children:
                if child.worker == name and child.incarnation != other_than:
                    return child
        raise AssertionError(f"no such child {name}")

    def expel(self, incarnation: str) -> None:
        self._socket.send_multipart([self.supervisor, encode(Expel(incarnation=incarnation))])

    def answer(self, pid: int) -> None:
        """To the next Supervise, as that process."""
        self.wait(Supervise)
        self.send_bytes(encode(SuperviseAnswer(pid=pid)))

    def hear_all(self, for_s: float) -> None:
        """Whatever is said meanwhile, and answer nothing."""
        end_s = time.monotonic() + for_s
        while (left_s := end_s - time.monotonic()) > 0:
            self.hear(left_s)

    def send_bytes(self, frame: bytes) -> None:
        self._socket.send_multipart([self.supervisor, frame])
