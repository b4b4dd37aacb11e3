"""What becomes of a request whose attempt is over before its output is: another one, or the error.

The one place that decides it. Owns which errors are worth another pair of workers, and how often
that is tried before one more token is delivered. What was delivered is replayed: the next attempt
carries it.
"""

import logging
from collections import Counter
from collections.abc import Callable

from ..runtime.errors import ProtocolError
from .attempt import Attempt, Leg
from .attempts import Attempts
from .credits import Books
from .dispatch import Dispatcher
from .generations import Generations
from .now import Now
from .registry import Registry
from .request import Request

logger = logging.getLogger(__name__)

RETRYABLE = ("worker_lost", "transfer_failed", "pass_failed", "pair_closed")
DRAINING = "worker_draining"


class Retries:
    def __init__(
        self,
        *,
        registry: Registry,
        books: Books,
        attempts: Attempts,
        dispatcher: Dispatcher,
        fail: Callable[[Request, str, str], None],
        counters: Counter[str],
        remind: Callable[[str, Now], None],
        generations: Generations,
        max_attempts: int,
    ) -> None:
        """remind: tell a worker who is here."""
        self._registry = registry
        self._books = books
        self._remind = remind
        self._attempts = attempts
        self._dispatcher = dispatcher
        self._fail = fail
        self._counters = counters
        self._generations = generations
        self._max_attempts = max_attempts

    def attempt_failed(self, attempt: Attempt, code: str, error: str, now: Now) -> None:
        request = attempt.request
        logger.warning("generation %d failed (%s): %s", attempt.generation, code, error)
        if code not in RETRYABLE:
            self._fail(request, code, error)
            return
        request.failures += 1
        request.failed_at.update(leg.worker for leg in attempt.legs)
        request.last_failure = (code, error)
        never = self._dispatcher.never(request)
        if request.failures >= self._max_attempts:
            tries = f" (attempt {request.failures} of {self._max_attempts})"
            self._fail(request, code, error + (tries if self._max_attempts > 1 else ""))
        elif never is not None:
            self._fail(request, code, f"{error}; it cannot go on elsewhere: {never}")
        else:
            self._again(attempt, code, now)

    def attempt_refused(self, attempt: Attempt, leg: Leg, code: str, reason: str, now: Now) -> None:
        """A worker will never take this generation: try the others, if there are any."""
        logger.info(
            "generation %d: %s refuses it (%s): %s", attempt.generation, leg.worker, code, reason
        )
        self._attempts.cancel(attempt, now.mono_s)
        if code == "pair_closed" and leg is attempt.prefill:  # P says when it is open again
            self._registry.pair_closed(attempt.prefill.worker, attempt.decode.worker)
        elif code == "pair_closed":
            self._remind(leg.worker, now)
        elif code == "closed":  # it closed numbers that were never given: leave them behind
            self._generations.exceed(self._generations.epoch)
        if code == ProtocolError.code:  # P says that D's reservation cannot be
            leg = attempt.decode
        self._dispatcher.put_back(attempt.request, leg.worker, code, reason)

    def attempt_must_wait(self, attempt: Attempt, now: Now) -> None:
        """Its decode worker has had no place for long: others may. If it has none before a
        quarantine ends, nobody is to wait behind it there."""
        decode = attempt.decode.worker
        others = {pair.decode for pair in self._registry.open_pairs()} - {decode}
        credit = self._books.credit(decode, attempt.generation)
        if others or not self._books.account(decode).could_take_now(credit):
            self._counters["reservations_moved"] += 1
            attempt.request.failed_at[decode] += 1
            self._attempts.cancel(attempt, now.mono_s)
            self._dispatcher.again(attempt.request)

    def move(self, attempt: Attempt, now: Now) -> bool:
        """Off its workers, through no fault of anybody: does not count as a failure. False if it
        could never go on elsewhere."""
        if self._dispatcher.never(attempt.request) is not None:
            return False
        self._again(attempt, DRAINING, now)
        return True

    def _again(self, attempt: Attempt, code: str, now: Now) -> None:
        request = attempt.request
        self._counters["retries"] += 1
        self._counters[f"retries.{code}"] += 1
        self._counters["replays"] += request.delivered > 0
        request.timeline.mark("retried", now.wall_s)
        self._attempts.cancel(attempt, now.mono_s)
        self._dispatcher.again(request)
