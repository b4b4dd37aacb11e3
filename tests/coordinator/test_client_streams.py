"""Streams of the clients that are dropped: by whom, when, and what it must not touch.

A stream may be dropped at any point of any thread, by the garbage collector too. It ends its own
request and no other, whatever that one's ID, and never waits for a lock.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rlt.coordinator.client import AsyncClient, Client, DeltaStream
from rlt.runtime.errors import DuplicateRequest
from rlt.runtime.interfaces import Delta, GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from .running import Running, running
from .workers import expected_tokens

PROMPT = [5, 6, 7]
LONG = 60  # steps: what a cancel would cut short


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running() as handle:
        yield handle


def test_a_stream_that_was_refused_as_a_duplicate_leaves_the_first_alone(service: Running) -> None:
    async def work() -> None:
        async with AsyncClient(service.endpoint) as client:
            first = await client.generate(PROMPT, max_tokens=LONG, stream=True, request_id="a")
            with pytest.raises(DuplicateRequest):
                await client.generate(PROMPT, stream=True, request_id="a")
            gc.collect()
            tokens = [token async for delta in first for token in delta.token_ids]
            assert tuple(tokens) == expected_tokens(tuple(PROMPT), LONG)

    asyncio.run(work())


@pytest.mark.parametrize("how", ["drop", "close"])
def test_an_old_stream_leaves_the_next_request_of_its_id_alone(service: Running, how: str) -> None:
    with Client(service.endpoint) as client:
        streams = [client.generate(PROMPT, max_tokens=2, stream=True, request_id="a")]
        service.eventually(lambda: service.service.state.idle)
        while client.active():  # the last delta is still on its way
            client.stats()
        new = client.generate(PROMPT, max_tokens=LONG, stream=True, request_id="a")
        if how == "close":
            streams[0].close()
        streams.clear()
        tokens = sum((delta.token_ids for delta in new), ())
        assert tokens == expected_tokens(tuple(PROMPT), LONG)


@pytest.mark.parametrize("how", ["drop", "close"])
def test_an_old_asyncio_stream_leaves_the_next_request_of_its_id_alone(
    service: Running, how: str
) -> None:
    async def work() -> None:
        async with AsyncClient(service.endpoint) as client:
            streams = [await client.generate(PROMPT, max_tokens=2, stream=True, request_id="a")]
            while client.active():
                await asyncio.sleep(0)
            new = await client.generate(PROMPT, max_tokens=LONG, stream=True, request_id="a")
            if how == "close":
                await streams[0].aclose()
            streams.clear()
            tokens = [token async for delta in new for token in delta.token_ids]
            assert tuple(tokens) == expected_tokens(tuple(PROMPT), LONG)

    asyncio.run(work())


def test_a_refused_submit_leaves_the_next_request_of_its_id_alone(service: Running) -> None:
    """The ID is free as soon as the answer is here, before who waits for it has run again."""

    async def work() -> None:
        async with AsyncClient(service.endpoint) as client:
            refused = asyncio.create_task(client.generate([512], request_id="a"))
            while not client.active():
                await asyncio.sleep(0)
            while client.active():
                await asyncio.sleep(0)
            result = await client.generate(PROMPT, max_tokens=LONG, request_id="a")
            assert result.finish_reason is FinishReason.LENGTH
            assert isinstance((await asyncio.gather(refused, return_exceptions=True))[0], Exception)

    asyncio.run(work())


def in_time(act: Callable[[], None]) -> None:
    """On a thread of its own, which a deadlock does not take the tests along with."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            act()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    ended.result(timeout=10.0)


class Cycle:
    """Garbage that only the collector finds, as a kept traceback makes it."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.itself = self


def dropped(stream: DeltaStream) -> None:
    Cycle(stream)


def suspended(stream: DeltaStream) -> None:
    def read() -> Iterator[Delta]:
        with stream:
            yield from stream

    reader = read()
    next(reader)
    Cycle(reader)


@pytest.mark.parametrize("forget", [dropped, suspended])
@pytest.mark.parametrize("ending", [False, True], ids=["question", "close"])
def test_a_stream_may_be_collected_while_the_client_holds_its_lock(
    service: Running,
    monkeypatch: pytest.MonkeyPatch,
    forget: Callable[[DeltaStream], None],
    ending: bool,
) -> None:
    """Any allocation there may collect; here one always does."""
    real = asyncio.run_coroutine_threadsafe

    def collect_and_run(work: Coroutine[Any, Any, Any], loop: Any) -> Future[Any]:
        gc.collect()
        return real(work, loop)

    def act() -> None:
        client = Client(service.endpoint)
        forget(client.generate(PROMPT, max_tokens=900, stream=True))
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "run_coroutine_threadsafe", collect_and_run)
            if not ending:
                client.stats()
            client.close()

    in_time(act)
    service.eventually(lambda: service.service.state.idle)


@pytest.mark.parametrize("forget", [dropped, suspended])
def test_a_stream_may_be_collected_on_the_connections_own_thread(
    service: Running, forget: Callable[[DeltaStream], None]
) -> None:
    other = GenerateRequest(
        request_id=RequestId("other"),
        prompt_token_ids=tuple(PROMPT),
        sampling=SamplingParams(max_tokens=2),
    )

    def collect(_: Delta) -> None:
        gc.collect()

    def act() -> None:
        with Client(service.endpoint) as client:
            forget(client.generate(PROMPT, max_tokens=900, stream=True))
            client.submit_to(other, collect)
            service.eventually(lambda: service.service.state.idle)

    in_time(act)


def test_a_stream_that_is_dropped_after_its_client_was_closed_is_nothing(service: Running) -> None:
    client = Client(service.endpoint)
    stream = client.generate(PROMPT, max_tokens=900, stream=True)
    client.close()
    del stream  # what it raises, pytest reports
    service.eventually(lambda: service.service.state.idle)
