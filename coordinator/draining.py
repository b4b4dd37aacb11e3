"""Workers that are to end in order: they get nothing new, finish what they have, and are told.

Owns who drains since when. Nothing that runs is failed for it: what is not done in time moves to
other workers, and what could not go on anywhere else is left to end where it is.
"""

import logging
from collections.abc import Callable

from ..connector.messages import DrainAnswer, DrainWorker, Shutdown
from .attempt import Attempt, Phase
from .attempts import Attempts
from .effects import Effect, SendWorker
from .now import Now
from .registry import Registry, Worker

logger = logging.getLogger(__name__)


class Draining:
    def __init__(
        self,
        *,
        registry: Registry,
        attempts: Attempts,
        move: Callable[[Attempt, Now], bool],
        emit: Callable[[Effect], None],
        drain_s: float,
    ) -> None:
        self._registry = registry
        self._attempts = attempts
        self._move = move
        self._emit = emit
        self._drain_s = drain_s

    def asked(self, message: DrainWorker, now: Now) -> DrainAnswer:
        """By an operator. Asked again, it changes what follows: whether it is started again."""
        for worker in self._registry.named(message.worker):
            self.begin(worker, restart=message.restart, now=now)
            return DrainAnswer(worker=worker.name, incarnation=worker.incarnation)
        here = ", ".join(sorted(worker.name for worker in self._registry.workers())) or "none"
        error = f"no worker is named {message.worker}; these are here: {here}"
        return DrainAnswer(worker=message.worker, error=error)

    def begin(self, worker: Worker, *, restart: bool, now: Now) -> None:
        if worker.draining_since_s is None:
            what = "be started again" if restart else "end"
            logger.info("%s worker %s drains, to %s", worker.role, worker.name, what)
            self._registry.drain(worker, now.mono_s)
            for attempt in self._attempts.at(worker.incarnation):
                if attempt.phase is Phase.RESERVING:  # a draining worker takes nothing new
                    self._move(attempt, now)
        worker.restart = restart
        self._end_if_idle(worker)

    def heartbeat(self, worker: Worker, wants_to_end: bool, now: Now) -> None:
        if wants_to_end and worker.draining_since_s is None:
            self.begin(worker, restart=True, now=now)
        else:
            self._end_if_idle(worker)

    def _end_if_idle(self, worker: Worker) -> None:
        if worker.draining_since_s is not None and not self._attempts.at(worker.incarnation):
            self._emit(SendWorker(worker.incarnation, Shutdown(restart=worker.restart)))

    def tick(self, now: Now) -> None:
        """Move what has had its time."""
        for worker in self._registry.workers():
            since_s = worker.draining_since_s
            if since_s is None or now.mono_s - since_s <= self._drain_s:
                continue
            if not worker.restart and self._registry.all_drain(worker.role):
                continue  # nobody would take it: better late here than never
            for attempt in self._attempts.at(worker.incarnation):
                if attempt.live:
                    self._move(attempt, now)
