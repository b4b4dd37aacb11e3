"""Several services on one machine, and how a service ends."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from .service import Service, running

pytestmark = pytest.mark.system


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_eight_services_start_at_once_answer_and_leave_nothing() -> None:
    before = shared_memory()
    question = "What is 17 + 25?"
    with ExitStack() as stack:
        with ThreadPoolExecutor(8) as pool:
            starts = [running(1, 1, "--threads", "1", model=None) for _ in range(8)]
            services = list(pool.map(stack.enter_context, starts))
        assert len({service.address for service in services}) == 8
        for service in services:
            with service.client() as client:
                answer = client.generate([{"role": "user", "content": question}])
                assert answer.text.strip().endswith("The answer is 42.")
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(Service.stop, services)) == [0] * 8
    assert shared_memory() <= before


@pytest.mark.timeout(120)
def test_ctrl_c_lets_what_runs_finish() -> None:
    with running(1, 1, "--threads", "1") as service, service.client() as client:
        stream = client.generate([5, 6, 7], stream=True, max_tokens=300, ignore_eos=True)
        first = next(delta for delta in stream if delta.token_ids)
        service.process.send_signal(signal.SIGINT)
        tokens = len(first.token_ids) + sum(len(delta.token_ids) for delta in stream)
        assert tokens == 300
        assert service.process.wait(30.0) == 0


@pytest.mark.timeout(120)
def test_the_requests_of_a_dead_worker_go_on_elsewhere_without_a_gap() -> None:
    with running(1, 2, "--threads", "1") as service, service.client() as client:
        streams = [
            client.generate([5, 6, n], stream=True, max_tokens=400, ignore_eos=True)
            for n in range(4)
        ]
        firsts = [next(delta for delta in stream if delta.token_ids) for stream in streams]
        os.kill(service.child("decode-0").pid, signal.SIGKILL)
        for n, (first, stream) in enumerate(zip(firsts, streams, strict=True)):
            rest = [token for delta in stream for token in delta.token_ids]
            again = client.generate([5, 6, n], max_tokens=400, ignore_eos=True)
            assert (*first.token_ids, *rest) == again.token_ids
        assert len(client.generate([5], max_tokens=3, ignore_eos=True).token_ids) == 3
        assert service.stop() == 0
        assert all(not child.is_running() for child in psutil.Process().children(recursive=True))
