"""The supervisor over small scripted children, in a process of its own."""

import os
import re
import signal
import subprocess
from pathlib import Path

from .script import FOREVER, IGNORE_TERM, SAY_READY, SERVE, WAIT, supervised, wait_gone, wait_line


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
    line = wait_line(process, f"started {name}")
    return int(line.split("process ")[1].rstrip(")\n"))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
