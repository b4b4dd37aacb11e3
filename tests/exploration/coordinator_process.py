"""The product's coordinator as a process that takes one event at a time."""

from typing import Any

from rlt.connector.channel import SendResult
from rlt.connector.messages import SuperviseAnswer
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.effects import Outbox
from rlt.coordinator.now import Now
from rlt.coordinator.state import CoordinatorState

from .bounds import Bounds
from .records import NEVER_S, Came, Look

STEP_S = 6.0  # longer than whatever it repeats, and than its patience with a lost connection


class CoordinatorProcess:
    name = "C"

    def __init__(self, bounds: Bounds) -> None:
        self.now_s = 1000.0
        self._sent: list[tuple[str, Any]] = []
        config = CoordinatorConfig(
            runtime_dir="/nowhere",
            heartbeat_s=1.0,
            heartbeat_timeout_s=100 * NEVER_S,
            default_deadline_s=NEVER_S,
            max_attempts=bounds.max_attempts,
            drain_s=STEP_S - 1.0,
        )
        self.state = CoordinatorState(config, self._now(), draw_seed=lambda: 7)
        self._outbox = Outbox(self._send_client, self._send_worker)

    def _now(self) -> Now:
        return Now(self.now_s, 1_800_000_000.0)

    def _send_client(self, client: bytes, message: Any) -> SendResult:
        self._sent.append(("K", message))
        return SendResult.SENT

    def _send_worker(self, incarnation: str, message: Any) -> SendResult:
        if not isinstance(message, SuperviseAnswer):  # a sign of life: it changes nothing here
            self._sent.append((incarnation, message))
        return SendResult.SENT

    def apply(self, event: tuple[Any, ...]) -> Came:
        effects: list[Any] = []
        match event:
            case ("begin",):
                pass
            case ("hear", "K", message):
                effects = self.state.handle_client(b"K", message, self._now())
            case ("hear", str(source), message):
                effects = self.state.handle_worker(source, message, self._now())
            case ("time",):
                self.now_s += STEP_S
                effects = self.state.tick(self._now())
            case ("deadline",):
                self.now_s += 2 * NEVER_S
                effects = self.state.tick(self._now())
            case ("silent", str(incarnation)):
                effects = self._hears_nothing_of(incarnation)
            case ("unreachable", str(incarnation)):
                effects = self.state.worker_unreachable(incarnation, self._now())
            case _:
                raise AssertionError(event)
        self._outbox.add(effects)
        self._outbox.flush()
        self.state.check()
        sent, self._sent = self._sent, []
        return Came(tuple(sent))

    def _hears_nothing_of(self, incarnation: str) -> list[Any]:
        """The time that a worker may be silent is over for this one, and for no other."""
        worker = self.state._registry.get(incarnation)
        if worker is None:
            return []
        worker.heard_s = self.now_s - 101 * NEVER_S
        return self.state.tick(self._now())

    def look(self) -> Look:
        numbers = self.state.statistics()
        return Look(clean=self.state.idle and not numbers["credits_outstanding"])
