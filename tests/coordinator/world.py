"""A coordinator's state among scripted workers and clients, with each message on a line of its own.

The lines can be delivered, lost or doubled one by one; check() runs after every event, and each
client keeps what it was told and complains about what it must never hear.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

from rlt.connector.config import EXIT_RESTART
from rlt.connector.messages import (
    Accepted,
    CancelDone,
    CancelRequest,
    ClientToCoordinator,
    Confirm,
    ConfirmRow,
    CoordinatorToClient,
    CoordinatorToWorker,
    DrainAnswer,
    Expel,
    Generate,
    Rejected,
    ServiceInfo,
    Supervise,
    SuperviseAnswer,
    Supervised,
    SupervisorToCoordinator,
    WorkerExited,
    WorkerToCoordinator,
)
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.effects import ConfirmOutput, Deliver, Effect, SendClient, SendWorker
from rlt.coordinator.now import Now
from rlt.coordinator.observer import Observer
from rlt.coordinator.state import CoordinatorState
from rlt.runtime.errors import ServiceLost
from rlt.runtime.interfaces import Delta, GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from .workers import ScriptedWorker, expected_tokens, hand_over

WALL_S = 1_800_000_000.0
SUPERVISOR = "supervisor-0"


@dataclass
class Life:
    """One accepted submission, as its client saw it."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    last: Delta | None = None
    lost: bool = False  # its coordinator died


@dataclass
class ScriptedClient:
    name: bytes
    lives: list[Life] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    sent: dict[int, GenerateRequest] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    gone: bool = False
    lost: set[int] = field(default_factory=set)  # submissions to a coordinator that died
    cancel_done: int = 0
    lost_again: int = 0  # ends of requests whose output it had heard
    drained: list[DrainAnswer] = field(default_factory=list)
    infos: list[ServiceInfo] = field(default_factory=list)

    def live(self, request_id: RequestId) -> Life | None:
        for life in reversed(self.lives):
            if life.request.request_id == request_id:
                return life if life.last is None else None
        return None

    def hear(self, message: CoordinatorToClient) -> None:
        match message:
            case Accepted(submission=submission):
                if submission not in self.accepted:
                    self.accepted.add(submission)
                    self.lives.append(Life(self.sent[submission]))
            case DrainAnswer():
                self.drained.append(message)
            case ServiceInfo():
                self.infos.append(message)
            case Rejected():
                self.rejected.append(message)
            case CancelDone(request_id=request_id):
                self.cancel_done += 1
                assert self.live(request_id) is None, "cancelled, and yet not ended"
            case _:
                pass

    def take(self, delta: Delta) -> None:
        life = self.live(delta.request_id)
        if life is None and delta.error_code == ServiceLost.code:  # the answer to a repeated ask
            self.lost_again += 1
            return
        assert life is not None, f"output of a request that has ended: {delta}"
        assert delta.start_index == len(life.tokens)
        assert len(delta.exit_depths) == len(delta.token_ids)
        life.tokens += delta.token_ids
        if delta.finish_reason is not None:
            life.last = delta
            prompt = life.request.prompt_token_ids
            assert prompt is not None
            whole = expected_tokens(prompt, life.request.sampling.max_tokens)
            assert tuple(life.tokens) == whole[: len(life.tokens)]
            if delta.finish_reason is FinishReason.LENGTH:
                assert tuple(life.tokens) == whole


