"""The folder of one running coordinator: private, and held by one process at a time.

A ZeroMQ socket silently takes over a socket file that exists, so two services in one folder would
steal each other's clients: the lock forbids that.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..runtime.errors import ConfigError

LOCK_NAME = "coordinator.lock"


@contextmanager
def held_runtime_dir(path: str) -> Iterator[Path]:
    """The folder, made if need be, for as long as the block runs. The lock file goes with it."""
    folder = Path(path).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"runtime_dir {folder}: {error.strerror}; choose another") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"runtime_dir {folder} must belong to you alone (mode 0700)")
    lock = os.open(folder / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"runtime_dir {folder} is in use by another service: choose another"
            ) from error
        yield folder
        (folder / LOCK_NAME).unlink(missing_ok=True)
    finally:
        os.close(lock)
