"""How the service stands: what may be asked of the coordinator's state without changing it.

Puts the parts' own answers together for clients, metrics and the status page. Owns what the service
is called and whether it is stopping. Nobody changes anything by asking.
"""

import secrets
from collections import Counter

from ..connector.messages import PROTOCOL_VERSION, ServiceInfo
from .attempt import ROLES, Role
from .attempts import Attempts
from .credits import Books
from .desk import Desk
from .dispatch import Dispatcher
from .history import History, Story, story_of
from .now import Now
from .registry import Registry, Worker
from .snapshot import Snapshot, take_snapshot
from .supervisors import Supervisors


class Standing:
    def __init__(
        self,
        *,
        registry: Registry,
        books: Books,
        attempts: Attempts,
        desk: Desk,
        dispatcher: Dispatcher,
        supervisors: Supervisors,
        history: History,
        counters: Counter[str],
    ) -> None:
        self.instance = secrets.token_hex(8)
        self.counters = counters
        self._registry = registry
        self._books = books
        self._attempts = attempts
        self._desk = desk
        self._dispatcher = dispatcher
        self._supervisors = supervisors
        self._history = history
        self._stopping = False

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
        if self._stopping:
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

    def service_info(self) -> ServiceInfo:
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
