"""One real worker process; its coordinator and peers are played by the test, word by word."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from rlt.connector.codec import Decoder, encode
from rlt.connector.config import INCARNATION, WorkerConfig
from rlt.connector.messages import (
    CoordinatorToWorker,
    Heartbeat,
    HeartbeatAnswer,
    Register,
    Welcome,
    WorkerToCoordinator,
)
from rlt.runtime.config import EngineConfig
from rlt.runtime.types import Generation

from .service import GOLDEN

HEARTBEAT_S = 0.2
PATIENCE_S = 30.0
POLL_MS = 5
EPOCH = 7
FIRST = Generation((EPOCH << 40) + 1)

Said = TypeVar("Said")


class LoneWorker:
    def __init__(self, router: "zmq.Socket[bytes]", process: subprocess.Popen[bytes]) -> None:
        self._router = router
        self.process = process
        self.incarnation = ""
        self.oldest_live = Generation(0)
        self.dead: tuple[str, ...] = ()
        self.answers = True  # heartbeats
        self.meanwhile: Callable[[], object] = lambda: None  # while nothing is heard
        self.heard: list[WorkerToCoordinator] = []
        self._decoder: Decoder[Any] = Decoder(WorkerToCoordinator)

    def say(self, message: CoordinatorToWorker) -> None:
        self._router.send_multipart([self.incarnation.encode(), encode(message)])

    def welcome(self, epoch: int = EPOCH) -> Register:
        register = self.hears(Register)
        self.say(Welcome(epoch=epoch, heartbeat_s=HEARTBEAT_S))
        return register

    def hears(self, kind: type[Said], fits: Callable[[Said], bool] = lambda _: True) -> Said:
        """The next message of this kind that fits; what came before it is left in `heard`."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            message = self._next(end_s, kind.__name__)
            self.heard.append(message)
            if isinstance(message, kind) and fits(message):
                return message

    def _next(self, end_s: float, what: str) -> WorkerToCoordinator:
        while not self._router.poll(POLL_MS):
            self.meanwhile()
            if time.monotonic() > end_s:
                code = self.process.poll()
                raise AssertionError(f"no {what}; exit code {code}; heard {self.heard}")
        identity, frame = self._router.recv_multipart()
        self.incarnation = identity.decode()
        message: WorkerToCoordinator = self._decoder.decode(frame)
        if isinstance(message, Heartbeat) and self.answers:
            answer = HeartbeatAnswer(oldest_live=self.oldest_live, dead=self.dead)
            self.say(answer)
        return message

    def kinds(self) -> list[str]:
        """What was heard so far besides heartbeats, in order."""
        return [type(m).__name__ for m in self.heard if not isinstance(m, Heartbeat)]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def lone_worker(
    role: Literal["prefill", "decode"],
    folder: Path,
    *,
    incarnation: str | None = None,
    engine: dict[str, Any] | None = None,
    **changes: Any,
) -> Iterator[LoneWorker]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        router.bind(f"ipc://{folder}/c.sock")
        config = WorkerConfig(
            role=role,
            worker=f"{role}-0",
            coordinator=f"ipc://{folder}/c.sock",
            listen=f"ipc://{folder}/d.sock",
            engine=EngineConfig(
                model=str(GOLDEN), **{"num_blocks": 64, "threads": 1, **(engine or {})}
            ),
            **changes,
        )
        environment = {**os.environ}
        environment.pop(INCARNATION, None)
        if incarnation is not None:
            environment[INCARNATION] = incarnation
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"rlt.{role}", msgspec.json.encode(config).decode()],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield LoneWorker(router, process)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
