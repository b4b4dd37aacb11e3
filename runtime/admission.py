"""Who is let in next: the waiting queue of prompts, and the line of reservations that must wait.

Owns the order of both and how often each entry was passed. Holds no block and no slot: it is told
what fits and answers with whom to admit.
Lower priority numbers go first, first come first served among equals. An entry that fits may pass
blocked ones ahead of it, each of those at most `max_bypass` times; a scan looks at `max_scan`
entries.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from .preemption import Urgency
from .types import Generation

MAX_BYPASS = 8
MAX_SCAN = 32
FORGET_S = 10.0  # a waiting reservation that is not asked for again is not wanted any more


@dataclass(slots=True, order=True)
class _Entry:
    urgency: Urgency
    generation: Generation = field(compare=False)
    bypassed: int = field(default=0, compare=False)
    asked_s: float = field(default=0.0, compare=False)


class _Line:
    """Entries in order of urgency."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._known: dict[Generation, _Entry] = {}
        self.bypasses = 0

    def add(self, entry: _Entry) -> None:
        insort(self.entries, entry)
        self._known[entry.generation] = entry

    def get(self, generation: Generation) -> _Entry | None:
        return self._known.get(generation)

    def remove(self, generation: Generation) -> None:
        entry = self._known.pop(generation, None)
        if entry is not None:
            del self.entries[bisect_left(self.entries, entry)]

    def pass_by(self, count: int) -> None:
        """The first `count` entries were passed once more."""
        for entry in self.entries[:count]:
            entry.bypassed += 1
        self.bypasses += count


class WaitingQueue:
    def __init__(
        self, max_waiting: int, max_bypass: int = MAX_BYPASS, max_scan: int = MAX_SCAN
    ) -> None:
        self._line = _Line()
        self._max_waiting = max_waiting
        self._max_bypass = max_bypass
        self._max_scan = max_scan

    def __len__(self) -> int:
        return len(self._line.entries)

    @property
    def full(self) -> bool:
        return len(self) >= self._max_waiting

    @property
    def bypasses(self) -> int:
        """How often a request was passed by one behind it, over all time."""
        return self._line.bypasses

    def add(self, generation: Generation, urgency: Urgency) -> None:
        """urgency: of nobody else."""
        self._line.add(_Entry(urgency, generation))

    def remove(self, generation: Generation) -> None:
        self._line.remove(generation)

    def next_to_admit(
        self, fits: Callable[[Generation], bool], before: Urgency | None = None
    ) -> Generation | None:
        """The entry to admit now, which leaves the queue; None when everybody must wait.

        before: only entries more urgent than this may go.
        """
        for index, entry in enumerate(self._line.entries[: self._max_scan]):
            if before is not None and entry.urgency > before:
                return None
            if fits(entry.generation):
                self._line.pass_by(index)
                self._line.remove(entry.generation)
                return entry.generation
            if entry.bypassed >= self._max_bypass:
                return None
        return None


class ReservationLine:
    """Reservations that were told to wait. They come back by being asked for again, in any order,
    so the bound on passing is kept by refusing those that would break it."""

    def __init__(self, max_bypass: int = MAX_BYPASS) -> None:
        self._line = _Line()
        self._max_bypass = max_bypass

    def __len__(self) -> int:
        return len(self._line.entries)

    @property
    def bypasses(self) -> int:
        return self._line.bypasses

    def held_back(self, urgency: Urgency, now_s: float) -> bool:
        """Whether someone ahead was passed as often as is allowed."""
        self._forget_silent(now_s)
        ahead = self._line.entries[: self._place(urgency)]
        return any(entry.bypassed >= self._max_bypass for entry in ahead)

    def wait(self, generation: Generation, urgency: Urgency, now_s: float) -> None:
        """It was told to wait, perhaps not for the first time."""
        if (entry := self._line.get(generation)) is None:
            entry = _Entry(urgency, generation)
            self._line.add(entry)
        entry.asked_s = now_s

    def granted(self, generation: Generation, urgency: Urgency) -> None:
        self._line.remove(generation)
        self._line.pass_by(self._place(urgency))

    def forget(self, generation: Generation) -> None:
        self._line.remove(generation)

    def clear(self) -> None:
        for entry in list(self._line.entries):
            self._line.remove(entry.generation)

    def urgency(self, generation: Generation) -> Urgency | None:
        """As it was told when it first had to wait."""
        entry = self._line.get(generation)
        return entry.urgency if entry else None

    def _place(self, urgency: Urgency) -> int:
        return bisect_left(self._line.entries, urgency, key=lambda entry: entry.urgency)

    def _forget_silent(self, now_s: float) -> None:
        silent = [e.generation for e in self._line.entries if now_s - e.asked_s > FORGET_S]
        for generation in silent:
            self._line.remove(generation)
