"""Which incarnations are dead and reaped: remembered, so that it can be said again. Pure.

Owns the last WorkerExited of each, up to a bound; the oldest are forgotten first. Whoever asks for
one that is forgotten hears nothing, which is safe: nothing is freed on silence.
"""

from ..connector.messages import WorkerExited

REMEMBERED = 4096


class Reaped:
    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._bound = remembered
        self._exits: dict[str, WorkerExited] = {}

    def add(self, exited: WorkerExited) -> None:
        self._exits[exited.incarnation] = exited
        if len(self._exits) > self._bound:
            del self._exits[next(iter(self._exits))]

    def get(self, incarnation: str) -> WorkerExited | None:
        return self._exits.get(incarnation)
