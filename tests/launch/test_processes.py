"""What the children of a service are started with."""

import os
import select
from pathlib import Path

import pytest

from rlt.launch.children import Child, ChildSpec
from rlt.launch.cli import coordinator_config, worker_configs
from rlt.launch.options import COORDINATOR, TABLE
from rlt.launch.parser import build_parser
from rlt.launch.processes import default_threads, worker_process


def worker_environment(words: str, folder: Path) -> dict[str, str]:
    options = build_parser(COORDINATOR, "", TABLE).parse_args(words.split())
    workers = worker_configs(options, coordinator_config(options, folder), folder)
    return dict(worker_process(workers[0]).environment)


def test_a_workers_thread_counts_follow_its_option(tmp_path: Path) -> None:
    environment = worker_environment("--threads 3", tmp_path)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"


def test_workers_share_the_cores_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert [default_threads(workers) for workers in (1, 2, 5, 100)] == [12, 6, 2, 1]
    assert worker_environment("--prefill 1 --decode 3", tmp_path)["OMP_NUM_THREADS"] == "3"


def test_log_settings_that_the_user_made_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NIXL_LOG_LEVEL", raising=False)
    assert worker_environment("", tmp_path)["NIXL_LOG_LEVEL"] == "WARN"
    monkeypatch.setenv("NIXL_LOG_LEVEL", "TRACE")
    assert "NIXL_LOG_LEVEL" not in worker_environment("", tmp_path)


def run_child(code: str) -> tuple[list[str], int]:
    lines: list[str] = []
    spec = ChildSpec(name="child", command=("python3", "-c", code))
    child = Child(spec, lambda name, line: lines.append(f"{name}: {line}"))
    while select.select([child.output_fd], [], [], 30)[0] and child.read_output():
        pass
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    return lines, child.reap()


def test_a_childs_last_words_are_heard_even_without_an_end_of_line() -> None:
    code = "import sys; print('one'); sys.stdout.flush(); sys.stderr.write('two'); sys.exit(5)"
    assert run_child(code) == (["child: one", "child: two"], 5)


def test_a_line_that_never_ends_is_passed_on_in_pieces() -> None:
    lines, status = run_child("import sys; sys.stdout.write('x' * 200_000 + '\\n')")
    assert status == 0
    assert sum(line.count("x") for line in lines) == 200_000


def test_a_child_leads_a_group_of_its_own() -> None:
    lines, _ = run_child("import os; print(os.getpid() == os.getpgid(0))")
    assert lines == ["child: True"]
