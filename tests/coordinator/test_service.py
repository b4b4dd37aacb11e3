"""The whole service over real ZeroMQ sockets, with scripted workers and the real clients."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlt.coordinator.client import AsyncClient, Client
from rlt.coordinator.text import CheckpointTokenizer
from rlt.runtime.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    ServiceUnreachable,
    TooLong,
)
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from .running import Running, running
from .test_text import EMBEDDED
from .workers import expected_depths, expected_tokens

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(tokenizer=CheckpointTokenizer(EMBEDDED)) as handle:
        yield handle


@pytest.fixture
def client(service: Running) -> Iterator[Client]:
    with Client(service.endpoint) as client:
        yield client
    service.eventually(lambda: service.service.state.idle)
    assert service.call(service.service.state.statistics)["credits_outstanding"] == 0


def test_a_result_has_tokens_depths_text_and_timeline(client: Client) -> None:
    result = client.generate(PROMPT, max_tokens=6)
    assert result.token_ids == expected_tokens(tuple(PROMPT), 6)
    assert result.exit_depths == expected_depths(6)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.num_prompt_tokens == 3
    assert result.text == CheckpointTokenizer(EMBEDDED).decoder().push(result.token_ids)
    times = [stamp.at_s for stamp in result.timeline]
    assert times == sorted(times)
    assert {"received", "admitted", "first_token"} <= {s.event for s in result.timeline}


def test_a_stream_gives_the_same_tokens_piece_by_piece(client: Client) -> None:
    deltas = list(client.generate(PROMPT, max_tokens=6, stream=True))
    assert len(deltas) > 1
    assert sum((delta.token_ids for delta in deltas), ()) == expected_tokens(tuple(PROMPT), 6)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_text_and_messages_reach_the_model_through_the_tokenizer(client: Client) -> None:
    tokenizer = CheckpointTokenizer(EMBEDDED)
    assert client.generate("1 + 1", max_tokens=2).num_prompt_tokens == len(
        tokenizer.encode("1 + 1")
    )
    messages = [{"role": "user", "content": "hi"}]
    rendered = client.generate(messages, max_tokens=2).num_prompt_tokens
    assert rendered > len(tokenizer.encode("hi"))


def test_many_requests_from_many_threads_get_each_their_own_output(client: Client) -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        prompt = (number, 2 * number + 1)
        result = client.generate(list(prompt), max_tokens=5)
        if result.token_ids != expected_tokens(prompt, 5):
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 65)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_leaving_a_stream_early_cancels_the_request(service: Running, client: Client) -> None:
    with client.generate(PROMPT, max_tokens=500, stream=True, request_id="left") as stream:
        next(stream)
    assert client.active() == ()
    service.eventually(lambda: service.service.state.idle)
    again = client.generate(PROMPT, max_tokens=3, request_id="left")
    assert again.token_ids == expected_tokens(tuple(PROMPT), 3)


def test_a_dropped_stream_cancels_its_request(service: Running, client: Client) -> None:
    stream = client.generate(PROMPT, max_tokens=500, stream=True)
    next(stream)
    del stream
    service.eventually(lambda: service.service.state.idle)


def test_a_cancel_from_elsewhere_ends_the_stream(client: Client) -> None:
    stream = client.generate(PROMPT, max_tokens=500, stream=True, request_id="c")
    next(stream)
    client.cancel("c")
    deltas = list(stream)
    assert deltas[-1].finish_reason is FinishReason.CANCELLED


def test_a_duplicate_live_id_is_refused_and_the_first_goes_on(
    service: Running, client: Client
) -> None:
    stream = client.generate(PROMPT, max_tokens=40, stream=True, request_id="twice")
    with pytest.raises(DuplicateRequest):
        client.generate(PROMPT, request_id="twice")
    tokens = sum((delta.token_ids for delta in stream), ())
    assert tokens == expected_tokens(tuple(PROMPT), 40)


def test_the_same_id_on_two_connections_is_two_requests(service: Running, client: Client) -> None:
    with Client(service.endpoint) as other:
        mine = client.generate(PROMPT, max_tokens=30, stream=True, request_id="same")
        theirs = other.generate([9], max_tokens=5, request_id="same")
        assert theirs.token_ids == expected_tokens((9,), 5)
        assert sum((d.token_ids for d in mine), ()) == expected_tokens(tuple(PROMPT), 30)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, InvalidRequest),
        ([512], {}, InvalidRequest),
        ([1], {"max_tokens": 0}, InvalidRequest),
        ([1], {"max_tokens": "many"}, InvalidRequest),
        ([1], {"max_tokens": 2**70}, InvalidRequest),
        (["a"], {}, InvalidRequest),
        ([1], {"temperature": -1.0}, InvalidRequest),
        ([1], {"max_loops": 9}, InvalidRequest),
        ([1], {"deadline_s": 0.0}, InvalidRequest),
        ([1], {"max_tokens": 5000}, TooLong),
        ([{"role": "user"}], {}, InvalidRequest),
        ([1], {"request_id": "x" * 1_000_000}, InvalidRequest),
        ("x" * 2_000_000, {}, TooLong),
        ([{"role": "user", "content": "x" * 2_000_000}], {}, TooLong),
        ([1000] * 4_000_000, {}, InvalidRequest),  # more bytes than a frame may have
    ],
)
def test_bad_input_is_a_named_error_and_the_service_goes_on(
    client: Client, prompt: Any, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.generate(prompt, **options)  # type: ignore[call-overload]
    assert len(client.generate(PROMPT, max_tokens=2).token_ids) == 2


def test_an_unknown_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate(PROMPT, temprature=1.0)  # type: ignore[call-overload]


def test_a_timeout_raises_and_cancels(service: Running, client: Client) -> None:
    with pytest.raises(TimeoutError):
        client.generate(PROMPT, max_tokens=900, timeout_s=0.1)
    service.eventually(lambda: service.service.state.idle)


def test_a_deadline_ends_the_request_at_the_service(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.generate(PROMPT, max_tokens=900, deadline_s=0.15)


def test_a_client_is_a_frontend(client: Client) -> None:
    for number in range(3):
        client.submit(
            GenerateRequest(
                request_id=RequestId(f"f{number}"),
                prompt_token_ids=(number + 1,),
                sampling=SamplingParams(max_tokens=4),
            )
        )
    tokens: dict[str, tuple[int, ...]] = {}
    ended = 0
    while ended < 3:
        for delta in client.outputs(timeout_s=5.0):
            tokens[delta.request_id] = tokens.get(delta.request_id, ()) + delta.token_ids
            ended += delta.finish_reason is not None
    assert tokens == {f"f{n}": expected_tokens((n + 1,), 4) for n in range(3)}
    assert client.outputs(timeout_s=0.01) == []


def test_statistics_name_counters_and_workers(client: Client) -> None:
    client.generate(PROMPT, max_tokens=2)
    statistics = client.stats()
    assert isinstance(statistics["accepted"], float) and statistics["accepted"] >= 1
    workers = statistics["workers"]
    assert isinstance(workers, list)
    assert {worker["role"] for worker in workers} == {"prefill", "decode"}
    assert all(worker["values"]["beats"] == 1.0 for worker in workers)
    assert all(worker["values"]["credit_blocks"] == 0.0 for worker in workers)


def test_a_client_that_vanishes_has_its_requests_cancelled(service: Running) -> None:
    client = Client(service.endpoint)
    stream = client.generate(PROMPT, max_tokens=900, stream=True)
    next(stream)
    client.close()
    service.eventually(lambda: service.service.state.idle)


def test_asyncio_clients_stream_generate_and_cancel(service: Running) -> None:
    async def work() -> None:
        async with AsyncClient(service.endpoint) as client:
            results = await asyncio.gather(
                *(client.generate([n], max_tokens=4) for n in range(1, 20))
            )
            for number, result in enumerate(results, 1):
                assert result.token_ids == expected_tokens((number,), 4)
            async with await client.generate(PROMPT, max_tokens=500, stream=True) as stream:
                async for delta in stream:
                    assert delta.token_ids
                    break
            assert client.active() == ()
            with pytest.raises(TimeoutError):
                await client.generate(PROMPT, max_tokens=900, timeout_s=0.1)
            task = asyncio.create_task(client.generate(PROMPT, max_tokens=900))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await client.generate(PROMPT, max_tokens=3)).token_ids) == 3

    asyncio.run(work())
    service.eventually(lambda: service.service.state.idle)


def test_nobody_at_the_address_is_service_unreachable() -> None:
    started_s = time.monotonic()
    with pytest.raises(ServiceUnreachable, match="nowhere"):
        Client("ipc:///tmp/rlt-nowhere.sock", timeout_s=0.2)
    assert time.monotonic() - started_s < 2.0
