"""Whether and when a child that has ended is started again. Pure: told the time, starts nothing.

Owns the record of one child's starts and failures. Exit code 0 is an end for good; EXIT_RESTART
asks for a new start at once; everything else is a failure, and each failure in a row doubles the
wait.
"""

from collections import deque
from dataclasses import dataclass

from ..connector.config import EXIT_RESTART

COULD_NOT_START = 2
FAILED = 1


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """first_s, most_s: the wait after the first failure, and the longest. good_life_s: who lived so
    long begins with first_s again. orderly_life_s: who asks for a new start sooner has failed.
    most_failures: with so many within failures_s the child is given up; None: never.
    must_start: a first start that ends with exit code 2 within good_life_s is given up.
    """

    first_s: float = 0.25
    most_s: float = 30.0
    good_life_s: float = 60.0
    orderly_life_s: float = 1.0
    most_failures: int | None = None
    failures_s: float = 60.0
    must_start: bool = False


FOR_EVER = RestartPolicy()


@dataclass(frozen=True)
class StartAgain:
    after_s: float


@dataclass(frozen=True)
class EndedForGood:
    """It did what it was asked to, and stays down."""


@dataclass(frozen=True)
class GivenUp:
    """code: the exit code for whoever cannot go on without this child."""

    code: int
    why: str


Fate = StartAgain | EndedForGood | GivenUp


class Restarts:
    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._starts = 0
        self._started_s = 0.0
        self._in_a_row = 0
        self._failed_s: deque[float] = deque(maxlen=policy.most_failures or 1)

    def started(self, now_s: float) -> None:
        self._starts += 1
        self._started_s = now_s

    def ended(self, status: int, now_s: float) -> Fate:
        """status: an exit code, or minus the signal that ended it."""
        lived_s = now_s - self._started_s
        if status == 0:
            return EndedForGood()
        if status == EXIT_RESTART and lived_s >= self._policy.orderly_life_s:
            return StartAgain(0.0)
        if self._never_started(status, lived_s):
            return GivenUp(status, "it could not start")
        return self._failed(lived_s, now_s)

    def _never_started(self, status: int, lived_s: float) -> bool:
        return (
            self._policy.must_start
            and self._starts == 1
            and status == COULD_NOT_START
            and lived_s < self._policy.good_life_s
        )

    def _failed(self, lived_s: float, now_s: float) -> Fate:
        policy = self._policy
        self._failed_s.append(now_s)
        within_s = now_s - self._failed_s[0]
        if len(self._failed_s) == policy.most_failures and within_s <= policy.failures_s:
            return GivenUp(FAILED, f"it failed {policy.most_failures} times in {within_s:.0f} s")
        self._in_a_row = 0 if lived_s >= policy.good_life_s else self._in_a_row
        wait_s = min(policy.most_s, policy.first_s * 2.0 ** min(self._in_a_row, 64))
        self._in_a_row += 1
        return StartAgain(wait_s)
