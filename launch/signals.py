"""Signals that ask a program to stop, as something a selector can wait for.

Owns the handlers of those signals while it is open, and puts the earlier ones back.
"""

import signal
import socket

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    def __enter__(self) -> "SignalPipe":
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writing.fileno())
        self._handlers = {s: signal.signal(s, lambda *_: None) for s in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        self._reading.close()
        self._writing.close()

    def fileno(self) -> int:
        return self._reading.fileno()

    def read(self) -> list[int]:
        return [number for number in self._reading.recv(64) if number in STOP_SIGNALS]
