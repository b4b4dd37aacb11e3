"""Starts one worker process: parts, event loop, signals, and what its end looks like from outside.

Builds what both roles share (executor, worker connector, clock, link) and hands it to the role's
engine. Exit codes: 0 told by the coordinator to end for good; EXIT_RESTART ended in order, to be
started again (SIGTERM, or told so); 1 failed while serving; 2 could not start (bad option, bad
checkpoint, refused by the coordinator).
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import uvloop

from ..runtime.clock import SystemClock
from ..runtime.config import SchedulerConfig
from ..runtime.engine_core import EngineCore
from ..runtime.errors import RltError, ServiceError, WorkerError
from ..runtime.executor import ThreadExecutor, build_executor
from ..runtime.interfaces import Clock, SchedulerConnector
from ..runtime.types import KVGeometry, ModelDescription
from .config import EXIT_RESTART, INCARNATION, WorkerConfig
from .link import CoordinatorLink, LinkedEngine
from .messages import PROTOCOL_VERSION, Register
from .nixl_transport import NixlTransport
from .ticker import Ticker
from .transport import Transport
from .worker_connector import WorkerConnector

logger = logging.getLogger(__name__)


class RoleEngine(Protocol):
    async def run(self) -> int:
        """Serve until told to end; the exit code."""
        ...

    def drain(self) -> None:
        """End once nothing needs this worker."""
        ...

    def close(self) -> None: ...


MakeTransport = Callable[[ThreadExecutor, str], Transport]


def nixl_transport(executor: ThreadExecutor, incarnation: str) -> Transport:
    storage = executor.storage
    return NixlTransport(storage.kv, storage.hidden, storage.geometry, name=incarnation)


@dataclass
class WorkerParts:
    """What a role's engine is made of. The engine closes what it was given."""

    config: WorkerConfig
    incarnation: str
    clock: Clock
    executor: ThreadExecutor
    connector: WorkerConnector
    geometry: KVGeometry
    model: ModelDescription

    def core(self, connector: SchedulerConnector) -> EngineCore:
        return EngineCore(
            self.executor,
            SchedulerConfig.from_engine(self.config.engine),
            clock=self.clock,
            scheduler_connector=connector,
            worker_connector=self.connector,
        )

    def link(self, engine: LinkedEngine, *, peer_endpoint: str) -> CoordinatorLink:
        registration = Register(
            worker=self.config.worker,
            incarnation=self.incarnation,
            role=self.config.role,
            pid=os.getpid(),
            protocol_version=PROTOCOL_VERSION,
            model=self.model,
            pool=self.connector.pool,
            limits=msgspec.structs.replace(
                self.executor.admission_limits(),
                grows=self.config.engine.admission == "incremental",
            ),
            peer_endpoint=peer_endpoint,
        )
        return CoordinatorLink(registration, engine, silence_s=self.config.reconnect_s)

    def ticker(self, tick: Callable[[], bool]) -> Ticker:
        ticker = Ticker(tick)
        self.executor.set_event_sink(ticker.wake_from_thread)
        return ticker


def run_worker(
    build: Callable[[WorkerParts], RoleEngine],
    arguments: list[str],
    make_transport: MakeTransport = nixl_transport,
) -> int:
    """Run one worker from its command-line arguments to its end; returns the exit code."""
    try:
        config = msgspec.json.decode(arguments[0], type=WorkerConfig)
    except (IndexError, msgspec.MsgspecError, RltError) as error:
        print(f"error: bad worker configuration: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {config.worker} %(message)s",
    )
    # Ctrl-C reaches the whole terminal; who stops a worker is the coordinator or its supervisor.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return uvloop.run(_serve(build, config, make_transport))
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RltError as error:
        logger.error("%s", error)
        return 1


class _Terminations:
    """SIGTERM: the first one lets the worker finish what it has, the second one ends it. Either
    way a supervisor that goes on starts it again; one that is stopping starts nobody."""

    def __init__(self) -> None:
        self._heard = 0
        self._drain: Callable[[], None] | None = None
        self._enough = asyncio.Event()

    def hear(self) -> None:
        self._heard += 1
        if self._drain is None or self._heard > 1:
            self._enough.set()
        else:
            self._drain()

    def drain_by(self, drain: Callable[[], None]) -> None:
        self._drain = drain

    async def enough(self) -> int:
        await self._enough.wait()
        return EXIT_RESTART


async def _serve(
    build: Callable[[WorkerParts], RoleEngine], config: WorkerConfig, make_transport: MakeTransport
) -> int:
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[int] = loop.create_future()
    loop.set_exception_handler(lambda _, context: _break(broken, context))
    terminations = _Terminations()
    loop.add_signal_handler(signal.SIGTERM, terminations.hear)
    incarnation = os.environ.get(INCARNATION) or f"{config.worker}-{secrets.token_hex(6)}"
    executor = build_executor(config.engine)
    try:
        executor.warm_up()
        connector = WorkerConnector(
            make_transport(executor, incarnation),
            clock=SystemClock(),
            max_inflight_bytes=config.max_inflight_bytes,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        capabilities = executor.capabilities()
        parts = WorkerParts(
            config,
            incarnation,
            SystemClock(),
            executor,
            connector,
            capabilities.geometry,
            capabilities.model,
        )
        engine = build(parts)
        terminations.drain_by(engine.drain)
        try:
            return await _first(engine.run(), terminations.enough(), broken)
        finally:
            engine.close()
    finally:
        executor.shutdown()


async def _first(*awaitables: Awaitable[int]) -> int:
    """Return, or raise, as the first of them does."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return max(task.result() for task in done)


def _break(broken: asyncio.Future[int], context: dict[str, Any]) -> None:
    """A fault in a callback ends the worker: its state can no longer be trusted."""
    if not broken.done():
        error = context.get("exception")
        logger.error("%s", context.get("message"), exc_info=error)
        broken.set_exception(WorkerError(f"{context.get('message')}: {error!r}"))
