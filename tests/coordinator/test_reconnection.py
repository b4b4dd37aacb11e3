"""The service is killed and started again: its workers and its clients find it, and say so."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from rlt.connector.channel import RouterChannel
from rlt.connector.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CancelDone,
    ClientToCoordinator,
    CoordinatorToClient,
    Generate,
    Hello,
    ServiceInfo,
)
from rlt.coordinator import client_link
from rlt.coordinator.async_client import AsyncClient
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.service import CoordinatorService
from rlt.runtime.errors import ServiceLost, ServiceUnreachable

from .running import BEAT_S, Team
from .workers import expected_tokens


class Killable:
    """A service that can be killed and started again in one folder, and the workers it has."""

    def __init__(self, folder: Path) -> None:
        self._config = CoordinatorConfig(
            runtime_dir=str(folder),
            expected_prefill=1,
            expected_decode=1,
            heartbeat_s=BEAT_S,
            heartbeat_timeout_s=2.0,
        )
        self._folder = folder
        self._record = folder / "service.json"
        self.team: Team | None = None
        self.service: CoordinatorService
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        self._record.unlink(missing_ok=True)
        self.service = CoordinatorService(self._config, self._folder, None)
        self.service.bind()
        self._task = asyncio.get_running_loop().create_task(self.service.run())
        if self.team is None:
            self.team = Team(self.service.worker_endpoint, 1, 1, {})
        while not self._record.exists():
            await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """Nobody is told anything."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.service.close()

    @property
    def endpoint(self) -> str:
        return self._config.clients_at[0]


@asynccontextmanager
async def killable() -> AsyncIterator[Killable]:
    with tempfile.TemporaryDirectory(prefix="rlt-r") as folder:
        service = Killable(Path(folder))
        await service.start()
        try:
            yield service
        finally:
            await service.kill()
            assert service.team is not None
            service.team.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(15.0):
            await scenario()

    uvloop.run(bounded())


def test_a_client_hears_at_once_that_its_service_died_and_goes_on_with_the_next() -> None:
    async def scenario() -> None:
        async with killable() as service, AsyncClient(service.endpoint) as client:
            stream = await client.generate([1, 2], max_tokens=400, stream=True)
            await anext(stream)
            began_s = asyncio.get_running_loop().time()
            await service.kill()
            with pytest.raises(ServiceLost, match="ask again"):
                async for _ in stream:
                    pass
            assert asyncio.get_running_loop().time() - began_s < 1.0
            assert client.active() == ()
            await service.start()
            result = await client.generate([1, 2], max_tokens=5)
            assert result.token_ids == expected_tokens((1, 2), 5)
            assert service.service.state.counters["unknown_workers"] > 0  # they registered again

    run(scenario)


def test_what_is_asked_while_nobody_is_there_is_answered_by_the_next_service() -> None:
    async def scenario() -> None:
        async with killable() as service, AsyncClient(service.endpoint) as client:
            await service.kill()
            await asyncio.sleep(0.1)
            asked = asyncio.ensure_future(client.generate([3], max_tokens=4))
            drained = asyncio.ensure_future(client.drain("nobody"))
            stats = asyncio.ensure_future(client.stats())
            await asyncio.sleep(0.3)
            await service.start()
            assert (await asked).token_ids == expected_tokens((3,), 4)
            assert (await drained).error is not None
            assert (await stats)["workers"] is not None

    run(scenario)


def test_a_service_that_does_not_come_back_is_unreachable_in_bounded_time() -> None:
    async def scenario() -> None:
        async with killable() as service, AsyncClient(service.endpoint, timeout_s=0.5) as client:
            await service.kill()
            with pytest.raises(ServiceUnreachable):
                await client.generate([3], max_tokens=4)
            with pytest.raises(ServiceUnreachable):
                await client.stats()
            await service.start()
            assert (await client.generate([3], max_tokens=4)).token_ids

    run(scenario)


def test_what_a_client_gave_up_without_a_service_is_remembered_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_link, "SILENCE_S", 0.2)
    monkeypatch.setattr(client_link, "MOST_ABANDONED", 3)

    async def scenario() -> None:
        async with killable() as service, AsyncClient(service.endpoint) as client:
            await service.kill()
            asks = [client.generate([n], max_tokens=4) for n in range(5)]
            answers = await asyncio.gather(*asks, return_exceptions=True)
            assert [type(answer) for answer in answers] == [ServiceUnreachable] * 5
            assert len(client.link._abandoned) == 3
            await service.start()
            assert (await client.generate([3], max_tokens=4)).token_ids
            assert not client.link._abandoned

    run(scenario)


class Deaf:
    """A service that does not hear the first messages of each kind."""

    def __init__(
        self, endpoint: str, misses: int = 0, never: type[ClientToCoordinator] | None = None
    ) -> None:
        """never: a kind of which it hears none."""
        self._misses, self._never = misses, never
        self.heard: list[type[ClientToCoordinator]] = []
        self.channel: RouterChannel[ClientToCoordinator, CoordinatorToClient] = RouterChannel(
            ClientToCoordinator, self._hear
        )
        self.channel.bind(endpoint)

    def _hear(self, client: bytes, message: ClientToCoordinator) -> None:
        self.heard.append(type(message))
        if isinstance(message, self._never or ()) or self._missed(message):
            return
        answer: CoordinatorToClient
        match message:
            case Hello():
                answer = ServiceInfo(protocol_version=PROTOCOL_VERSION, model="m", ready=True)
            case Generate(submission=submission):
                answer = Accepted(submission=submission)
            case _:
                answer = CancelDone(request_id=message.request_id)  # type: ignore[union-attr]
        self.channel.send(client, answer)

    def _missed(self, message: ClientToCoordinator) -> bool:
        return self.heard.count(type(message)) <= self._misses


def test_hello_generate_and_cancel_are_said_again_until_they_are_answered() -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="rlt-d") as folder:
            endpoint = f"ipc://{folder}/client.sock"
            with contextlib.closing(Deaf(endpoint, misses=1).channel):
                async with AsyncClient(endpoint) as client:
                    stream = await client.generate([1], stream=True)
                    await stream.aclose()
                    assert client.active() == ()

    run(scenario)


def test_a_request_that_was_given_up_and_cancelled_is_not_asked_for_again() -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="rlt-d") as folder:
            endpoint = f"ipc://{folder}/client.sock"
            with contextlib.closing(Deaf(endpoint, never=Generate).channel):
                async with AsyncClient(endpoint, timeout_s=0.3) as client:
                    with pytest.raises(ServiceUnreachable):
                        await client.generate([1])
                    await asyncio.sleep(0.1)
                    assert client.active() == () and not len(client.link._unanswered)

    run(scenario)
