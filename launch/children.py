"""One child process: started in a group of its own, heard line by line, ended and reaped whole.

Owns the process, its pidfd and its output pipe. Never decides when a child must end or start again.
A child dies with the thread that started it, whatever ends that thread: the kernel sees to it.
"""

import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..connector.config import INCARNATION
from .restart import FOR_EVER, RestartPolicy

PR_SET_PDEATHSIG = 1
READ_BYTES = 65536

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to start, and by which policy again. `environment` is added to this process's own.
    worker: each start of it is an incarnation of its own, which it hears by its environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    policy: RestartPolicy = FOR_EVER
    worker: bool = False


class Child:
    """on_line gets every full line that the child writes to stdout or stderr. incarnation: of a
    worker; others have none. Raises OSError if no process can be had."""

    def __init__(self, spec: ChildSpec, on_line: Callable[[str, str], None]) -> None:
        self.name = spec.name
        self.incarnation = f"{spec.name}-{secrets.token_hex(6)}" if spec.worker else ""
        self._on_line = on_line
        self._partial = b""
        self._process = subprocess.Popen(
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.environment, **self._own_environment()},
            process_group=0,
            preexec_fn=DieWith(os.getpid()),
        )
        assert self._process.stdout is not None
        self.output_fd = self._process.stdout.fileno()
        os.set_blocking(self.output_fd, False)
        self.pid = self._process.pid
        self.pidfd = self._open_pidfd()

    def terminate(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group. Also ends a stopped process."""
        os.killpg(self.pid, signal.SIGKILL)

    def read_output(self) -> bool:
        """Pass on a piece of what was written. False at the end of the output."""
        data = self._read()
        return data is None or bool(data)

    def _own_environment(self) -> dict[str, str]:
        return {INCARNATION: self.incarnation} if self.incarnation else {}

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: a process that nobody watches must not run
            self.kill()
            self._process.wait()
            self._close_output()
            raise

    def _close_output(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> bytes | None:
        """A piece of output, passed on: empty at the end, None if there is nothing yet."""
        try:
            data = os.read(self.output_fd, READ_BYTES)
        except BlockingIOError:
            return None
        self._pass_on(data)
        return data

    def _pass_on(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (not data or len(self._partial) > READ_BYTES):
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._on_line(self.name, line.decode(errors="replace"))

    def reap(self) -> int:
        """After pidfd became readable: end what is left of the group, and take the status.

        The number is subprocess's: an exit code, or minus the signal that ended the child.
        """
        self.kill()  # the unreaped leader keeps the group's number from being given to others
        status = self._process.wait()
        while self._read():
            pass
        self._pass_on(b"")
        self._close_output()
        os.close(self.pidfd)
        return status


class DieWith:
    """Runs in the child before exec: SIGKILL me when my parent dies."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self) -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:  # it died before the line above
            os._exit(1)
