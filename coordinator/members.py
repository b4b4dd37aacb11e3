"""Workers come, beat, and go: membership turned into effects on attempts, credits and peers.

Owns the decision that a worker is gone, and what follows from it. A worker that is gone never comes
back as the same incarnation.
"""

import logging
from collections.abc import Callable
from typing import assert_never

from ..connector.messages import (
    Heartbeat,
    HeartbeatAnswer,
    PairClosed,
    PairReady,
    Register,
    RegisterRefused,
    Supervise,
    Welcome,
    WorkerExited,
)
from ..runtime.types import Generation
from .attempts import Attempts
from .credits import Books
from .effects import Effect, SendWorker
from .generations import Generations, epoch_of
from .handoffs import Handoffs
from .names import Claim, Names
from .now import Now
from .registry import Registry, Worker
from .settling import Settling
from .supervisors import Supervisors

logger = logging.getLogger(__name__)

QUARANTINED = "blocks_quarantined"  # the name of that figure in a worker's heartbeat
MAX_FEARED = 1024  # incarnations that one heartbeat may name
MAX_PAIRS = 4096  # of one prefill worker
NAME_BEATS = 2  # who was heard within so many heartbeats keeps its name
UNREACHABLE_S = 2.0  # a closed connection that is not opened again for so long means a dead worker


