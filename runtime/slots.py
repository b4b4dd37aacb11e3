"""Numbered places for live generations: execution slots, receive slots.

Owns who holds which number. Taking is idempotent; a number is handed on only after it was given
back.
"""

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