class World:
    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        observer: Observer | None = None,
        **options: object,
    ) -> None:
        config = CoordinatorConfig(runtime_dir="/nowhere", **options)  # type: ignore[arg-type]
        self._config, self._observer = config, observer
        self.time_s = 100.0
        self.state = CoordinatorState(config, self.now, draw_seed=lambda: 7, observer=observer)
        self.workers: dict[str, ScriptedWorker] = {}
        self.dead: set[str] = set()
        self.reaped: dict[str, WorkerExited] = {}  # what the supervisor remembers
        self.supervised = False
        self.supervise_answers = 0
        self.to_worker: dict[str, deque[CoordinatorToWorker]] = {}
        self.to_coordinator: dict[str, deque[WorkerToCoordinator]] = {}
        self.to_supervisor: deque[Expel] = deque()
        self.from_supervisor: deque[SupervisorToCoordinator] = deque()
        self.clients = {name: ScriptedClient(name) for name in (b"c0", b"c1")}
        self._submissions = itertools.count(1)
        for number in range(prefill):
            self.add(ScriptedWorker(f"p{number}", "prefill"))
        for number in range(decode):
            self.add(ScriptedWorker(f"d{number}", "decode"))
        self.deliver_all()

    @property
    def now(self) -> Now:
        return Now(self.time_s, WALL_S + self.time_s)

    def add(self, worker: ScriptedWorker) -> ScriptedWorker:
        self.workers[worker.incarnation] = worker
        self.to_worker[worker.incarnation] = deque()
        self.to_coordinator[worker.incarnation] = deque([worker.register()])
        return worker

    def named(self, name: str) -> ScriptedWorker:
        return next(w for w in self.workers.values() if w.name == name)

    # Clients

    def generate(
        self,
        name: str = "r",
        prompt: tuple[int, ...] = (5, 6, 7),
        max_tokens: int = 4,
        client: bytes = b"c0",
        deadline_s: float | None = None,
    ) -> int:
        submission = next(self._submissions)
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            deadline_s=deadline_s,
        )
        self.clients[client].sent[submission] = request
        self.from_client(Generate(submission=submission, request=request), client)
        return submission

    def cancel(self, name: str = "r", client: bytes = b"c0") -> None:
        self.from_client(CancelRequest(request_id=RequestId(name)), client)

    def from_client(self, message: ClientToCoordinator, client: bytes = b"c0") -> None:
        self.perform(self.state.handle_client(client, message, self.now))

    def life(self, name: str = "r", client: bytes = b"c0") -> Life:
        lives = self.clients[client].lives
        return [life for life in lives if life.request.request_id == name][-1]

    # Messages

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendClient(client=client, message=answer):
                    self.clients[client].hear(answer)
                case Deliver(client=client, delta=delta):
                    assert not self.clients[client].gone, "output for a client that is gone"
                    self.clients[client].take(delta)
                case SendWorker(message=Expel() as expel):
                    self.to_supervisor.append(expel)
                case SendWorker(message=SuperviseAnswer()):
                    self.supervise_answers += 1
                case SendWorker(incarnation=incarnation, message=ask):
                    if incarnation not in self.dead:
                        self.to_worker[incarnation].append(ask)
                case ConfirmOutput(incarnation=incarnation, generation=generation, outputs=n):
                    if incarnation not in self.dead:
                        row = ConfirmRow(generation, n)
                        self.to_worker[incarnation].append(Confirm(rows=(row,)))
        self.state.check()

    def deliver_to_worker(self, incarnation: str, *, twice: bool = False) -> None:
        worker = self.workers[incarnation]
        if worker.stopped:
            self.to_worker[incarnation].clear()  # nobody reads it
            return
        message = self.to_worker[incarnation].popleft()
        for _ in range(1 + twice):
            self.to_coordinator[incarnation].extend(worker.handle(message))
        if worker.shutdown is not None:
            self._exit(worker, restart=worker.shutdown.restart)

    def _exit(self, worker: ScriptedWorker, *, restart: bool) -> None:
        """It ends in order; its supervisor reaps it, and starts it again if that was asked for."""
        while self.to_coordinator[worker.incarnation]:
            self.deliver_to_coordinator(worker.incarnation)
        self.kill(worker.incarnation, noticed=False, status=EXIT_RESTART if restart else 0)
        self.from_supervisor.append(self.reaped[worker.incarnation])
        if restart:
            life = worker.life + 1000
            self.add(ScriptedWorker(worker.name, worker.role, worker.num_blocks, life=life))

    def deliver_to_coordinator(self, incarnation: str, *, twice: bool = False) -> None:
        message = self.to_coordinator[incarnation].popleft()
        for _ in range(1 + twice):
            self.perform(self.state.handle_worker(incarnation, message, self.now))

    def deliver_to_supervisor(self, *, twice: bool = False) -> None:
        """It kills and reaps whom it has, and remembers whom it had."""
        message = self.to_supervisor.popleft()
        for _ in range(1 + twice):
            if message.incarnation in self.workers:
                self.kill(message.incarnation, noticed=False)
            if message.incarnation in self.reaped:
                self.from_supervisor.append(self.reaped[message.incarnation])

    def deliver_from_supervisor(self, *, twice: bool = False) -> None:
        message = self.from_supervisor.popleft()
        for _ in range(1 + twice):
            self.perform(self.state.handle_worker(SUPERVISOR, message, self.now))

    def deliver_all(self) -> None:
        """Until no message is on any line; nobody does anything of its own accord."""
        self.deliver_all_but_expulsions()
        while self.to_supervisor:
            self.deliver_to_supervisor()
            self.deliver_all_but_expulsions()

    def deliver_all_but_expulsions(self) -> None:
        while (
            any(self.to_worker.values())
            or any(self.to_coordinator.values())
            or self.from_supervisor
        ):
            while self.from_supervisor:
                self.deliver_from_supervisor()
            for incarnation in list(self.workers):
                while self.to_worker.get(incarnation):
                    self.deliver_to_worker(incarnation)
                while self.to_coordinator.get(incarnation):
                    self.deliver_to_coordinator(incarnation)

    def restart_coordinator(self) -> None:
        """It is killed, and a new one takes its place: what was on the way to it is lost."""
        for life in (life for client in self.clients.values() for life in client.lives):
            life.lost = life.last is None
        for client in self.clients.values():
            client.lives = [life for life in client.lives if not life.lost]
            client.lost = set(client.sent)
        for line in (*self.to_coordinator.values(), *self.to_worker.values()):
            line.clear()
        self.to_supervisor.clear()
        self.from_supervisor.clear()
        self.state = CoordinatorState(
            self._config, self.now, draw_seed=lambda: 7, observer=self._observer
        )

    # Workers and time

    def work(self) -> None:
        """Everybody does one thing for each generation that they hold."""
        self.decode()
        self.transfer()
        self.compute()

    def compute(self) -> None:
        for worker in self._living("prefill"):
            for generation in list(worker.live):
                self.to_coordinator[worker.incarnation].extend(worker.compute(generation))

    def transfer(self) -> None:
        for worker in self._living("prefill"):
            for generation, record in list(worker.live.items()):
                peer = self.workers.get(record.peer)
                if peer is not None and not peer.stopped:
                    released, received = hand_over(worker, peer, generation)
                    self.to_coordinator[worker.incarnation].extend(released)
                    self.to_coordinator[peer.incarnation].extend(received)

    def decode(self) -> None:
        for worker in self._living("decode"):
            for generation in list(worker.live):
                self.to_coordinator[worker.incarnation].extend(worker.decode_step(generation))

    def _living(self, role: str) -> list[ScriptedWorker]:
        workers = [w for w in self.workers.values() if w.role == role]
        return [worker for worker in workers if not worker.stopped]

    def beat(self) -> None:
        if self.supervised:
            children = tuple(
                Supervised(w.name, w.incarnation, w.pid) for w in self.workers.values()
            )
            self.from_supervisor.append(Supervise(children=children))
        for worker in self.workers.values():
            if not worker.stopped and not worker.ended:
                again = worker.register() if worker.welcome is None else worker.heartbeat()
                self.to_coordinator[worker.incarnation].append(again)

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds
        self.perform(self.state.tick(self.now))

    def kill(self, incarnation: str, *, noticed: bool = True, status: int = -9) -> None:
        """The process ends and is reaped. noticed: the coordinator hears of it at once."""
        worker = self.workers.pop(incarnation)
        self.dead.add(incarnation)
        self.reaped[incarnation] = _exited(worker, status)
        del self.to_worker[incarnation], self.to_coordinator[incarnation]
        if noticed:
            message = self.reaped[incarnation]
            self.perform(self.state.handle_worker(SUPERVISOR, message, self.now))

    def leave(self, client: bytes) -> None:
        self.clients[client].gone = True
        self.perform(self.state.client_gone(client, self.now))

    def run_until_idle(self, rounds: int = 300) -> None:
        for _ in range(rounds):
            self.work()
            self.beat()
            self.deliver_all()
            if self.state.idle:
                return
            self.pass_time(0.3)
        raise AssertionError(f"not idle: {self.state.statistics()}")


def _exited(worker: ScriptedWorker, status: int) -> WorkerExited:
    return WorkerExited(
        worker=worker.name, incarnation=worker.incarnation, pid=worker.pid, status=status
    )
