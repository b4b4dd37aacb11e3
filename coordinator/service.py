"""The coordinator's process: sockets, timers and signals around the state machine.

Performs effects and reports facts (a message, a lost peer, the time); decides nothing. A client
gets one frame per drain. A fault of the state machine ends the service: its books are broken.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..connector.channel import RouterChannel, SendResult
from ..connector.messages import (
    Alive,
    AskStatistics,
    ClientToCoordinator,
    CoordinatorToClient,
    Register,
    Shutdown,
    SupervisorToCoordinator,
    WorkerToCoordinator,
)
from ..runtime.errors import ServiceError
from ..runtime.prompt import Tokenizer
from .attempt import Role
from .client_sockets import ClientSockets
from .config import CoordinatorConfig
from .discovery import RECORD_NAME, ServiceRecord, write_record
from .effects import Effect, Outbox, SendClient, ToWorkerSocket
from .local_clients import LocalClients
from .metrics.exposition import Metrics
from .now import Now
from .prompts import Prompt, Prompts
from .settling import RESETTLE_S
from .snapshot import Snapshot
from .state import CoordinatorState, FromWorker
from .worker_stop import stop_workers

logger = logging.getLogger(__name__)

TICK_S = 0.05  # how exactly deadlines, heartbeats and repeated asks are kept
ALIVE_S = 1.0
PROBE_S = 30.0  # an idle client's end shows only when something is sent to it
UNBLOCK_S = 0.02  # how soon a client that took nothing is tried again
RELEASE_S = 2.0  # how long cancelled requests may take to be let go at the end


def _now() -> Now:
    return Now(time.monotonic(), time.time())


class CoordinatorService:
    """Lives inside a running loop. run() serves until stop() and then ends in order."""

    def __init__(
        self, config: CoordinatorConfig, runtime_dir: Path, tokenizer: Tokenizer | None
    ) -> None:
        self._config = config
        self._runtime_dir = runtime_dir
        self._loop = asyncio.get_running_loop()
        self.metrics = Metrics()
        self.state = CoordinatorState(
            config, _now(), tokenizer=tokenizer, observer=self.metrics.watch
        )
        self.metrics.read(self.snapshot)
        self._flush_soon: asyncio.Handle | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._changed = asyncio.Event()  # something happened since wait_until() last looked
        self._stopping = False
        self._began_s = time.monotonic()
        self._record: Path | None = None
        self._hopeless: str | None = None  # why it will never be ready
        self._workers: RouterChannel[FromWorker, ToWorkerSocket] = RouterChannel(
            WorkerToCoordinator | SupervisorToCoordinator, self._from_worker
        )
        self.prompts = Prompts(tokenizer, self._handle_client, config.max_queue)
        self._clients = ClientSockets(self.prompts.take)
        self.local = LocalClients(self.prompts.take, self._forget, self._flush_again)
        self._outbox = Outbox(self._send_client, self._send_worker)
        self.endpoints: tuple[str, ...] = ()
        self.worker_endpoint = ""
        self.http_address = ""  # where the HTTP front listens, if there is one

    def bind(self) -> None:
        """Listen everywhere. Raises ConfigError if an address cannot be had."""
        self.worker_endpoint = self._workers.bind(self._config.workers_at)
        self.endpoints = tuple(map(self._clients.bind, self._config.clients_at))
        logger.info("workers dial %s, clients %s", self.worker_endpoint, ", ".join(self.endpoints))

    async def run(self) -> None:
        self._every("tick", TICK_S, self._tick)
        self._every("alive", ALIVE_S, lambda: self._do(self.state.alive()))
        self._every("probe", PROBE_S, self._probe_clients)
        self._announce_if_ready()
        await self._stop.wait()
        await self._end()
        if self._hopeless is not None:
            raise ServiceError(f"no pair of workers can serve: {self._hopeless}")

    def stop(self) -> None:
        """Drain and end; asked a second time, end at once."""
        if self._stop.is_set():
            self._cut.set()
        self._stop.set()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._flush_soon is not None:
            self._flush_soon.cancel()
        self._workers.close()
        self._clients.close()
        self.prompts.close()
        if self._record is not None or self._config.resumed:
            (self._runtime_dir / RECORD_NAME).unlink(missing_ok=True)

    # Messages in

    def _handle_client(
        self, client: bytes, message: ClientToCoordinator, prompt: Prompt | None
    ) -> None:
        if isinstance(message, AskStatistics):
            self._count_malformed()
        self._do(self.state.handle_client(client, message, _now(), prompt))

    def _from_worker(self, identity: bytes, message: FromWorker) -> None:
        incarnation = identity.decode(errors="replace")
        if self._stopping and isinstance(message, Register):
            self._workers.send(identity, Shutdown())
            return
        self._do(self.state.handle_worker(incarnation, message, _now()))
        self._announce_if_ready()

    def _count_malformed(self) -> None:
        frames = self._workers.malformed + self._clients.malformed
        self.state.counters["malformed_frames"] = frames

    def snapshot(self) -> Snapshot:
        """How everything stands now, for the metrics and the status page."""
        self._count_malformed()
        return self.state.snapshot(_now())

    # Effects out

    def _do(self, effects: list[Effect]) -> None:
        self._outbox.add(effects)
        self._changed.set()
        if effects and self._flush_soon is None:
            self._flush_soon = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_soon = None
        gone_clients, gone_workers = self._outbox.flush()
        for client in gone_clients:
            self._forget(client)
        for incarnation in gone_workers:
            self._do(self.state.worker_unreachable(incarnation, _now()))
        blocked = self._outbox.blocked_clients()
        for client in blocked:
            backlog = self._outbox.backlog(client)
            if backlog > 2 * self._config.client_backlog:  # it asks and asks, and takes nothing
                self._outbox.drop(client)
                self._forget(client)
            elif backlog > self._config.client_backlog:
                self._do(self.state.client_slow(client, _now()))
        if blocked:
            self._after("unblock", UNBLOCK_S, self._flush_again)

    def _flush_again(self) -> None:
        if self._flush_soon is None:
            self._flush()

    def _forget(self, client: bytes) -> None:
        self._clients.forget(client)
        self.prompts.forget(client)
        self._do(self.state.client_gone(client, _now()))

    def _probe_clients(self) -> None:
        self._do([SendClient(client, Alive()) for client in self._clients.known()])

    def _send_client(self, client: bytes, message: CoordinatorToClient) -> SendResult:
        if client in self.local:
            return self.local.send(client, message)
        return self._clients.send(client, message)

    def _send_worker(self, incarnation: str, message: ToWorkerSocket) -> SendResult:
        return self._workers.send(incarnation.encode(), message)

    # Time

    def _tick(self) -> None:
        self._do(self.state.tick(_now()))
        self._announce_if_ready()

    def _every(self, name: str, interval_s: float, act: Callable[[], None]) -> None:
        def again() -> None:
            self._after(name, interval_s, again)
            act()

        self._after(name, interval_s, again)

    def _after(self, name: str, delay_s: float, act: Callable[[], None]) -> None:
        previous = self._timers.get(name)
        if previous is not None:
            previous.cancel()
        self._timers[name] = self._loop.call_later(delay_s, act)

    def _announce_if_ready(self) -> None:
        decided = self._record is not None or self._hopeless is not None
        if decided or self._stop.is_set() or not (self._is_complete() or self._is_awaited()):
            return
        if self._expects_pairs() and not self._config.resumed:
            self._hopeless = self.state.unpairable
            if self._hopeless is not None:
                self.stop()
                return
        record = ServiceRecord(
            endpoint=self.endpoints[0],
            endpoints=self.endpoints,
            pid=os.getpid(),
            model=self.state.model_name or self._config.model or "",
            http=self.http_address,
            workers_at=self.worker_endpoint,
        )
        self._record = write_record(self._runtime_dir, record)
        logger.info("READY at %s", ", ".join(self.endpoints))

    def _is_complete(self) -> bool:
        """Everybody who is expected is here, and every pair has said whether it can serve."""
        here = (
            len(self.state.workers("prefill")) >= self._config.expected_prefill
            and len(self.state.workers("decode")) >= self._config.expected_decode
        )
        return here and not (self._expects_pairs() and self.state.undecided_pairs)

    def _is_awaited(self) -> bool:
        """It served before: who looks for it must not wait for a worker that fails again and again,
        or for a pair whose link is cut."""
        return self._config.resumed and time.monotonic() - self._began_s >= RESETTLE_S

    def _expects_pairs(self) -> bool:
        return self._config.expected_prefill > 0 and self._config.expected_decode > 0

    # The end

    async def _end(self) -> None:
        """Finish what runs, then stop the writers before those whose memory they write."""
        logger.info("stopping: finishing what runs, for at most %.0f s", self._config.drain_s)
        self.state.drain()
        await self._wait_until(lambda: self.state.idle or self._cut.is_set(), self._config.drain_s)
        self._do(self.state.end_all(_now()))
        await self._wait_until(lambda: self.state.idle, RELEASE_S)
        self._timers["tick"].cancel()  # who leaves now was told to
        self._stopping = True
        await self._stop_workers("prefill")
        await self._stop_workers("decode")
        self._flush()
        logger.info("stopped")

    async def _wait_until(self, true: Callable[[], bool], bound_s: float) -> None:
        end_s = time.monotonic() + bound_s
        while not true() and (left_s := end_s - time.monotonic()) > 0:
            self._changed.clear()
            woken = [self._loop.create_task(self._changed.wait())]
            if not self._cut.is_set():
                woken.append(self._loop.create_task(self._cut.wait()))
            await _first_of(woken, left_s)

    async def _stop_workers(self, role: Role) -> None:
        await stop_workers(
            self.state.workers(role),
            self._send_worker,
            reaped=self.state.is_reaped,
            local=self.worker_endpoint.startswith("ipc://"),
            bound_s=self._config.stop_s,
        )


async def _first_of(tasks: list[asyncio.Task[Any]], timeout_s: float) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
