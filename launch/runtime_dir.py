"""The folder in which one service keeps its sockets: made fresh, private, and removed at the end.

Owns the layout `<base>/<service>/`, the lock that shows a service is alive, and the sweep of what
killed launchers left. Never removes a folder whose lock is held.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..runtime.errors import ConfigError

LOCK = "lock"
MAX_SOCKET_PATH = 100  # the kernel's limit for a Unix socket's path is 107 bytes
LONGEST_NAME = "/prefill-0000.sock"


@contextmanager
def service_dir(base: Path) -> Iterator[Path]:
    """A new folder under `base`, held by a lock for as long as the block runs."""
    _make_private(base)
    with _locked(base / LOCK):
        _sweep(base)
        folder = Path(tempfile.mkdtemp(prefix="s-", dir=base))
        held = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        if len(os.fsencode(folder)) + len(LONGEST_NAME) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"--runtime-dir {base}: the path is too long for a Unix socket; choose one of at "
                f"most {MAX_SOCKET_PATH - len(LONGEST_NAME) - len('/s-xxxxxxxx')} bytes"
            )
        yield folder
    finally:
        with _locked(base / LOCK):
            shutil.rmtree(folder)
        os.close(held)


def _make_private(base: Path) -> None:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
    except OSError as error:
        raise ConfigError(f"--runtime-dir {base}: {error.strerror}; choose another") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"--runtime-dir {base} must belong to you alone (mode 0700); choose another"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _sweep(base: Path) -> None:
    """Remove the folders of services whose launcher is gone. Whoever makes or removes a folder
    holds the base's lock, so one without a lock file is a leftover too."""
    for folder in base.glob("s-*"):
        if not _is_alive(folder):
            shutil.rmtree(folder)


def _is_alive(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)
