"""The book of asks that are repeated until answered, with growing intervals.

Owns when each ask is due again. Never sends anything and never reads a clock: whoever holds the
book looks up what a key stands for, and repeats it. Asking an open key again changes nothing.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class AskBook(Generic[Key]):
    def __init__(self, first_s: float = 0.25, longest_s: float = 4.0, factor: float = 2.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._factor = factor
        self._open: dict[Key, _Ask] = {}
        self._heap: list[tuple[float, int, Key]] = []  # entries of answered asks are skipped
        self._serial = 0
        self.repeats = 0

    def ask(self, key: Key, now_s: float) -> bool:
        """Note that `key` has just been asked; True if it was not open before."""
        if key in self._open:
            return False
        self._serial += 1
        self._open[key] = _Ask(self._serial, self._first_s)
        heapq.heappush(self._heap, (now_s + self._first_s, self._serial, key))
        return True

    def answered(self, key: Key) -> bool:
        """The ask is settled, or nobody wants its answer any more. True if it was open."""
        return self._open.pop(key, None) is not None

    def due(self, now_s: float) -> list[Key]:
        """Every open ask whose time has come, to be repeated now; each gets a later time."""
        due: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, serial, key = heapq.heappop(self._heap)
            ask = self._open.get(key)
            if ask is None or ask.serial != serial:
                continue
            due.append(key)
            ask.tries += 1
            ask.interval_s = min(ask.interval_s * self._factor, self._longest_s)
            heapq.heappush(self._heap, (now_s + ask.interval_s, serial, key))
        self.repeats += len(due)
        return due

    def tries(self, key: Key) -> int:
        """How often an open ask was repeated; 0 if it is not open."""
        ask = self._open.get(key)
        return 0 if ask is None else ask.tries

    def __contains__(self, key: object) -> bool:
        return key in self._open

    def __iter__(self) -> Iterator[Key]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


class _Ask:
    __slots__ = ("interval_s", "serial", "tries")

    def __init__(self, serial: int, interval_s: float) -> None:
        self.serial = serial
        self.interval_s = interval_s
        self.tries = 0
