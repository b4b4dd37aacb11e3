"""What a supervisor says to the coordinator, and what it does when it is told to expel."""

import os
import re
import signal
from pathlib import Path

import pytest

from rlt.connector.messages import Supervise, WorkerExited
from rlt.launch.supervisor_link import MAX_FRAME_BYTES, SUPERVISE_S

from .fake_coordinator import FakeCoordinator
from .script import (
    FOREVER,
    IGNORE_TERM,
    SAY_READY,
    SERVE,
    WAIT,
    started,
    supervised,
    wait_gone,
    wait_line,
)

TELL = "import os; print('I am', os.environ.get('RLT_INCARNATION'), flush=True)\n"


def test_workers_are_listed_every_second_by_the_incarnation_that_they_hear(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"main": TELL + SERVE, "worker": TELL + WAIT},
            tmp_path,
            coordinator=coordinator.endpoint,
        ) as process,
    ):
        told = sorted(wait_line(process, "I am").split("|")[1].strip() for _ in range(2))
        child = coordinator.wait_child("worker")
        assert told == ["I am None", f"I am {child.incarnation}"]
        assert re.fullmatch(r"worker-[0-9a-f]{12}", child.incarnation)
        assert child.pid > 0 and coordinator.supervisor.startswith(b"supervisor-")
        assert coordinator.wait(Supervise, within_s=3.0).children == (child,)


def test_a_killed_worker_is_told_of_with_its_incarnation_and_returns_as_another(
    tmp_path: Path,
) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"main": SERVE, "worker": WAIT}, tmp_path, coordinator=coordinator.endpoint
        ) as process,
    ):
        wait_line(process, "READY")
        first = coordinator.wait_child("worker")
        os.kill(first.pid, signal.SIGKILL)
        exited = coordinator.wait(WorkerExited)
        assert exited == WorkerExited(
            worker="worker", incarnation=first.incarnation, pid=first.pid, status=-9
        )
        second = coordinator.wait_child("worker", other_than=first.incarnation)
        assert second.pid != first.pid


def test_a_stopped_worker_is_expelled_and_asked_again_it_is_answered_again(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"main": SERVE, "worker": WAIT, "other": WAIT},
            tmp_path,
            coordinator=coordinator.endpoint,
        ) as process,
    ):
        wait_line(process, "READY")
        child = coordinator.wait_child("worker")
        other = coordinator.wait_child("other")
        os.kill(child.pid, signal.SIGSTOP)
        coordinator.expel(child.incarnation)
        exited = coordinator.wait(WorkerExited)
        assert (exited.incarnation, exited.status) == (child.incarnation, -9)
        assert wait_gone(child.pid)
        for _ in range(3):
            coordinator.expel(child.incarnation)
            assert coordinator.wait(WorkerExited) == exited
        assert coordinator.wait_child("other") == other


def test_an_incarnation_that_it_never_had_and_garbage_are_passed_over(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"main": SERVE, "worker": WAIT}, tmp_path, coordinator=coordinator.endpoint
        ) as process,
    ):
        wait_line(process, "READY")
        child = coordinator.wait_child("worker")
        coordinator.expel("worker-000000000000")
        for frame in (b"", b"\xff" * 100, b"\x81\xa4type\xa5expel", b"x" * 60_000):
            coordinator.send_bytes(frame)
        for _ in range(2):
            message = coordinator.hear(3.0)
            assert message == Supervise(children=(child,))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_frame_larger_than_any_may_be_does_not_silence_it(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised({"main": SERVE, "worker": WAIT}, tmp_path, coordinator=coordinator.endpoint),
    ):
        child = coordinator.wait_child("worker")
        coordinator.send_bytes(bytes(MAX_FRAME_BYTES + 1))
        while coordinator.hear(1.5 * SUPERVISE_S) is not None:
            continue  # what it said before that frame came
        assert coordinator.wait(Supervise).children == (child,)
        coordinator.expel(child.incarnation)
        assert coordinator.wait(WorkerExited).incarnation == child.incarnation


def test_an_end_is_kept_until_a_coordinator_can_hear_of_it(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(tmp_path)
    with supervised(
        {"main": SERVE, "worker": WAIT}, tmp_path, coordinator=coordinator.endpoint
    ) as process:
        wait_line(process, "READY")
        with coordinator:
            first = coordinator.wait_child("worker")
        os.kill(first.pid, signal.SIGKILL)
        wait_line(process, "it is started again")
        with coordinator:
            exited = coordinator.wait(WorkerExited)
            assert exited.incarnation == first.incarnation
            second = coordinator.wait_child("worker", other_than=first.incarnation)
            coordinator.expel(first.incarnation)  # a coordinator that is new asks on its own
            assert coordinator.wait(WorkerExited) == exited
            assert coordinator.wait_child("worker") == second


def test_a_supervisor_alone_with_its_engine_does_the_same(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"engine": WAIT}, tmp_path, coordinator=coordinator.endpoint, alone=True
        ) as process,
    ):
        first = coordinator.wait_child("engine")
        os.kill(first.pid, signal.SIGSTOP)
        coordinator.expel(first.incarnation)
        assert coordinator.wait(WorkerExited).status == -9
        coordinator.wait_child("engine", other_than=first.incarnation)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert coordinator.wait(WorkerExited).status == 0
    assert process.returncode == 0


@pytest.mark.soak
def test_a_coordinator_that_answers_no_more_is_killed_and_started_again(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"main": SERVE, "worker": WAIT},
            tmp_path,
            coordinator=coordinator.endpoint,
            patience={"between_s": 2.0, "first_s": 6.0},
        ) as process,
    ):
        first = started(process, "main")
        wait_line(process, "READY")
        child = coordinator.wait_child("worker")
        coordinator.answer(first)
        wait_line(process, "killing main: it does not answer")
        wait_line(process, "ended by SIGKILL; the others go on, and it is started again")
        second = started(process, "main")
        coordinator.answer(first)  # late: the second one has time for its own first answer
        coordinator.hear_all(4.0)
        assert Path(f"/proc/{second}").exists()
        wait_line(process, "killing main: it does not answer")
        assert started(process, "main") != second
        assert coordinator.wait_child("worker") == child


def test_a_coordinator_that_hangs_when_it_is_to_end_is_killed(tmp_path: Path) -> None:
    with (
        FakeCoordinator(tmp_path) as coordinator,
        supervised(
            {"main": IGNORE_TERM + SAY_READY + FOREVER, "worker": WAIT},
            tmp_path,
            coordinator=coordinator.endpoint,
            patience={"between_s": 2.0, "first_s": 6.0},
        ) as process,
    ):
        pid = started(process, "main")
        wait_line(process, "READY")
        process.send_signal(signal.SIGTERM)
        coordinator.answer(pid)
        _, err = process.communicate(timeout=30)
    assert "killing main: it does not answer" in err and process.returncode == 1


def test_a_coordinator_that_is_not_there_delays_no_end(tmp_path: Path) -> None:
    nowhere = f"ipc://{tmp_path}/nobody.sock"
    with supervised({"main": SERVE, "worker": WAIT}, tmp_path, coordinator=nowhere) as process:
        wait_line(process, "READY")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