class Members:
    def __init__(
        self,
        *,
        registry: Registry,
        books: Books,
        attempts: Attempts,
        handoffs: Handoffs,
        generations: Generations,
        supervisors: Supervisors,
        settling: Settling,
        emit: Callable[[Effect], None],
        heartbeat_s: float,
        heartbeat_timeout_s: float,
        now: Now,
    ) -> None:
        self._registry = registry
        self._books = books
        self._attempts = attempts
        self._handoffs = handoffs
        self._generations = generations
        self._supervisors = supervisors
        self._emit = emit
        self._heartbeat_s = heartbeat_s
        self._timeout_s = heartbeat_timeout_s
        self._looked_s = now.mono_s
        self._settling = settling
        self.stopping = False  # the whole service is: workers are expected to leave
        self._told_version = 0  # of the registry, that everybody was told last
        self._names = Names(NAME_BEATS * heartbeat_s, heartbeat_timeout_s)

    def register(self, incarnation: str, message: Register, now: Now) -> None:
        worker = self._registry.get(incarnation)
        if worker is None:
            refusal = self._registry.refusal(incarnation, message)
            if self._supervisors.is_dead(incarnation):
                refusal = "this incarnation was reaped: its words are late"
            if refusal is not None:
                logger.warning("refused %s worker %s: %s", message.role, message.worker, refusal)
                self._emit(SendWorker(incarnation, RegisterRefused(reason=refusal)))
                return
            if not self._name_is_free(incarnation, message, now):
                return
            if message.highest_epoch > 0:
                self._settling.heard_old_worker(now)
            self._generations.exceed(max([message.highest_epoch, *map(epoch_of, message.live)]))
            worker = self._registry.add(message, now.mono_s, self._generations.epoch)
            role = self._registry.incarnations(worker.role)
            self._books.open(incarnation, message.limits, beside=role)
            logger.info(
                "%s worker %s registered (process %d, %s)",
                worker.role,
                worker.name,
                worker.pid,
                incarnation,
            )
        welcome = Welcome(epoch=worker.epoch, heartbeat_s=self._heartbeat_s)
        self._emit(SendWorker(incarnation, welcome))
        self._tell_peers(now)

    def _name_is_free(self, incarnation: str, message: Register, now: Now) -> bool:
        """Else it is not answered, so that it asks again, or refused if that has not helped."""
        older = self._registry.named(message.worker)
        match self._names.claim(incarnation, older, now):
            case Claim.FREE:
                for worker in older:
                    self.gone(worker, "a new incarnation has taken its name", now)
                return True
            case Claim.WAIT:
                return False
            case Claim.TAKEN:
                reason = f"another worker is named {message.worker}, and lives: choose another name"
                logger.warning("refused %s worker %s: %s", message.role, message.worker, reason)
                self._emit(SendWorker(incarnation, RegisterRefused(reason=reason)))
                return False
            case claim:
                assert_never(claim)

    def handle(self, worker: Worker, message: Heartbeat | PairReady | PairClosed, now: Now) -> None:
        match message:
            case Heartbeat():
                self._heartbeat(worker, message, now)
            case PairReady():
                if self._registry.pair_ready(worker.incarnation, message.decode):
                    logger.info("pair ready: %s -> %s", worker.incarnation, message.decode)
            case PairClosed():
                self._pair_closed(worker.incarnation, message)
            case _:
                assert_never(message)

    def _pair_closed(self, prefill: str, message: PairClosed) -> None:
        decode, reason = message.decode, message.reason
        if message.refused:
            if self._registry.pair_refused(prefill, decode, reason):
                logger.error("pair refused: %s -> %s: %s", prefill, decode, reason)
        elif self._registry.pair_closed(prefill, decode):
            logger.warning("pair closed: %s -> %s: %s", prefill, decode, reason)

    def _heartbeat(self, worker: Worker, message: Heartbeat, now: Now) -> None:
        worker.live = message.live
        worker.statistics = message.statistics
        quarantined = message.statistics.get(QUARANTINED, 0.0)
        if not 0 <= quarantined <= worker.limits.num_blocks:  # a worker's word, and maybe no number
            quarantined = worker.limits.num_blocks
        if quarantined != self._books.account(worker.incarnation).quarantined_blocks:
            self._books.set_quarantined(worker.incarnation, int(quarantined))
        self._note_pairs(worker, message.pairs)
        self._handoffs.heartbeat(worker, message, now)
        settled = not self._settling.waiting(now)
        if settled and message.peers_version != self._registry.version:
            self._emit(SendWorker(worker.incarnation, self._registry.peers_for(worker)))
        dead = self._feared(message.quarantined_from, now)
        answer = HeartbeatAnswer(oldest_live=self.oldest_live(), dead=dead)
        self._emit(SendWorker(worker.incarnation, answer))

    def _note_pairs(self, worker: Worker, open_now: tuple[str, ...] | None) -> None:
        """All of a prefill worker's open pairs: what it said of them before may have been lost."""
        if open_now is None or worker.role != "prefill":
            return
        for decode in set(self._registry.incarnations("decode")).difference(open_now):
            self._registry.pair_closed(worker.incarnation, decode)
        for decode in open_now[:MAX_PAIRS]:
            self._registry.pair_ready(worker.incarnation, decode)

    def _feared(self, incarnations: tuple[str, ...], now: Now) -> tuple[str, ...]:
        """Which of them are dead. Those that are neither dead nor members are to be killed."""
        feared = incarnations[:MAX_FEARED]
        for incarnation in feared if not self._settling.waiting(now) else ():
            if self._registry.get(incarnation) is None:
                self._registry.bar(incarnation)
                self._supervisors.expel(incarnation, now.mono_s)
        return self._supervisors.dead_of(feared)

    def oldest_live(self) -> Generation:
        return self._attempts.oldest() or self._generations.upcoming

    def supervised(self, identity: str, message: Supervise | WorkerExited, now: Now) -> None:
        """A supervisor's word."""
        match message:
            case Supervise():
                for incarnation in self._supervisors.heard(identity, message, now.mono_s):
                    if self._registry.is_barred(incarnation):
                        self._supervisors.expel(incarnation, now.mono_s)
            case WorkerExited():
                self._supervisors.exited(message)
                worker = self._registry.get(message.incarnation)
                if worker is not None:
                    why = f"its process {message.pid} ended with status {message.status}"
                    self.gone(worker, why, now)
            case _:
                assert_never(message)

    def unreachable(self, identity: str, now: Now) -> None:
        """The connection is closed. A worker may dial again; if it does not, it is gone."""
        worker = self._registry.get(identity)
        if worker is None:
            self._supervisors.lost(identity)
        elif worker.unreachable_since_s is None:
            worker.unreachable_since_s = now.mono_s

    def expire(self, now: Now) -> None:
        stood_still = now.mono_s - self._looked_s > self._timeout_s / 2
        self._looked_s = now.mono_s
        if stood_still:  # this process did (stopped, suspended): their heartbeats wait unread
            for worker in self._registry.workers():
                worker.heard_s, worker.unreachable_since_s = now.mono_s, None
        for worker in self._registry.workers():
            silent_s = now.mono_s - worker.heard_s
            cut_s = now.mono_s - (worker.unreachable_since_s or now.mono_s)
            if silent_s > self._timeout_s:
                self.gone(worker, f"no heartbeat for {silent_s:.1f} s", now)
            elif cut_s > min(UNREACHABLE_S, self._timeout_s):
                self.gone(worker, f"its connection has been closed for {cut_s:.1f} s", now)
        self._supervisors.tick(now.mono_s)
        if self._told_version != self._registry.version:  # it was held back until now
            self._tell_peers(now)

    def gone(self, worker: Worker, why: str, now: Now) -> None:
        """It takes part no more, and is to be killed if it is not dead yet."""
        expected = self.stopping or worker.draining_since_s is not None
        level = logging.INFO if expected else logging.WARNING
        logger.log(level, "%s worker %s is gone: %s", worker.role, worker.name, why)
        error = f"{worker.role} worker {worker.name} is gone: {why}"
        self._registry.remove(worker.incarnation)  # first, so that nothing is routed there again
        for attempt in self._attempts.at(worker.incarnation):
            leg = attempt.leg_at(worker.incarnation)
            if leg is not None:
                self._attempts.leg_lost(attempt, leg, error, self._registry.version)
        self._attempts.forget_worker(worker.incarnation)
        self._books.close(worker.incarnation)
        self._supervisors.expel(worker.incarnation, now.mono_s)
        self._tell_peers(now)

    def remind(self, incarnation: str, now: Now) -> None:
        """It does not seem to know who is here."""
        worker = self._registry.get(incarnation)
        if worker is not None and not self._settling.waiting(now):
            self._emit(SendWorker(incarnation, self._registry.peers_for(worker)))

    def _tell_peers(self, now: Now) -> None:
        if self._settling.waiting(now):
            return
        self._told_version = self._registry.version
        for worker in self._registry.workers():
            self._emit(SendWorker(worker.incarnation, self._registry.peers_for(worker)))
