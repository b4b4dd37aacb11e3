"""The supervisor over small scripted children, in a process of its own."""

import os
import re
import signal
import subprocess
from pathlib import Path

from .script import (
    COUNT,
    END_ON_TERM,
    FOREVER,
    IGNORE_TERM,
    SAY_READY,
    SERVE,
    WAIT,
    supervised,
    wait_gone,
    wait_line,
)


def test_the_first_signal_asks_the_main_child_alone_and_everything_ends_with_0(
    tmp_path: Path,
) -> None:
    with supervised({"main": SERVE, "worker": WAIT}, tmp_path) as process:
        wait_line(process, "READY")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert err.index("main stopped (exit code 0)") < err.index("worker stopped (exit code 0)")
    assert list(tmp_path.glob("s-*")) == []


def test_a_worker_that_dies_at_start_stops_everything_and_its_error_is_shown(
    tmp_path: Path,
) -> None:
    dying = "import sys; print('error: no such tensor', file=sys.stderr); sys.exit(2)"
    with supervised({"main": WAIT, "worker": dying, "other": WAIT}, tmp_path) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert re.search(r"^worker +\| error: no such tensor$", err, re.MULTILINE)
    assert "worker exit code 2; stopping everything" in err
    assert list(tmp_path.glob("s-*")) == []


def test_a_worker_that_is_terminated_at_start_ends_the_start_as_a_failure(tmp_path: Path) -> None:
    ending = "import sys; sys.exit(75)"
    with supervised({"main": WAIT, "worker": ending}, tmp_path) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "worker exit code 75; stopping everything" in err


def test_a_worker_that_ignores_sigterm_is_killed_within_the_bounds(tmp_path: Path) -> None:
    stubborn = IGNORE_TERM + FOREVER
    with supervised({"main": SERVE, "worker": stubborn}, tmp_path) as process:
        wait_line(process, "READY")
        worker = _pid(process, "worker")
        wait_line(process, "up")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "worker stopped (ended by SIGKILL)" in err
    assert wait_gone(worker)


def test_a_second_signal_kills_a_drain_that_takes_too_long(tmp_path: Path) -> None:
    with supervised({"main": IGNORE_TERM + SAY_READY + FOREVER}, tmp_path) as process:
        wait_line(process, "READY")
        process.send_signal(signal.SIGINT)
        wait_line(process, "finishing what runs")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130


def test_a_killed_supervisor_leaves_no_child_and_the_next_one_removes_its_folder(
    tmp_path: Path,
) -> None:
    children = {"main": IGNORE_TERM + SAY_READY + FOREVER, "worker": IGNORE_TERM + FOREVER}
    with supervised(children, tmp_path) as process:
        pids = [_pid(process, "main"), _pid(process, "worker")]
        wait_line(process, "READY")
        process.kill()
        assert all(wait_gone(pid) for pid in pids)
    (left,) = tmp_path.glob("s-*")
    with supervised({"main": SERVE}, tmp_path) as process:
        wait_line(process, "READY")
        assert not left.exists()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


def test_a_childs_own_children_end_with_it(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('grandchild', child.pid, flush=True)\n"
    )
    with supervised({"main": parent + SERVE, "worker": WAIT}, tmp_path) as process:
        grandchild = int(wait_line(process, "grandchild").split()[-1])
        wait_line(process, "READY")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert wait_gone(grandchild)


def _pid(process: subprocess.Popen[str], name: str) -> int:
    return _pid_in(wait_line(process, f"started {name}"))


def _pid_in(line: str) -> int:
    return int(line.split("process ")[1].rstrip(")\n"))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_worker_that_is_killed_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    with supervised({"main": SERVE, "a": WAIT, "b": WAIT}, tmp_path) as process:
        first = _pid(process, "a")
        wait_line(process, "READY")
        _kill(first)
        assert "ended by SIGKILL; the others go on" in wait_line(process, "started again in 0.05 s")
        assert _pid(process, "a") != first
        wait_line(process, "up")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "b stopped (exit code 0)" in err and "started b" not in err


def test_a_worker_that_ends_with_0_stays_down(tmp_path: Path) -> None:
    hears = END_ON_TERM + "print('a hears signals', flush=True)\n" + FOREVER
    with supervised({"main": SERVE, "a": hears, "b": WAIT}, tmp_path) as process:
        ended = _pid(process, "a")
        wait_line(process, "READY")
        wait_line(process, "a hears signals")
        os.kill(ended, signal.SIGTERM)
        wait_line(process, "a stopped (exit code 0) and stays down")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "started a" not in err


