"""The bounded line of requests that wait for a pair.

A lower priority number goes first; within one number it is first come, first served, except that a
request which waits for room may be passed by later ones a bounded number of times. Who waits for a
worker to come back holds nobody up. Owns the order and the passes; decides nothing about pairs.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from typing import assert_never

from .request import Request

LOOK_AHEAD = 64  # how many waiting requests one pass looks at


class Verdict(Enum):
    STARTED = "started"
    ENDED = "ended"
    BLOCKED = "blocked"  # until there is room
    ABSENT = "absent"  # whoever could take it is not here: others take nothing from it


class WaitingLine:
    def __init__(self, capacity: int, max_bypasses: int) -> None:
        self._capacity = capacity
        self._max_bypasses = max_bypasses
        self._waiting: dict[Request, Verdict] = {}  # what it heard last

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._capacity

    def add(self, request: Request) -> bool:
        """Whether it stands behind everybody else: false if its priority let it pass some."""
        last = next(reversed(self._waiting), None)
        self._waiting[request] = Verdict.BLOCKED
        if last is None or request.asked.priority >= last.asked.priority:
            return True
        self._sort()
        return False

    def put_back(self, request: Request) -> None:
        """To the front of its priority: it had its turn already. Of several, the oldest first."""
        self._waiting = {request: Verdict.BLOCKED, **self._waiting}
        self._sort()

    def _sort(self) -> None:
        """Stable, so that each priority keeps its order."""
        self._waiting = {
            request: self._waiting[request] for request in sorted(self._waiting, key=_place)
        }

    def remove(self, request: Request) -> None:
        self._waiting.pop(request, None)

    def offer(self, start: Callable[[Request], Verdict], first: Request | None = None) -> None:
        """Offer a start to waiting requests in order, as far as the bypass rule allows.

        first: those before it would hear what they heard last, and need not be asked.
        """
        blocked: list[Request] = []
        asking = first is None
        for request in list(islice(self._waiting, LOOK_AHEAD)):
            if request not in self._waiting:  # an earlier offer ended it
                continue
            asking = asking or request is first
            match verdict := start(request) if asking else self._waiting[request]:
                case Verdict.STARTED:
                    self.remove(request)
                    for older in blocked:
                        older.bypassed += 1
                case Verdict.ENDED:
                    self.remove(request)
                case Verdict.BLOCKED:
                    self._waiting[request] = verdict
                    blocked.append(request)
                case Verdict.ABSENT:
                    self._waiting[request] = verdict
                case _:
                    assert_never(verdict)
            if any(older.bypassed >= self._max_bypasses for older in blocked):
                return

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: object) -> bool:
        return request in self._waiting


def _place(request: Request) -> tuple[int, bool, int]:
    had_its_turn = request.attempts > 0
    return request.asked.priority, not had_its_turn, request.number if had_its_turn else 0
