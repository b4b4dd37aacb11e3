"""rlt-ctl's command line: what it takes, and what it says where nothing can be done."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def run_ctl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "rlt.launch.ctl", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "ACTION"),
        (["explode"], "explode"),
        (["drain"], "WORKER"),
        (["restart"], "--all"),
        (["restart", "decode-0", "--all"], "--all"),
        (["drain", "decode-0", "--all"], "--all"),
        (["status", "--timeout-s", "0"], "--timeout-s"),
        (["status", "--connect", "somewhere"], "--connect"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(
    arguments: Sequence[str], named: str
) -> None:
    result = run_ctl(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and named in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_a_service_it_says_so_with_exit_code_2(tmp_path: Path) -> None:
    result = run_ctl("status", XDG_RUNTIME_DIR=str(tmp_path), RLT_CONNECT="")
    assert result.returncode == 2
    assert result.stderr.startswith("error: no service is running under ")


def test_where_nobody_answers_it_says_so_with_exit_code_1(tmp_path: Path) -> None:
    where = f"ipc://{tmp_path}/nobody.sock"
    result = run_ctl("drain", "decode-0", "--connect", where, "--timeout-s", "0.5")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: service_unreachable: ") and where in result.stderr
