"""The coordinator as one state machine: events in, effects out.

Wires its parts together, and hands each event to the part that it is for. Has no socket, no thread
and reads no clock: every event brings the time with it. check() must hold after every event.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from typing import assert_never

from ..connector.messages import (
    Alive,
    AskStatistics,
    CancelDone,
    CancelRequest,
    ClientToCoordinator,
    DrainWorker,
    Generate,
    Heartbeat,
    Hello,
    Output,
    OutputRow,
    PairClosed,
    PairReady,
    Register,
    RegisterAgain,
    RegisterRefused,
    Statistics,
    Supervise,
    SupervisorToCoordinator,
    WorkerExited,
    WorkerToCoordinator,
)
from ..runtime.errors import InvariantBroken, ShuttingDown
from ..runtime.prompt import Tokenizer
from ..runtime.validate import MAX_SEED
from .agreement import check_agreement
from .attempt import Attempt, Leg
from .attempts import Attempts
from .config import CoordinatorConfig
from .credits import Books
from .desk import Desk
from .dispatch import Dispatcher
from .draining import Draining
from .effects import Effect, SendClient, SendWorker
from .generations import Generations
from .handoffs import Handoffs
from .history import History
from .line import WaitingLine
from .members import Members
from .now import Now
from .observer import Observer, Unobserved
from .prompts import Prompt
from .registry import Registry, Worker
from .request import Request
from .retries import Retries
from .settling import Settling
from .standing import Standing
from .supervisors import Supervisors

logger = logging.getLogger(__name__)

FromWorker = WorkerToCoordinator | SupervisorToCoordinator


class CoordinatorState(Standing):
    def __init__(
        self,
        config: CoordinatorConfig,
        now: Now,
        *,
        tokenizer: Tokenizer | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbelow(MAX_SEED),
        observer: Observer | None = None,
    ) -> None:
        self._now = now
        self._observer = observer or Unobserved()
        self._effects: list[Effect] = []
        emit = self._effects.append
        counters: Counter[str] = Counter()
        self._generations = Generations(now.wall_s)
        registry, books, supervisors = Registry(), Books(), Supervisors(emit, counters)
        attempts = Attempts(self, books, emit)
        self._handoffs = Handoffs(attempts, self, registry, emit, counters, self._observer)
        self._members = Members(
            registry=registry,
            books=books,
            attempts=attempts,
            handoffs=self._handoffs,
            generations=self._generations,
            supervisors=supervisors,
            settling=Settling(registry, config.expected_prefill, config.expected_decode, now),
            emit=emit,
            heartbeat_s=config.heartbeat_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            now=now,
        )
        desk = Desk(
            emit=emit,
            counters=counters,
            admit=self._admit,
            on_end=self._ended,
            tokenizer=tokenizer,
            draw_seed=draw_seed,
            default_deadline_s=config.default_deadline_s,
            observer=self._observer,
        )
        dispatcher = Dispatcher(
            registry=registry,
            books=books,
            attempts=attempts,
            generations=self._generations,
            line=WaitingLine(config.max_queue, config.max_bypasses),
            fail=desk.fail,
            pair_wait_s=config.pair_wait_s,
            now=now,
            observer=self._observer,
        )
        self._retries = Retries(
            registry=registry,
            books=books,
            attempts=attempts,
            dispatcher=dispatcher,
            fail=desk.fail,
            counters=counters,
            remind=self._members.remind,
            generations=self._generations,
            max_attempts=config.max_attempts,
        )
        self._draining = Draining(
            registry=registry,
            attempts=attempts,
            move=self._retries.move,
            emit=emit,
            drain_s=config.drain_s,
        )
        super().__init__(
            registry=registry,
            books=books,
            attempts=attempts,
            desk=desk,
            dispatcher=dispatcher,
            supervisors=supervisors,
            history=History(),
            counters=counters,
        )

    # Events

    def handle_client(
        self,
        client: bytes,
        message: ClientToCoordinator,
        now: Now,
        prompt: Prompt | None = None,
    ) -> list[Effect]:
        """prompt: the request's, where it was tokenized already."""
        self._now = now
        match message:
            case Hello():
                self._effects.append(SendClient(client, self.service_info()))
            case Generate():
                self._desk.generate(client, message, now, prompt)
            case CancelRequest(request_id=request_id):
                request = self._desk.find(client, request_id)
                if request is not None:
                    self._desk.cancel(request)
                self._effects.append(SendClient(client, CancelDone(request_id=request_id)))
            case AskStatistics(ask=ask):
                workers = self._registry.statistics(self._books.statistics)
                statistics = Statistics(ask=ask, values=self.statistics(), workers=workers)
                self._effects.append(SendClient(client, statistics))
            case DrainWorker():
                answer = self._draining.asked(client, message, now)
                self._effects.append(SendClient(client, answer))
            case _:
                assert_never(message)
        return self._settle()

    def handle_worker(self, incarnation: str, message: FromWorker, now: Now) -> list[Effect]:
        """incarnation: who says it, by its connection; a supervisor has a name of its own there."""
        self._now = now
        worker = self._registry.get(incarnation)
        match message:
            case Register():
                self._members.register(incarnation, message, now)
                if (joined := self._registry.get(incarnation)) is not None:
                    self._draining.joined(joined, message.drain, now)
            case Supervise() | WorkerExited():
                if worker is None:
                    self._members.supervised(incarnation, message, now)
                    if isinstance(message, WorkerExited):
                        self._draining.exited(message)
                else:
                    self.counters["wrong_role_messages"] += 1
            case _:
                if worker is None:
                    self.counters["unknown_workers"] += 1
                    self._refuse_unknown(incarnation, message)
                else:
                    worker.heard_s = now.mono_s
                    worker.unreachable_since_s = None
                    self._from_member(worker, message, now)
        return self._settle()

    def _from_member(self, worker: Worker, message: FromWorker, now: Now) -> None:
        match message:
            case Heartbeat() | PairReady() | PairClosed():
                self._members.handle(worker, message, now)
                if isinstance(message, Heartbeat):
                    self._draining.heartbeat(worker, message.draining, now)
            case Output():
                self._handoffs.output(worker, message, now)
            case Register() | Supervise() | WorkerExited():
                raise InvariantBroken(f"{type(message).__name__} is not a member's message")
            case _:
                self._handoffs.handle(worker, message, now)

    def _refuse_unknown(self, incarnation: str, message: FromWorker) -> None:
        """Whoever beats without being known missed its removal, or this coordinator is new."""
        if not isinstance(message, Heartbeat):
            return
        answer: RegisterAgain | RegisterRefused = RegisterAgain()
        if self._registry.is_barred(incarnation) or self._supervisors.is_dead(incarnation):
            answer = RegisterRefused(reason="this incarnation was expelled: start a new one")
        self._effects.append(SendWorker(incarnation, answer))

    def client_gone(self, client: bytes, now: Now) -> list[Effect]:
        self._now = now
        self._desk.forget_client(client)
        return self._settle()

    def client_slow(self, client: bytes, now: Now) -> list[Effect]:
        """Its backlog is full: its requests end, so that nothing more is added."""
        self._now = now
        for request in self._desk.of_client(client):
            self._desk.fail(request, "slow_client", "output was not taken fast enough")
        return self._settle()

    def worker_unreachable(self, incarnation: str, now: Now) -> list[Effect]:
        self._now = now
        self._members.unreachable(incarnation, now)
        return self._settle()

    def tick(self, now: Now) -> list[Effect]:
        """What follows from the passing of time."""
        self._now = now
        self._members.expire(now)
        self._draining.tick(now)
        self._attempts.repeat(now.mono_s)
        for request in self._desk.expired(now.mono_s):
            self._desk.fail(request, *self._dispatcher.deadline_error(request))
        for request, missing in self._dispatcher.pairless(now):
            self._desk.fail(request, missing.code, missing.reason)
        return self._settle()

    def alive(self) -> list[Effect]:
        """A sign of life for every connection that waits for output."""
        return [SendClient(client, Alive()) for client in self._desk.clients_with_requests()]

    def drain(self) -> None:
        """From now on every new request is refused; those that are here go on."""
        self._stopping = self._members.stopping = True

    def end_all(self, now: Now) -> list[Effect]:
        """Time to drain is up: what still runs ends with shutting_down."""
        self._now = now
        for request in self._desk.live():
            self._desk.fail(request, "shutting_down", "the service is stopping")
        return self._settle()

    # What the parts report (AttemptOwner, Desk)

    def attempt_failed(self, attempt: Attempt, code: str, error: str) -> None:
        self._retries.attempt_failed(attempt, code, error, self._now)

    def attempt_refused(self, attempt: Attempt, leg: Leg, code: str, reason: str) -> None:
        self._retries.attempt_refused(attempt, leg, code, reason, self._now)

    def attempt_must_wait(self, attempt: Attempt) -> None:
        self._retries.attempt_must_wait(attempt, self._now)

    def attempt_output(self, attempt: Attempt, row: OutputRow) -> None:
        self._desk.deliver(attempt.request, row, self._now)

    def _admit(self, request: Request) -> None:
        if self._stopping:
            raise ShuttingDown("the service is stopping and takes no more requests")
        self._dispatcher.add(request)
        self._observer.accepted(request)

    def _ended(self, request: Request) -> None:
        self._dispatcher.remove(request)
        self._history.add(request, self._now)
        self._observer.ended(request, self._now)
        attempt = self._attempts.get(request.attempt) if request.attempt is not None else None
        if attempt is not None and request.complete:
            self._attempts.finish(attempt)
        elif attempt is not None:
            self._attempts.cancel(attempt, self._now.mono_s)

    def _settle(self) -> list[Effect]:
        """Start what can start now, and hand over everything that is to be done."""
        self._dispatcher.run(self._now)
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def check(self) -> None:
        check_agreement(self._desk, self._dispatcher, self._attempts, self._books)
