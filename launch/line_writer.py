"""Lines to a descriptor, written by a thread of its own: whoever reads them slowly delays nobody.

Owns the lines that are not written yet, up to a bound; beyond it lines are dropped, counted, and
the gap is shown. A reader that went away is no fault.
"""

import contextlib
import os
import threading

BOUND_BYTES = 4 << 20


class LineWriter:
    def __init__(self, descriptor: int, bound_bytes: int = BOUND_BYTES) -> None:
        self._descriptor = descriptor
        self._bound_bytes = bound_bytes
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._bytes = 0  # of what waits and of what is being written
        self._dropped = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Never blocks."""
        data = line.encode(errors="replace") + b"\n"
        with self._changed:
            if self._bytes + len(data) > self._bound_bytes:
                self._dropped += 1
                return
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlt-lines", daemon=True)
            self._thread.start()

    def close(self, within_s: float) -> bool:
        """Wait until all is written. False if that took too long: it goes on, as long as there is
        a program."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(within_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                lines, self._waiting = self._waiting, []
                dropped, self._dropped = self._dropped, 0
            if not lines:
                return
            note = f"({dropped} lines were dropped: nobody read)\n" if dropped else ""
            self._write_all(b"".join(lines) + note.encode())
            with self._changed:
                self._bytes -= sum(map(len, lines))

    def _write_all(self, data: bytes) -> None:
        """By the descriptor itself: a stream's lock, held here for long, would hold up the end of
        the program."""
        left = memoryview(data)
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
