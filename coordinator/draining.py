"""Workers that are to end in order: they get nothing new, finish what they have, and are told.

Owns who drains since when, and whose place is to stay empty. Nothing that runs is failed for it:
what is not done in time moves to other workers, and what could not go on anywhere else is left to
end where it is.
"""

import logging
from collections.abc import Callable

import msgspec

from ..connector.messages import DrainAnswer, DrainWorker, Shutdown, WorkerExited
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
            if not message.restart:
                self._keep_down(worker)
            self.begin(worker, restart=message.restart, now=now)
            return DrainAnswer(worker=worker.name, incarnation=worker.incarnation)
        here = ", ".join(sorted(worker.name for worker in self._registry.workers())) or "none"
        error = f"no worker is named {message.worker}; these are here: {here}"
        return DrainAnswer(worker=message.worker, error=error)

    def joined(self, worker: Worker, now: Now) -> None:
        """Who comes back in the midst of a drain for good goes on with it."""
        older = self._for_good.get(worker.name)
        if older is None or older is worker:
            return
        if older.told_to_end:  # and so it has: whoever starts another one means it
            del self._for_good[worker.name]
            return
        self._keep_down(worker)
        self.begin(worker, restart=False, now=now)

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
            worker.told_to_end = not worker.restart
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