def test_a_worker_that_asks_for_it_is_started_again_at_once(tmp_path: Path) -> None:
    (tmp_path / "starts").mkdir()
    asks = COUNT + "import time\nif count == 1: time.sleep(1.2); os._exit(75)\n" + WAIT
    with supervised({"main": SERVE, "worker": asks}, tmp_path) as process:
        wait_line(process, "READY")
        assert wait_line(process, "exit code 75").endswith("and it is started again\n")
        _pid(process, "worker")


def test_the_main_child_is_started_again_while_the_workers_go_on_and_ready_is_said_once(
    tmp_path: Path,
) -> None:
    with supervised({"main": SERVE, "worker": WAIT}, tmp_path) as process:
        main = _pid(process, "main")
        wait_line(process, "READY")
        _kill(main)
        assert _pid(process, "main") != main
        wait_line(process, "up")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, ""), err
    assert "started worker" not in err


def test_a_main_child_that_fails_again_and_again_ends_everything_with_1(tmp_path: Path) -> None:
    (tmp_path / "starts").mkdir()
    fails = COUNT + "if count > 1: os._exit(3)\n" + SERVE
    with supervised({"main": fails, "worker": WAIT}, tmp_path) as process:
        main = _pid(process, "main")
        wait_line(process, "READY")
        _kill(main)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "main: it failed 5 times in " in err
    assert "worker stopped" in err
    assert len(list((tmp_path / "starts").iterdir())) == 5


def test_a_restart_storm_of_workers_stops_when_the_service_does(tmp_path: Path) -> None:
    (tmp_path / "starts").mkdir()
    counted = "if count > 3: os._exit(1)\nprint('counted', flush=True)\n"
    workers = dict.fromkeys("abc", COUNT + counted + WAIT)
    with supervised({"main": SERVE, **workers}, tmp_path) as process:
        wait_line(process, "READY")
        lines: list[str] = []
        while sum("counted" in line for line in lines) < 3:
            lines.append(wait_line(process, ""))
        for name in workers:
            _kill(next(_pid_in(line) for line in lines if f"started {name}" in line))
        for _ in range(9):
            wait_line(process, "it is started again")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "started" not in err.partition("got SIGTERM")[2]


def test_nothing_is_started_again_while_the_main_child_finishes_what_runs(tmp_path: Path) -> None:
    slow = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(1),"
    slow += " sys.exit(0)))\n" + SAY_READY + FOREVER
    with supervised({"main": slow, "worker": WAIT}, tmp_path) as process:
        worker = _pid(process, "worker")
        wait_line(process, "READY")
        process.send_signal(signal.SIGTERM)
        wait_line(process, "finishing what runs")
        _kill(worker)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "worker stopped (ended by SIGKILL)" in err and "started" not in err


def test_a_signal_while_the_main_child_is_down_ends_the_others_without_it(tmp_path: Path) -> None:
    (tmp_path / "starts").mkdir()
    fails = COUNT + "if count > 1: os._exit(3)\n" + SERVE
    with supervised({"main": fails, "worker": WAIT}, tmp_path) as process:
        main = _pid(process, "main")
        wait_line(process, "READY")
        _kill(main)
        wait_line(process, "started again in 0.2 s")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "worker stopped (exit code 0)" in err


def test_alone_a_first_start_that_cannot_be_ends_with_its_code(tmp_path: Path) -> None:
    with supervised({"engine": "import sys; sys.exit(2)"}, tmp_path, alone=True) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "engine: it could not start" in err


def test_alone_an_engine_that_fails_is_started_again_until_it_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "starts").mkdir()
    fails = COUNT + "os._exit([1, 2, 0][count - 1])\n"
    with supervised({"engine": fails}, tmp_path, alone=True) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert err.count("started engine") == 3


def test_alone_the_signal_is_passed_on_and_a_drained_engine_stays_down(tmp_path: Path) -> None:
    drains = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    with supervised({"engine": drains + FOREVER}, tmp_path, alone=True) as process:
        wait_line(process, "up")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "engine stopped (exit code 75)" in err


def test_alone_a_drain_beyond_its_bound_gets_a_second_signal_and_then_no_choice(
    tmp_path: Path,
) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=1))\n"
    with supervised({"engine": stubborn + FOREVER}, tmp_path, alone=True) as process:
        wait_line(process, "up")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err.count("heard") == 2 and "killing engine" in err
