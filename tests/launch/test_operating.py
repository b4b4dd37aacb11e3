"""A running service is looked at, loses processes and is restarted piece by piece: real processes,
one service for all of these tests, each of which leaves it serving."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from rlt.coordinator.client import Client
from rlt.coordinator.discovery import RECORD_NAME, ServiceRecord
from rlt.launch.running import running_service
from rlt.launch.service_view import ServiceView, view_of
from rlt.runtime.errors import ServiceUnreachable

from .test_ctl import run_ctl
from .test_service import ANSWER, QUESTION, SMALL

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ASKED = [{"role": "user", "content": QUESTION}]
WORKERS = ("prefill-0", "decode-0", "decode-1")


@dataclass
class Running:
    endpoint: str
    folder: Path
    log: Path

    def view(self) -> ServiceView:
        with Client(self.endpoint) as client:
            return view_of(client.stats())

    def record(self) -> ServiceRecord:
        (path,) = self.folder.glob(f"*/{RECORD_NAME}")
        return ServiceRecord(**json.loads(path.read_bytes()))

    def incarnations(self) -> dict[str, str]:
        return {row.worker: row.incarnation for row in self.view().workers}

    def wait(self, true: Callable[[ServiceView], bool], within_s: float = 60.0) -> ServiceView:
        """Statistics are asked for: no event tells of them."""
        end_s = time.monotonic() + within_s
        view = None
        while time.monotonic() < end_s:
            try:
                view = self.view()
                if true(view):
                    return view
            except ServiceUnreachable:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not in {within_s} s; last seen: {view}\n{self.log.read_text()}")


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix="rlt-test-"))
    log = folder / "log"
    arguments = ["--runtime-dir", str(folder), "--decode", "2", "--threads", "1", *SMALL]
    with (
        log.open("w") as stderr,
        running_service([*arguments, "--http", "127.0.0.1:0"], stderr=stderr) as running,
    ):
        yield Running(running.endpoint, folder, log)
    shutil.rmtree(folder)


def whole(view: ServiceView) -> bool:
    return view.values["ready_pairs"] == 2 and {row.worker for row in view.workers} == set(WORKERS)


def is_new(view: ServiceView, pid: int) -> bool:
    """Whether the worker of that process has been replaced, in a service that is whole."""
    return all(row.pid != pid for row in view.workers)


def ask_until(endpoint: str, enough: Event) -> list[str]:
    """Answers, one after another. Raises what a request fails with."""
    texts = []
    with Client(endpoint) as client:
        while not enough.is_set():
            texts.append(client.generate(ASKED, timeout_s=120).text)
    return texts


def test_the_status_names_every_worker_with_its_pairs(service: Running) -> None:
    shown = run_ctl("status", "--connect", service.endpoint)
    raw = run_ctl("status", "--json", "--connect", service.endpoint)
    assert (shown.returncode, raw.returncode) == (0, 0), shown.stderr + raw.stderr
    told = json.loads(raw.stdout)
    assert {worker["worker"] for worker in told["workers"]} == set(WORKERS)
    head, _, prefill, *decode = shown.stdout.splitlines()
    assert "ready pairs 2, queued 0, live requests 0" in head
    assert re.match(r"prefill-0 +prefill +\d+ +prefill-0-[0-9a-f]{12} +0 +256/256 +0 ", prefill)
    assert prefill.split()[-3:] == ["serving", "decode-0", "decode-1"]
    assert [line.split()[-2:] for line in decode] == [["serving", "prefill-0"]] * 2


def test_a_rolling_restart_under_load_fails_no_request(service: Running) -> None:
    """The only prefill worker is among them: meanwhile requests wait."""
    before = service.incarnations()
    enough = Event()
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask_until, service.endpoint, enough) for _ in range(3)]
        try:
            rolled = run_ctl("restart", "--all", "--connect", service.endpoint)
        finally:
            enough.set()
        texts = [text for answers in asking for text in answers.result()]
    assert rolled.returncode == 0, rolled.stderr + service.log.read_text()
    assert [line for line in rolled.stdout.splitlines() if line.endswith("is back")] == [
        f"{worker} is back" for worker in WORKERS
    ]
    after = service.wait(whole)
    assert {row.worker: row.incarnation for row in after.workers}.items().isdisjoint(before.items())
    assert set(texts) == {ANSWER}


@pytest.mark.parametrize("worker", [pytest.param("prefill-0", marks=pytest.mark.soak), "decode-1"])
def test_a_killed_worker_comes_back_as_another_and_nobody_else_does(
    service: Running, worker: str
) -> None:
    before = {row.worker: row for row in service.wait(whole).workers}
    os.kill(before[worker].pid, signal.SIGKILL)
    service.wait(
        lambda v: (w := v.find(worker)) is None or w.incarnation != before[worker].incarnation
    )
    after = service.wait(whole)
    changed = {row.worker for row in after.workers if row != before[row.worker]}
    assert {row.worker for row in after.workers if row.pid != before[row.worker].pid} == {worker}
    assert worker in changed
    with Client(service.endpoint) as client:
        assert client.generate(ASKED, timeout_s=60).text == ANSWER


@pytest.mark.soak
def test_a_stopped_worker_is_expelled_killed_and_replaced(service: Running) -> None:
    before = service.wait(whole).find("decode-0")
    assert before is not None
    os.kill(before.pid, signal.SIGSTOP)
    service.wait(
        lambda view: whole(view) and view.find("decode-0") != before and is_new(view, before.pid)
    )
    assert not Path(f"/proc/{before.pid}").exists()


def test_sigterm_to_an_engine_drains_it_and_it_is_started_again_at_once(service: Running) -> None:
    before = service.wait(whole).find("decode-1")
    assert before is not None
    os.kill(before.pid, signal.SIGTERM)
    service.wait(lambda view: whole(view) and is_new(view, before.pid))
    assert (
        f"decode-1 (process {before.pid}) exit code 75; the others go on, and it is started again\n"
        in service.log.read_text()
    )


@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
def test_a_dead_or_hanging_coordinator_comes_back_at_the_same_addresses_and_the_workers_stay(
    service: Running, fault: signal.Signals
) -> None:
    service.wait(lambda view: view.values["supervisors"] == 1)  # it has answered its launcher
    before, record = service.wait(whole), service.record()
    pids = {row.pid for row in before.workers}
    os.kill(record.pid, fault)
    after = service.wait(whole)
    assert {row.pid for row in after.workers} == pids
    again = service.record()
    assert again.pid != record.pid and record.http.startswith("http://127.0.0.1:")
    assert (again.endpoints, again.http, again.workers_at) == (
        record.endpoints,
        record.http,
        record.workers_at,
    )
    with Client(service.endpoint) as client:
        assert client.generate(ASKED, timeout_s=60).text == ANSWER


def test_a_drained_worker_stays_down_and_another_of_that_name_is_refused(service: Running) -> None:
    """The last one: afterwards the service has one pair."""
    service.wait(whole)
    unknown = run_ctl("drain", "decode-7", "--connect", service.endpoint)
    assert unknown.returncode == 1 and "decode-7" in unknown.stderr
    drained = run_ctl("drain", "decode-1", "--wait", "--connect", service.endpoint)
    assert drained.returncode == 0, drained.stderr
    assert drained.stdout.splitlines()[-1] == "decode-1 has ended"
    again = run_ctl("drain", "decode-1", "--connect", service.endpoint)
    assert again.returncode == 1 and "decode-1" in again.stderr
    assert [row.worker for row in service.view().workers] == ["prefill-0", "decode-0"]
    assert "decode-1 stopped (exit code 0) and stays down" in service.log.read_text()
    os.kill(service.record().pid, signal.SIGKILL)  # nor does its coordinator wait for it
    service.wait(lambda view: view.values["ready_pairs"] == 1)
    with Client(service.endpoint) as client:
        assert client.generate(ASKED, timeout_s=60).text == ANSWER


def test_sigterm_to_rlt_worker_drains_it_and_a_killed_engine_comes_back(service: Running) -> None:
    worker = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "rlt.launch.worker", "--role", "decode", "--name", "far"),
            *("--coordinator", service.record().workers_at, "--threads", "1", *SMALL),
            *("--runtime-dir", str(service.folder)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = service.wait(lambda view: _pairs_of(view, "far") == 1).find("far")
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        service.wait(lambda view: _pairs_of(view, "far") == 1 and is_new(view, first.pid))
        worker.send_signal(signal.SIGTERM)
        _, err = worker.communicate(timeout=60)
    finally:
        worker.kill()
        worker.communicate()
    assert worker.returncode == 0, err
    assert "far stopped (exit code 75)" in err
    service.wait(lambda view: view.find("far") is None)


def _pairs_of(view: ServiceView, name: str) -> int:
    row = view.find(name)
    return 0 if row is None else len(row.pairs)
