"""Numbered places for live generations: execution slots, receive slots.

Owns who holds which number. Taking is idempotent; a number is handed on only after it was given
back. CapacityEpoch tells a blocked caller that something was.
"""

import threading

from .types import Generation


class SlotPool:
    """Numbers first..first+count-1; the lowest free one is given next."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._held: dict[Generation, int] = {}

    def take(self, generation: Generation) -> int | None:
        held = self._held.get(generation)
        if held is None and self._free:
            held = self._held[generation] = self._free.pop()
        return held

    def find(self, generation: Generation) -> int | None:
        return self._held.get(generation)

    def give_back(self, generation: Generation) -> bool:
        """Whether there was one."""
        slot = self._held.pop(generation, None)
        if slot is None:
            return False
        self._free.append(slot)
        self._free.sort(reverse=True)
        return True

    @property
    def free(self) -> int:
        return len(self._free)


class CapacityEpoch:
    """A number that moves whenever capacity is released. Any thread may move it or wait."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._value = 0
        self._closed = False

    @property
    def value(self) -> int:
        return self._value

    def move(self) -> None:
        with self._moved:
            self._value += 1
            self._moved.notify_all()

    def wait_beyond(self, epoch: int, timeout_s: float) -> bool:
        """Sleep until the epoch is past `epoch`; False on timeout or when none will come."""
        with self._moved:
            self._moved.wait_for(lambda: self._value > epoch or self._closed, timeout_s)
            return self._value > epoch

    def close(self) -> None:
        """Wake everybody: nothing more will be released."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
