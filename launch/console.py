"""What the launcher shows: its own progress and its children's lines, each with its origin.

Progress and logs go to stderr; stdout has the READY line alone. A reader that went away never
stops the service.
"""

import contextlib
import sys
import time


class Console:
    def __init__(self, name: str) -> None:
        self._name = name
        self._started_s = time.monotonic()

    def child(self, name: str, line: str) -> None:
        self._write(f"{name:<12}| {line}")

    def say(self, text: str) -> None:
        """A line of the launcher itself, with the seconds since it started."""
        self._write(f"{self._name:<12}| {time.monotonic() - self._started_s:6.2f} s  {text}")

    def announce(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
