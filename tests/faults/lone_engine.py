"""One engine alone in a test's loop: real scheduler, connectors and link; no process, no wire.

Its channels go nowhere and keep what was said; its transport ends every WRITE as the test wants;
passes are simulated. Whoever drives it plays the coordinator and the peers.
"""

import asyncio
import itertools
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

from rlt.connector.channel import SendResult
from rlt.connector.codec import encode
from rlt.connector.config import WorkerConfig
from rlt.connector.geometry import PoolDescription
from rlt.connector.messages import Peer, Peers, Welcome
from rlt.connector.process import WorkerParts
from rlt.connector.transport import Finished, Notification, Ticket, Write
from rlt.connector.worker_connector import WorkerConnector
from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import ConfigError

from ..connector.clock import ManualClock
from ..runtime.simulated_executor import SimulatedExecutor


class NoTransport:
    """Every WRITE ends at the next poll, and moves no byte. notices: what is to be heard. held:
    no WRITE ends. error: what those that end from now on failed with. refuses: what making an agent
    raises."""

    def __init__(self, pool: PoolDescription) -> None:
        self.pool = pool
        self.notices: list[Notification] = []
        self.held = False
        self.error: str | None = None
        self.refuses: Exception | None = None
        self._running: list[Ticket] = []
        self._tickets = itertools.count(1)

    def agent_metadata(self) -> bytes:
        if self.refuses is not None:
            raise self.refuses
        return b"agent"

    def add_target(self, target: str, metadata: bytes, pool: PoolDescription) -> None: ...

    def remove_target(self, target: str) -> None: ...

    def add_source(self, source: str, metadata: bytes) -> bytes:
        return b"agent"

    def remove_source(self, source: str) -> None: ...

    def write(self, write: Write) -> Ticket:
        ticket = Ticket(next(self._tickets))
        self._running.append(ticket)
        return ticket

    def poll_finished(self) -> list[Finished]:
        if self.held:
            return []
        ended, self._running = self._running, []
        return [Finished(ticket, self.error) for ticket in ended]

    def poll_notifications(self) -> list[Notification]:
        heard, self.notices = self.notices, []
        return heard

    def close(self) -> None: ...


class NoChannel:
    """Takes what is sent, to encode it. said: by all of them, in order."""

    malformed = 0
    said: ClassVar[list[Any]] = []

    def __init__(self, *_: object, **__: object) -> None: ...

    def bind(self, endpoint: str) -> str:
        return endpoint

    def connect(self, endpoint: str) -> None:
        if not endpoint.startswith("inproc://"):
            raise ConfigError(f"cannot dial {endpoint}")

    def send(self, *sent: Any) -> SendResult:
        encode(sent[-1])
        NoChannel.said.append(sent[-1])
        return SendResult.SENT

    def close(self) -> None: ...


CHANNELS = (
    "rlt.connector.link.DealerChannel",
    "rlt.prefill.pairs.DealerChannel",
    "rlt.decode.pairs.RouterChannel",
)
_loop = asyncio.new_event_loop()


def parts_of(
    role: str, executor: SimulatedExecutor | None = None
) -> tuple[WorkerParts, NoTransport, ManualClock]:
    executor, clock = executor or SimulatedExecutor(num_blocks=40), ManualClock()
    capabilities, limits = executor.capabilities(), executor.admission_limits()
    pool = PoolDescription(
        kv_base=1 << 20,
        hidden_base=1 << 40,
        num_blocks=limits.num_blocks,
        hidden_rows=limits.num_slots + limits.num_receive_slots,
        geometry=capabilities.geometry,
        memory="DRAM",
        device_id=0,
    )
    transport = NoTransport(pool)
    connector = WorkerConnector(
        transport, clock=clock, max_inflight_bytes=1 << 20, transfer_timeout_s=5.0
    )
    config = WorkerConfig(
        role=role,  # type: ignore[arg-type]
        worker=f"{role[0]}0",
        coordinator="inproc://nobody",
        listen="inproc://engine",
        engine=EngineConfig(model="none", chunk_tokens=4),
    )
    parts = WorkerParts(
        config,
        f"{role[0]}0-1",
        clock,
        executor,  # type: ignore[arg-type]
        connector,
        capabilities.geometry,
        capabilities.model,
    )
    return parts, transport, clock


def run(target: Coroutine[Any, Any, None]) -> None:
    NoChannel.said.clear()
    with ExitStack() as stack:
        for name in CHANNELS:
            stack.enter_context(mock.patch(name, NoChannel))
        _loop.run_until_complete(target)


def begin(engine: Any, peer: Peer) -> None:
    engine._link._handle(Welcome(epoch=1, heartbeat_s=0.5))
    engine._link._handle(Peers(version=1, peers=(peer,)))


def end(engine: Any) -> None:
    ended = engine._link.ended
    if ended.done() and not ended.cancelled():
        ended.exception()
    engine.close()
