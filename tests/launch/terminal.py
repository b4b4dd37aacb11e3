"""A program in a terminal of its own: what a person would type and see."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.everything = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str, timeout_s: float = 30.0) -> str:
        """What was shown up to and with `text`, colours left out."""
        deadline = time.monotonic() + timeout_s
        while text not in (plain := _ESCAPE.sub("", self._unread)):
            ready, _, _ = select.select(
                [self._descriptor], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready and self._read(), f"no {text!r} in:\n{self.everything}"
        seen, _, self._unread = plain.partition(text)
        return (seen + text).replace("\r\n", "\n")

    def _read(self) -> bool:
        try:
            read = os.read(self._descriptor, 65536)
        except OSError:  # the other side is closed
            return False
        piece = self._decoder.decode(read)
        self._unread += piece
        self.everything += piece
        return bool(read)

    def end(self, timeout_s: float = 20.0) -> int:
        with contextlib.suppress(AssertionError):
            self.until("\0never\0", timeout_s)  # so that it is not held up by a full terminal
        return self.process.wait(timeout_s)


def _take_terminal() -> None:
    """Ctrl-C goes to it, and is heard also where whoever started the tests ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(arguments: Sequence[str], **environment: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
