"""What the launcher waits for, in one place: descriptors and named timers.

Owns the selector and the times at which something is due. Blocks in turn() alone. Setting a timer
again moves it, and whoever is no longer watched is not called any more, not even in the same turn.
"""

import selectors
import time
from collections.abc import Callable
from typing import Protocol


class Readable(Protocol):
    def fileno(self) -> int: ...


Act = Callable[[], None]


class Loop:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._selector = selectors.DefaultSelector()
        self._timers: dict[str, tuple[float, Act]] = {}

    def watch(self, source: Readable | int, act: Act) -> None:
        """Call `act` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def unwatch(self, source: Readable | int) -> None:
        """Nothing to do if it is not watched."""
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def after(self, name: str, delay_s: float, act: Act) -> None:
        self._timers[name] = (self.now_s() + delay_s, act)

    def cancel(self, name: str) -> None:
        self._timers.pop(name, None)

    def turn(self) -> None:
        """Wait until something is readable or due, and act on all of that."""
        for key, _ in self._selector.select(self._timeout_s()):
            if self._selector.get_map().get(key.fileobj) is key:
                key.data()
        now_s = self.now_s()
        due = [name for name, (at_s, _) in self._timers.items() if at_s <= now_s]
        for name in sorted(due, key=lambda name: self._timers[name][0]):
            self._run(name, now_s)

    def close(self) -> None:
        self._selector.close()

    def _run(self, name: str, now_s: float) -> None:
        at_s, act = self._timers.get(name, (now_s + 1, None))
        if act is not None and at_s <= now_s:  # an earlier one may have moved or cancelled it
            del self._timers[name]
            act()

    def _timeout_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(at_s for at_s, _ in self._timers.values()) - self.now_s())
