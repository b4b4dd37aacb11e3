"""Waits during a cell, and what every look at the service meanwhile has seen.

Owns the most that was quarantined, the canary hits, and when each worker was heard last: a worker
holds nothing when it has said so since it was asked.
"""

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rlt.coordinator.client import Client

from ..system.service import eventually
from .faults import Faults
from .rules import Letter, Rule

REST_S = 40.0


class Beats(Rule):
    """Counts heartbeats by incarnation, and treats none."""

    def __init__(self) -> None:
        super().__init__("delay", "heartbeat", to="coordinator")
        self.by: Counter[str] = Counter()

    def takes(self, letter: Letter) -> bool:
        if self._matches(letter):
            self.by[letter.peer] += 1
        return False


class Watch:
    def __init__(self, faults: Faults, client: Client) -> None:
        self._faults, self._client = faults, client
        self._beats = Beats()
        self.quarantined = self.canary_hits = 0

    def __enter__(self) -> Self:
        self._faults.relay.add(self._beats)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._faults.relay.forget(self._beats)

    def until(self, check: Callable[[], bool], timeout_s: float, what: str) -> None:
        service = self._faults.service

        def look() -> bool:
            workers = service.workers(self._client).values()
            blocks = sum(int(w.get("blocks_quarantined", 0)) for w in workers)
            self.quarantined = max(self.quarantined, blocks)
            hits = sum(int(w.get("canary_hits", 0)) for w in workers)
            self.canary_hits = max(self.canary_hits, hits)
            return check()

        eventually(look, lambda: f"{what}; held: {service.held}", timeout_s)

    def rest(self, what: str) -> None:
        """Nothing is held: every worker has said so since now."""
        service, beats = self._faults.service, self._beats.by
        before = beats.copy()

        def at_rest() -> bool:
            said = [w["incarnation"] for w in service.workers(self._client).values()]
            return all(beats[i] > before[i] + 1 for i in said) and service.at_rest(self._client)

        self.until(at_rest, REST_S, what)
