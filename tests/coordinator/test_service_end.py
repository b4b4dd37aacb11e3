"""How the service ends, and what it does about peers that are slow or gone."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import pytest
import zmq

from rlt.connector.codec import Decoder, encode
from rlt.connector.messages import (
    CoordinatorToClient,
    Deltas,
    Generate,
    Hello,
)
from rlt.coordinator.client import Client
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.service import CoordinatorService
from rlt.runtime.errors import (
    ConfigError,
    RltError,
    ServiceError,
    ServiceUnreachable,
    ShuttingDown,
)
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from .running import Team, running
from .workers import expected_tokens


def test_a_stop_finishes_what_runs_and_refuses_what_is_new() -> None:
    with running() as handle, Client(handle.endpoint) as client:
        stream = client.generate([5], max_tokens=100, stream=True)
        first = next(stream)
        handle.call(handle.service.stop)
        with pytest.raises(ShuttingDown):
            client.generate([5], max_tokens=2)
        rest = sum((delta.token_ids for delta in stream), ())
        assert first.token_ids + rest == expected_tokens((5,), 100)


def test_a_second_stop_cuts_the_drain_short() -> None:
    with running() as handle, Client(handle.endpoint) as client:
        stream = client.generate([5], max_tokens=900, stream=True)
        next(stream)
        handle.call(handle.service.stop)
        next(stream)
        handle.call(handle.service.stop)
        started_s = time.monotonic()
        with pytest.raises(ShuttingDown):
            list(stream)
        assert time.monotonic() - started_s < 2.0


def test_the_drain_is_bounded() -> None:
    with running(drain_s=0.2) as handle, Client(handle.endpoint) as client:
        stream = client.generate([5], max_tokens=900, stream=True)
        next(stream)
        handle.call(handle.service.stop)
        with pytest.raises(ShuttingDown):
            list(stream)


def test_a_service_whose_only_pair_is_refused_ends_with_the_reason_instead_of_waiting(
    tmp_path: Path,
) -> None:
    config = CoordinatorConfig(
        runtime_dir=str(tmp_path),
        worker_endpoint="tcp://127.0.0.1:*",
        client_endpoints=("tcp://127.0.0.1:*",),
        expected_prefill=1,
        expected_decode=1,
    )

    async def live() -> None:
        service = CoordinatorService(config, tmp_path, None)
        with contextlib.closing(service):
            service.bind()
            team = Team(service.worker_endpoint, 1, 1, {})
            for member in team.members:
                member.worker.refuses_pairs = True
            with contextlib.closing(team):
                await asyncio.wait_for(service.run(), 20.0)

    with pytest.raises(ServiceError, match="no path between them"):
        asyncio.run(live())
    assert not (tmp_path / "service.json").exists()


def test_prefill_workers_are_stopped_before_decode_workers() -> None:
    with running(prefill=2, decode=2) as handle:
        team = handle.team
    team._living()
    assert [name[0] for name in team.stop_order] == ["p", "p", "d", "d"]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_dead_workers_requests_go_on_elsewhere_if_they_may(attempts: int) -> None:
    with (
        running(decode=2, max_attempts=attempts) as handle,
        Client(handle.endpoint) as client,
    ):
        streams = [client.generate([n], max_tokens=200, stream=True) for n in range(1, 5)]
        for stream in streams:
            next(stream)

        def kill() -> None:
            victim = handle.team.members[-1]
            victim.stopped = True
            victim.channel.close()

        handle.call(kill)
        ends = []
        for stream in streams:
            try:
                ends.append([delta.finish_reason for delta in stream][-1])
            except RltError as error:
                ends.append(error.code)
        lost = ["worker_lost" if attempts == 1 else "length"] * 2
        assert sorted(map(str, ends)) == ["length", "length", *lost]
        assert len(client.generate([1], max_tokens=3).token_ids) == 3


def _generate(submission: int, max_tokens: int) -> bytes:
    request = GenerateRequest(
        request_id=RequestId(f"r{submission}"),
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return encode(Generate(submission=submission, request=request))


def test_a_client_that_takes_nothing_is_given_up_by_name_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlt.coordinator.client_sockets.HIGH_WATER", 4)
    with running(client_backlog=100) as handle, Client(handle.endpoint) as good:
        context = zmq.Context()
        lazy = context.socket(zmq.DEALER)
        lazy.set(zmq.RCVHWM, 2)
        lazy.set(zmq.RCVBUF, 4096)
        lazy.set(zmq.LINGER, 0)
        try:
            lazy.connect(handle.endpoint)
            lazy.send(encode(Hello()))
            lazy.recv()
            for number in range(1, 9):
                lazy.send(_generate(number, max_tokens=1000))
            count = handle.service.state.counters
            handle.eventually(lambda: count["failed.slow_client"] == 8, timeout_s=20.0)
            handle.eventually(lambda: handle.service.state.idle)
            assert good.generate([3], max_tokens=4).token_ids == expected_tokens((3,), 4)
            # What was kept for it is in order, and says at the end what happened.
            decoder: Decoder[CoordinatorToClient] = Decoder(CoordinatorToClient)
            ends: dict[str, str | None] = {}
            tokens: dict[str, int] = {}
            lazy.set(zmq.RCVTIMEO, 5000)
            while len(ends) < 8:
                message = decoder.decode(lazy.recv())
                for delta in message.deltas if isinstance(message, Deltas) else ():
                    assert delta.start_index == tokens.get(delta.request_id, 0)
                    tokens[delta.request_id] = delta.start_index + len(delta.token_ids)
                    if delta.finish_reason is FinishReason.ERROR:
                        ends[delta.request_id] = delta.error_code
            assert set(ends.values()) == {"slow_client"}
        finally:
            lazy.close()
            context.term()


def test_malformed_frames_are_counted_and_harm_nobody() -> None:
    with running() as handle, Client(handle.endpoint) as good:
        context = zmq.Context()
        bad = context.socket(zmq.DEALER)
        bad.set(zmq.LINGER, 1000)
        bad.connect(handle.endpoint)
        for frame in (b"", b"\x00", b"\xff" * 100, encode(Deltas(deltas=()))):
            bad.send(frame)
        bad.send_multipart([b"a", b"b", b"c"])
        bad.close()
        context.term()
        handle.eventually(lambda: handle.service._clients.malformed == 5)
        assert good.generate([3], max_tokens=4).token_ids == expected_tokens((3,), 4)
        assert good.stats()["malformed_frames"] == 5.0


def test_a_silent_service_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlt.coordinator.client_link.SILENCE_S", 0.4)
    monkeypatch.setattr("rlt.coordinator.client_link.WATCH_S", 0.1)
    with running() as handle, Client(handle.endpoint, timeout_s=2.0) as client:
        stream = client.generate([5], max_tokens=900, stream=True)
        next(stream)
        blocked, go = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go.wait(5.0)

        handle.loop.call_soon_threadsafe(block)
        blocked.wait(5.0)
        with pytest.raises(ServiceUnreachable, match="nothing was heard"):
            list(stream)
        go.set()
        # It lives after all: the request that was given up is ended there, and new ones are served.
        assert len(client.generate([5], max_tokens=3).token_ids) == 3
        handle.eventually(lambda: handle.service.state.idle, timeout_s=1.0)


def test_closing_a_client_frees_every_thread_that_waits_on_it() -> None:
    with running() as handle:
        client = Client(handle.endpoint)
        stream = client.generate([5], max_tokens=900, stream=True)
        next(stream)
        go = threading.Event()
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                client.stats()
            except ServiceUnreachable as error:
                errors.append(error)

        def read() -> None:
            try:
                list(stream)
            except ServiceUnreachable as error:
                errors.append(error)

        threads = [threading.Thread(target=ask), threading.Thread(target=read)]
        handle.loop.call_soon_threadsafe(go.wait, 5.0)  # nobody answers
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        client.close()
        for thread in threads:
            thread.join(3.0)
            assert not thread.is_alive()
        go.set()
        assert len(errors) == 2
        handle.eventually(lambda: handle.service.state.idle)


def test_two_services_cannot_share_an_address() -> None:
    with running(client_endpoints=("tcp://127.0.0.1:0",)) as handle:
        with (
            pytest.raises(ConfigError, match=handle.endpoint),
            running(client_endpoints=(handle.endpoint,)),
        ):
            pass


def test_a_client_may_connect_by_tcp() -> None:
    with running(client_endpoints=("tcp://127.0.0.1:*",)) as handle:
        assert handle.endpoint.startswith("tcp://127.0.0.1:")
        with Client(handle.endpoint) as client:
            assert len(client.generate([5], max_tokens=3).token_ids) == 3
