"""Who is let in next: the bounded waiting queue of prompts that have nothing yet.

Owns the order of the queue and how often each entry was passed. Holds no block and no slot: it is
told what is free and answers with whom to admit.
First come, first served; a smaller request may pass a blocked larger one MAX_BYPASS times.
"""

from dataclasses import dataclass

from .types import Generation

MAX_BYPASS = 8


@dataclass(slots=True)
class _Entry:
    generation: Generation
    num_blocks: int
    bypassed: int = 0


class WaitingQueue:
    def __init__(self, max_waiting: int, max_bypass: int = MAX_BYPASS) -> None:
        self._entries: list[_Entry] = []
        self._max_waiting = max_waiting
        self._max_bypass = max_bypass
        self._bypasses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) >= self._max_waiting

    @property
    def bypasses(self) -> int:
        """How often a request was passed by a later one, over all time."""
        return self._bypasses

    def add(self, generation: Generation, num_blocks: int) -> None:
        self._entries.append(_Entry(generation, num_blocks))

    def remove(self, generation: Generation) -> None:
        self._entries = [entry for entry in self._entries if entry.generation != generation]

    def larger_than(self, num_blocks: int) -> list[Generation]:
        """Entries that can never be admitted once only `num_blocks` blocks are left to hope for."""
        return [entry.generation for entry in self._entries if entry.num_blocks > num_blocks]

    def next_to_admit(self, free_blocks: int, free_slots: int) -> Generation | None:
        """The entry to admit now, which leaves the queue; None when everybody must wait."""
        if free_slots < 1:
            return None
        for index, entry in enumerate(self._entries):
            if entry.num_blocks <= free_blocks:
                self._pass(self._entries[:index])
                return self._entries.pop(index).generation
            if entry.bypassed >= self._max_bypass:
                return None
        return None

    def _pass(self, blocked: list[_Entry]) -> None:
        for entry in blocked:
            entry.bypassed += 1
        self._bypasses += len(blocked)
