"""Who supervises which worker process, which are to be killed, and which are known to be dead.

Owns the open asks to expel and the memory of reaped incarnations: an incarnation is dead only if a
supervisor says that it reaped it. All of it is bounded, since peers fill it.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable

from ..connector.asks import AskBook
from ..connector.messages import Expel, Supervise, SuperviseAnswer, WorkerExited
from .effects import Effect, SendWorker
from .remembered import Remembered

logger = logging.getLogger(__name__)

SILENT_S = 10.0  # they speak every second
LONGEST_S = 30.0  # between two asks to expel the same one
MAX_SUPERVISORS = 4096
MAX_CHILDREN = 4096  # of one supervisor
MAX_DEAD = 16384
MAX_EXPELS = 4096  # open at once: beyond that, the oldest are given up


class _Supervisor:
    def __init__(self) -> None:
        self.children: frozenset[str] = frozenset()
        self.heard_s = 0.0


class Supervisors:
    def __init__(self, emit: Callable[[Effect], None], counters: Counter[str]) -> None:
        self._emit = emit
        self._counters = counters
        self._known: dict[str, _Supervisor] = {}
        self._dead = Remembered(MAX_DEAD)
        self._expels: AskBook[str] = AskBook(longest_s=LONGEST_S)

    def heard(self, identity: str, message: Supervise, mono_s: float) -> tuple[str, ...]:
        """The incarnations that run there. A supervisor too many is counted, and only answered."""
        self._emit(SendWorker(identity, SuperviseAnswer(pid=os.getpid())))
        if identity not in self._known and len(self._known) >= MAX_SUPERVISORS:
            self._counters["supervisors_ignored"] += 1
            return ()
        supervisor = self._known.setdefault(identity, _Supervisor())
        names = tuple(child.incarnation for child in message.children[:MAX_CHILDREN])
        supervisor.children, supervisor.heard_s = frozenset(names), mono_s
        return names

    def exited(self, message: WorkerExited) -> None:
        """It is dead and reaped."""
        self._dead.add(message.incarnation)
        if self._expels.answered(message.incarnation):
            logger.info("%s is dead (status %d)", message.incarnation, message.status)

    def is_dead(self, incarnation: str) -> bool:
        return incarnation in self._dead

    def expel(self, incarnation: str, mono_s: float) -> None:
        """Have it killed and reaped, unless it is dead already. Asked again until it is."""
        if incarnation in self._dead or not self._expels.ask(incarnation, mono_s):
            return
        self._counters["expelled"] += 1
        self._send(incarnation)
        if len(self._expels) > MAX_EXPELS:
            self._expels.answered(next(iter(self._expels)))
            self._counters["expels_given_up"] += 1

    def lost(self, identity: str) -> None:
        """Its connection is closed. It says what it has when it is back."""
        self._known.pop(identity, None)

    def tick(self, mono_s: float) -> None:
        for identity, supervisor in list(self._known.items()):
            if mono_s - supervisor.heard_s > SILENT_S:
                del self._known[identity]
        for incarnation in self._expels.due(mono_s):
            self._send(incarnation)

    def _send(self, incarnation: str) -> None:
        """To those that have it, or else to all: it may have been named before they were heard."""
        for identity in self._having(incarnation) or tuple(self._known):
            self._emit(SendWorker(identity, Expel(incarnation=incarnation)))

    def _having(self, incarnation: str) -> tuple[str, ...]:
        return tuple(i for i, s in self._known.items() if incarnation in s.children)

    def dead_of(self, incarnations: Iterable[str]) -> tuple[str, ...]:
        return tuple(incarnation for incarnation in incarnations if incarnation in self._dead)

    @property
    def open_expels(self) -> int:
        return len(self._expels)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, identity: object) -> bool:
        return identity in self._known
