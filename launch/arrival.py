"""Hears of a file the moment it is moved into a folder, without looking again and again.

Owns one inotify descriptor. Used for the file by which the coordinator says that it serves.
"""

import ctypes
import os
from pathlib import Path

IN_MOVED_TO = 0x80

_libc = ctypes.CDLL(None, use_errno=True)


class FileArrival:
    """Readable (fileno) when something was moved into the folder of `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or _libc.inotify_add_watch(self._fd, bytes(path.parent), IN_MOVED_TO) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot watch {path.parent}: {os.strerror(number)}")

    def fileno(self) -> int:
        return self._fd

    def check(self) -> bool:
        """Take what was heard; True if the file is there."""
        try:
            os.read(self._fd, 65536)
        except BlockingIOError:
            pass
        return self._path.exists()

    def close(self) -> None:
        os.close(self._fd)
