"""Takes workers out of a service in order: drained for good, or started again one by one.

Owns what is waited for and how long. The service does the work: who stops waiting changes nothing
of it. A restarted worker is back when its new incarnation has every pair that it should have.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ..connector.messages import DrainAnswer
from ..runtime.errors import ServiceError, ServiceUnreachable
from .service_view import ServiceView, view_of

POLL_S = 0.2  # statistics are asked for: no event tells of a worker's way


class Service(Protocol):
    def stats(self) -> dict[str, object]: ...
    def drain(self, worker: str, restart: bool = False) -> DrainAnswer: ...


class Operator:
    """say: a line of progress. timeout_s: for each worker; then TimeoutError says what is missing.
    Other errors are the service's own."""

    def __init__(
        self,
        service: Service,
        *,
        timeout_s: float,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._say = say
        self._now_s = now_s
        self._sleep = sleep

    def view(self) -> ServiceView:
        return view_of(self._service.stats())

    def drain(self, worker: str, *, wait: bool) -> None:
        old = self._ask(worker, restart=False)
        self._say(f"{worker} finishes what it has and then ends")
        if wait:
            self._wait(partial(self._still_there, worker, old, restart=False))
            self._say(f"{worker} has ended")

    def restart(self, workers: Sequence[str], *, wait: bool) -> None:
        """One after another. The last one is waited for only if `wait`."""
        for number, worker in enumerate(workers, 1):
            before = self.view().find(worker)
            old = self._ask(worker, restart=True)
            self._say(f"{worker} finishes what it has and is started again")
            if wait or number < len(workers):
                pairs = before.pairs if before is not None else ()
                self._wait(partial(self._not_back, worker, old, pairs))
                self._say(f"{worker} is back")

    def _ask(self, worker: str, *, restart: bool) -> str:
        """The incarnation that is drained now."""
        answer = self._service.drain(worker, restart=restart)
        if answer.error is not None:
            raise ServiceError(answer.error)
        return answer.incarnation

    def _wait(self, missing: Callable[[ServiceView], str | None]) -> None:
        """Until nothing is missing. A coordinator that is just being restarted is waited for."""
        end_s = self._now_s() + self._timeout_s
        while True:
            try:
                what = missing(self.view())
            except ServiceUnreachable as error:
                what = str(error)
            if what is None:
                return
            if self._now_s() >= end_s:
                raise TimeoutError(f"after {self._timeout_s:g} s {what}")
            self._sleep(POLL_S)

    def _not_back(
        self, worker: str, old: str, pairs: tuple[str, ...], view: ServiceView
    ) -> str | None:
        """Why it is not back, or None. pairs: that it had before; with none it is to have all."""
        still = self._still_there(worker, old, view, restart=True)
        if still is not None:
            return still
        row = view.find(worker)
        if row is None:
            return f"{worker} has ended and no new one has come: does its supervisor run?"
        others = {o.worker for o in view.workers if o.role != row.role and not o.draining}
        missing = sorted((others & set(pairs) if pairs else others) - set(row.pairs))
        if missing:
            return f"{worker} is started again, but has no ready pair with {', '.join(missing)}"
        return None

    def _still_there(
        self, worker: str, old: str, view: ServiceView, *, restart: bool
    ) -> str | None:
        row = view.find(worker)
        if row is None or row.incarnation != old:
            return None
        if not row.draining:  # its coordinator is another one, which knows nothing of it
            self._ask(worker, restart=restart)
        return f"{worker} still has {row.live} live requests"
