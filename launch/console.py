"""What the launcher shows: its own progress and its children's lines, each with its origin.

Progress and logs go to stderr; stdout has the READY line alone. A reader that went away, or that
does not read, never stops the service.
"""

import contextlib
import time

from .line_writer import LineWriter

STDERR = 2
CLOSE_S = 1.0


class Console:
    def __init__(self, name: str) -> None:
        self._name = name
        self._started_s = time.monotonic()
        self._lines = LineWriter(STDERR)

    def child(self, name: str, line: str) -> None:
        self._lines.write(f"{name:<12}| {line}")

    def say(self, text: str) -> None:
        """A line of the launcher itself, with the seconds since it started."""
        self.child(self._name, f"{time.monotonic() - self._started_s:6.2f} s  {text}")

    def announce(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def close(self) -> None:
        """Nothing more is to be shown; waits a little until all of it is."""
        self._lines.close(CLOSE_S)
