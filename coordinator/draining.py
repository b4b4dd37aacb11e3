"""Workers that are to end in order: they get nothing new, finish what they have, and are told.

Owns who drains since when, and whose place is to stay empty. Nothing that runs is failed for it:
what is not done in time moves to other workers, and what could not go on anywhere else is left to
end where it is.
"""

import logging
from collections.abc import Callable

import msgspec

from ..connector.messages import (
    Drain,
    DrainAnswer,
    DrainTo,
    DrainWorker,
    Shutdown,
    WorkerExited,
)
from .attempt import Attempt, Phase
from .attempts import Attempts
from .effects import Effect, SendWorker
from .now import Now
from .registry import Registry, Worker

logger = logging.getLogger(__name__)

MAX_ANSWERS = 1024  # to asks that may be sent again
MAX_FOR_GOOD = 4096  # workers whose drain for good is not over


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
        self._answers: dict[tuple[bytes, int], DrainAnswer] = {}  # oldest first
        self._for_good: dict[str, Worker] = {}  # by name; who is there no more may come back

    def asked(self, client: bytes, message: DrainWorker, now: Now) -> DrainAnswer:
        """By an operator. An ask that is only sent again must not meet the worker's next life."""
        known = self._answers.get((client, message.ask)) if message.ask else None
        if known is not None:
            return known
        answer = msgspec.structs.replace(self._asked(message, now), ask=message.ask)
        if message.ask:
            self._answers[client, message.ask] = answer
            if len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
        return answer

    def _asked(self, message: DrainWorker, now: Now) -> DrainAnswer:
        """Another ask changes what follows: whether it is started again."""
        if message.restart:
            self._for_good.pop(message.worker, None)
        for worker in self._registry.named(message.worker):
            self._begin(worker, "restart" if message.restart else "end", now)
            self._tell(worker)
            return DrainAnswer(worker=worker.name, incarnation=worker.incarnation)
        here = ", ".join(sorted(worker.name for worker in self._registry.workers())) or "none"
        error = f"no worker is named {message.worker}; these are here: {here}"
        return DrainAnswer(worker=message.worker, error=error)

    def joined(self, worker: Worker, drain: DrainTo | None, now: Now) -> None:
        """Who comes back in the midst of a drain for good goes on with it, and who was being
        drained by the coordinator before this one (drain: to what) with that. That one is told at
        its first heartbeat: it is still letting go of what it had."""
        if drain is not None and worker.drain is None:
            self._begin(worker, drain, now)
        older = self._for_good.get(worker.name)
        if older is None or older is worker:
            return
        if older.told_to_end:  # and so it has: whoever starts another one means it
            del self._for_good[worker.name]
            return
        self._begin(worker, "end", now)
        self._tell(worker)

    def exited(self, message: WorkerExited) -> None:
        worker = self._for_good.get(message.worker)
        if worker is None or worker.incarnation != message.incarnation:
            return
        if message.status == 0:
            del self._for_good[message.worker]
        else:
            worker.told_to_end = False  # it died before it heard of it: it is started again

    def _keep_down(self, worker: Worker) -> None:
        self._for_good[worker.name] = worker
        if len(self._for_good) > MAX_FOR_GOOD:
            del self._for_good[next(iter(self._for_good))]

    def _begin(self, worker: Worker, drain: DrainTo, now: Now) -> None:
        if drain == "end":
            self._keep_down(worker)
        worker.drain = drain
        if worker.draining_since_s is None:
            logger.info("%s worker %s drains, to %s", worker.role, worker.name, drain)
            self._registry.drain(worker, now.mono_s)
            for attempt in self._attempts.at(worker.incarnation):
                if attempt.phase is Phase.RESERVING:  # a draining worker takes nothing new
                    self._move(attempt, now)

    def heartbeat(self, worker: Worker, wants_to_end: bool, now: Now) -> None:
        if wants_to_end and worker.drain is None:
            self._begin(worker, "restart", now)
        self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        """At each heartbeat: what it is to do, or to remember for another coordinator."""
        if worker.drain is None:
            return
        message: Drain | Shutdown = Drain(to=worker.drain)
        if not self._attempts.at(worker.incarnation):
            worker.told_to_end = worker.drain == "end"
            message = Shutdown(restart=worker.drain == "restart")
        self._emit(SendWorker(worker.incarnation, message))

    def tick(self, now: Now) -> None:
        """Move what has had its time."""
        for worker in self._registry.workers():
            since_s = worker.draining_since_s
            if since_s is None or now.mono_s - since_s <= self._drain_s:
                continue
            if worker.drain == "end" and self._registry.all_drain(worker.role):
                continue  # nobody would take it: better late here than never
            for attempt in self._attempts.at(worker.incarnation):
                if attempt.live:
                    self._move(attempt, now)
