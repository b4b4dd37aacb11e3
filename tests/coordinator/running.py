"""A coordinator's service on its own thread, with scripted workers over real ZeroMQ sockets."""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from rlt.connector.channel import DealerChannel
from rlt.connector.messages import (
    CoordinatorToWorker,
    Shutdown,
    WorkerToCoordinator,
)
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.service import CoordinatorService
from rlt.runtime.prompt import Tokenizer

from .workers import ScriptedWorker, hand_over

T = TypeVar("T")
Around = Callable[[CoordinatorService, CoordinatorConfig], AbstractAsyncContextManager[None]]
BEAT_S = 0.05
STEP_S = 0.002


class WireWorker:
    """A scripted worker on a DEALER socket; it works whenever the team's timer says so."""

    def __init__(self, worker: ScriptedWorker, endpoint: str) -> None:
        self.worker = worker
        worker.life += (1 << 24) + os.getpid() * 100  # as an ID, above every real process's
        self.stopped = False
        self.channel: DealerChannel[CoordinatorToWorker, WorkerToCoordinator] = DealerChannel(
            CoordinatorToWorker, self._hear, identity=worker.incarnation.encode()
        )
        self.channel.connect(endpoint)
        self.channel.send(worker.register())

    def _hear(self, message: CoordinatorToWorker) -> None:
        if isinstance(message, Shutdown):
            self.stopped = True
            self.channel.close()
            return
        for answer in self.worker.handle(message):
            self.channel.send(answer)

    def send(self, messages: list[WorkerToCoordinator]) -> None:
        for message in messages:
            self.channel.send(message)


class Team:
    """All scripted workers of one service."""

    def __init__(self, endpoint: str, prefill: int, decode: int, kind: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.step_s = STEP_S
        names = [(f"p{n}", "prefill") for n in range(prefill)]
        names += [(f"d{n}", "decode") for n in range(decode)]
        self.members = [WireWorker(ScriptedWorker(*name, **kind), endpoint) for name in names]
        self.stop_order: list[str] = []
        self._beat_timer = self._loop.call_later(BEAT_S, self._beat)
        self._step_timer = self._loop.call_later(self.step_s, self._step)

    def _beat(self) -> None:
        self._beat_timer = self._loop.call_later(BEAT_S, self._beat)
        for member in self._living():
            if member.worker.welcome is not None:
                member.send([member.worker.heartbeat()])

    def _living(self) -> list[WireWorker]:
        for member in self.members:
            if member.stopped and member.worker.name not in self.stop_order:
                self.stop_order.append(member.worker.name)
        return [member for member in self.members if not member.stopped]

    def _step(self) -> None:
        self._step_timer = self._loop.call_later(self.step_s, self._step)
        living = {m.worker.incarnation: m for m in self._living()}
        for member in living.values():
            for generation, record in list(member.worker.live.items()):
                if member.worker.role == "decode":
                    member.send(member.worker.decode_step(generation))
                    continue
                member.send(member.worker.compute(generation))
                peer = living.get(record.peer)
                if peer is not None:
                    released, received = hand_over(member.worker, peer.worker, generation)
                    member.send(released)
                    peer.send(received)

    def close(self) -> None:
        self._beat_timer.cancel()
        self._step_timer.cancel()
        for member in self._living():
            member.channel.close()


class Running:
    """Handle on the service's thread. Everything inside is reached by call()."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.service: CoordinatorService
        self.team: Team
        self.folder: Path
        self.started = threading.Event()
        self.failure: BaseException | None = None

    @property
    def endpoint(self) -> str:
        return self.service.endpoints[0]

    def call(self, act: Callable[[], T]) -> T:
        async def run() -> T:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10.0)

    def eventually(self, true: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async def poll() -> None:
            async with asyncio.timeout(timeout_s):
                while not true():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(poll(), self.loop).result(timeout_s + 1.0)


@contextmanager
def running(
    prefill: int = 1,
    decode: int = 1,
    tokenizer: Tokenizer | None = None,
    around: Around | None = None,
    worker: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """around: entered on the service's loop while it runs. worker: fields of its workers."""
    handle = Running()
    with tempfile.TemporaryDirectory(prefix="rlt-c") as folder:
        handle.folder = Path(folder)
        config = CoordinatorConfig(
            runtime_dir=folder,
            expected_prefill=prefill,
            expected_decode=decode,
            **{"heartbeat_s": BEAT_S, "heartbeat_timeout_s": 2.0, **options},
        )

        async def live() -> None:
            handle.loop = asyncio.get_running_loop()
            handle.loop.set_exception_handler(lambda _, context: _note(handle, context))
            handle.service = CoordinatorService(config, handle.folder, tokenizer)
            with contextlib.closing(handle.service):
                handle.service.bind()
                endpoint = handle.service.worker_endpoint
                handle.team = Team(endpoint, prefill, decode, worker or {})
                front = around(handle.service, config) if around else contextlib.nullcontext()
                with contextlib.closing(handle.team):
                    async with front:
                        task = handle.loop.create_task(handle.service.run())
                        while not (handle.folder / "service.json").exists():
                            await asyncio.sleep(0.005)
                        handle.started.set()
                        await task

        thread = _thread(live(), handle)
        assert handle.started.wait(10.0), "not started"
        if handle.failure is not None:
            thread.join()
            raise handle.failure
        try:
            yield handle
        finally:
            if thread.is_alive():
                handle.loop.call_soon_threadsafe(handle.service.stop)
            thread.join(20.0)
            assert not thread.is_alive(), "the service does not stop"
        if handle.failure is not None:
            raise handle.failure
        assert list(handle.folder.iterdir()) == []


def _note(handle: Running, context: dict[str, Any]) -> None:
    handle.failure = context.get("exception") or AssertionError(context["message"])


def _thread(live: Coroutine[Any, Any, None], handle: Running) -> threading.Thread:
    def run() -> None:
        try:
            uvloop.run(live)
        except BaseException as error:
            handle.failure = error
            handle.started.set()

    thread = threading.Thread(target=run, name="service")
    thread.start()
    return thread
