"""The coordinator as one state machine: events in, effects out.

Wires its parts together and decides what a failed attempt means. Has no socket, no thread and
reads no clock: every event brings the time with it. check() must hold after every event.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from typing import assert_never

from ..connector.messages import (
    PROTOCOL_VERSION,
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
    ServiceInfo,
    Statistics,
    Supervise,
    SupervisorToCoordinator,
    WorkerExited,
    WorkerToCoordinator,
)
from ..runtime.errors import InvariantBroken, ProtocolError, ShuttingDown
from ..runtime.prompt import Tokenizer
from ..runtime.validate import MAX_SEED
from .agreement import check_agreement
from .attempt import ROLES, Attempt, Leg, Role
from .attempts import Attempts
from .config import CoordinatorConfig
from .credits import Books
from .desk import Desk
from .dispatch import Dispatcher
from .draining import Draining
from .effects import Effect, SendClient, SendWorker
from .generations import Generations
from .handoffs import Handoffs
from .history import History, Story, story_of
from .line import WaitingLine
from .members import Members
from .now import Now
from .observer import Observer, Unobserved
from .prompts import Prompt
from .registry import Registry, Worker
from .request import Request
from .retries import Retries
from .settling import Settling
from .snapshot import Snapshot, take_snapshot
from .supervisors import Supervisors

logger = logging.getLogger(__name__)

FromWorker = WorkerToCoordinator | SupervisorToCoordinator


class CoordinatorState:
    def __init__(
        self,
        config: CoordinatorConfig,
        now: Now,
        *,
        tokenizer: Tokenizer | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbelow(MAX_SEED),
        observer: Observer | None = None,
    ) -> None:
        self.instance = secrets.token_hex(8)
        self._config = config
        self._now = now
        self._observer = observer or Unobserved()
        self._history = History()
        self._effects: list[Effect] = []
        emit = self._effects.append
        self.counters: Counter[str] = Counter()
        self._generations = Generations(now.wall_s)
        self._registry = Registry()
        self._books = Books()
        self._attempts = Attempts(self, self._books, emit)
        self._handoffs = Handoffs(
            self._attempts, self, self._registry, emit, self.counters, self._observer
        )
        self._supervisors = Supervisors(emit, self.counters)
        self._members = Members(
            registry=self._registry,
            books=self._books,
            attempts=self._attempts,
            handoffs=self._handoffs,
            generations=self._generations,
            supervisors=self._supervisors,
            settling=Settling(self._registry, config.expected_prefill, config.expected_decode, now),
            emit=emit,
            heartbeat_s=config.heartbeat_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            now=now,
        )
        self._desk = Desk(
            emit=emit,
            counters=self.counters,
            admit=self._admit,
            on_end=self._ended,
            tokenizer=tokenizer,
            draw_seed=draw_seed,
            default_deadline_s=config.default_deadline_s,
            observer=self._observer,
        )
        self._dispatcher = Dispatcher(
            registry=self._registry,
            books=self._books,
            attempts=self._attempts,
            generations=self._generations,
            line=WaitingLine(config.max_queue, config.max_bypasses),
            fail=self._desk.fail,
            pair_wait_s=config.pair_wait_s,
            now=now,
            observer=self._observer,
        )
        self._retries = Retries(
            attempts=self._attempts,
            dispatcher=self._dispatcher,
            fail=self._desk.fail,
            counters=self.counters,
            max_attempts=config.max_attempts,
        )
        self._draining_workers = Draining(
            registry=self._registry,
            attempts=self._attempts,
            move=self._retries.move,
            emit=emit,
            drain_s=config.drain_s,
        )
        self._draining = False

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
                self._effects.append(SendClient(client, self._service_info()))
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
                answer = self._draining_workers.asked(message, now)
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
            case Supervise() | WorkerExited():
                if worker is None:
                    self._members.supervised(incarnation, message, now)
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
                    self._draining_workers.heartbeat(worker, message.draining, now)
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
        self._draining_workers.tick(now)
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
        self._draining = self._members.stopping = True

    def end_all(self, now: Now) -> list[Effect]:
        """Time to drain is up: what still runs ends with shutting_down."""
        self._now = now
        for request in self._desk.live():
            self._desk.fail(request, "shutting_down", "the service is stopping")
        return self._settle()

    # What the parts report (AttemptOwner, Desk)

    def attempt_failed(self, attempt: Attempt, code: str, error: str) -> None:
        """The one place that decides what a failed attempt means for its request."""
        self._retries.attempt_failed(attempt, code, error, self._now)

    def attempt_refused(self, attempt: Attempt, leg: Leg, code: str, reason: str) -> None:
        """A worker will never take this generation: try the others, if there are any."""
        logger.info(
            "generation %d: %s refuses it (%s): %s", attempt.generation, leg.worker, code, reason
        )
        request = attempt.request
        self._attempts.cancel(attempt, self._now.mono_s)
        if code == "pair_closed" and leg is attempt.prefill:  # P says when it is open again
            self._registry.pair_closed(attempt.prefill.worker, attempt.decode.worker)
        elif code == "pair_closed":
            self._members.remind(leg.worker, self._now)
        if code == ProtocolError.code:  # P says that D's reservation cannot be
            leg = attempt.decode
        self._dispatcher.put_back(request, leg.worker, code, reason)

    def attempt_must_wait(self, attempt: Attempt) -> None:
        """Its decode worker has had no place for long: others may."""
        decodes = {pair.decode for pair in self._registry.open_pairs()}
        if decodes - {attempt.decode.worker}:
            self.counters["reservations_moved"] += 1
            attempt.request.failed_at[attempt.decode.worker] += 1
            self._attempts.cancel(attempt, self._now.mono_s)
            self._dispatcher.again(attempt.request)

    def attempt_output(self, attempt: Attempt, row: OutputRow) -> None:
        self._desk.deliver(attempt.request, row, self._now)

    def _admit(self, request: Request) -> None:
        if self._draining:
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

    # Looking at it

    @property
    def undecided_pairs(self) -> int:
        """Pairs that have not yet said whether they can serve."""
        return self._registry.undecided_pairs()

    @property
    def ready(self) -> bool:
        """At least one pair can serve."""
        return bool(self._registry.open_pairs())

    @property
    def not_ready(self) -> tuple[str, str] | None:
        """Code and reason why nothing can be served now; None when it can."""
        if self._draining:
            return "shutting_down", "the service is stopping"
        if self.ready:
            return None
        for role in ROLES:
            if not self.workers(role):
                return f"no_{role}_worker", f"no {role} worker is here"
            if self._registry.all_drain(role):
                return f"no_{role}_worker", f"every {role} worker is being drained"
        reason = "no prefill worker has a ready connection to a decode worker"
        return "no_decode_worker", self.unpairable or reason

    @property
    def unpairable(self) -> str | None:
        """Why no pair of the workers that are here will ever serve, if that is so."""
        return self._registry.unpairable()

    @property
    def idle(self) -> bool:
        """No request and no attempt lives."""
        return not self._desk.live() and not len(self._attempts)

    @property
    def model_name(self) -> str:
        return self._registry.model.name if self._registry.model is not None else ""

    @property
    def max_positions(self) -> int | None:
        """Of one request's prompt and output; None while no worker has told."""
        model = self._registry.model
        if model is None:
            return None
        pool = self._registry.pool_tokens()
        return model.max_positions if pool is None else min(model.max_positions, pool)

    def workers(self, role: Role) -> tuple[Worker, ...]:
        return tuple(w for w in self._registry.workers() if w.role == role)

    def is_reaped(self, incarnation: str) -> bool:
        """Whether its supervisor has said so."""
        return self._supervisors.is_dead(incarnation)

    def _service_info(self) -> ServiceInfo:
        return ServiceInfo(
            protocol_version=PROTOCOL_VERSION,
            model=self.model_name,
            ready=self.ready,
            instance=self.instance,
        )

    def statistics(self) -> dict[str, float]:
        values: dict[str, float] = {name: float(n) for name, n in self.counters.items()}
        values.update(
            queue_length=len(self._dispatcher),
            live_requests=len(self._desk.live()),
            live_attempts=len(self._attempts),
            ready_pairs=len(self._registry.open_pairs()),
            credits_outstanding=self._books.outstanding(),
            repeated_asks=self._attempts.repeats,
            expels_open=self._supervisors.open_expels,
            supervisors=len(self._supervisors),
        )
        return values

    def snapshot(self, now: Now) -> Snapshot:
        return take_snapshot(
            counters=self.statistics(),
            registry=self._registry,
            attempts=self._attempts,
            desk=self._desk,
            history=self._history,
            now=now,
        )

    def story(self, number: int) -> Story | None:
        """Of a live request, or of one that ended not long ago, by the service's number."""
        for request in self._desk.live():
            if request.number == number:
                return story_of(request)
        return self._history.story(number)

    def check(self) -> None:
        check_agreement(self._desk, self._dispatcher, self._attempts, self._books)
