"""A service as a child of this program: started, waited for, and stopped in order.

For the demo, the benchmarks and the tests. Uses the launcher as a user would, through its command
line, its READY line and SIGTERM.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from ..runtime.errors import ServiceError
from .children import DieWith

STOP_S = 60.0
READY = "READY "


@dataclass(frozen=True)
class RunningService:
    endpoint: str
    launcher: subprocess.Popen[str]


@contextmanager
def running_service(
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    stderr: IO[str] | None = None,
) -> Iterator[RunningService]:
    """rlt-coordinator with these arguments. Raises ServiceError if it does not become ready, or
    does not end with exit code 0 when it is asked to stop."""
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlt.launch.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **(environment or {})},
        process_group=0,  # a Ctrl-C meant for this program reaches the launcher through it alone
        preexec_fn=DieWith(os.getpid()),
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        try:
            yield RunningService(_wait_ready(launcher, launcher.stdout), launcher)
        finally:
            code = _stop(launcher)
    if code != 0:
        raise ServiceError(f"rlt-coordinator ended with exit code {code} when asked to stop")


def _wait_ready(launcher: "subprocess.Popen[str]", stdout: IO[str]) -> str:
    for line in stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise ServiceError(f"rlt-coordinator did not start: exit code {launcher.wait()}")


def _stop(launcher: "subprocess.Popen[str]") -> int:
    launcher.send_signal(signal.SIGTERM)
    try:
        return launcher.wait(STOP_S)
    except subprocess.TimeoutExpired:
        launcher.kill()  # its children go with it
        return launcher.wait()
