"""Runs one worker's tick soon after anything happened, and keeps polling while transfers are out.

NIXL has no descriptor to wait on, so while a WRITE or a notification is outstanding the tick runs
every POLL_S; otherwise only when woken. An idle worker uses no CPU.
"""

import asyncio
from collections.abc import Callable

POLL_S = 0.001


class Ticker:
    def __init__(self, tick: Callable[[], bool]) -> None:
        """tick: does bounded work and returns whether it must be polled again."""
        self._loop = asyncio.get_running_loop()
        self._tick = tick
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._closed = False

    def wake(self) -> None:
        if self._soon is None and not self._closed:
            self._soon = self._loop.call_soon(self._run)

    def wake_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.wake)

    def close(self) -> None:
        self._closed = True
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()

    def _run(self) -> None:
        self._soon = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._tick() and not self._closed:
            self._later = self._loop.call_later(POLL_S, self._run)
