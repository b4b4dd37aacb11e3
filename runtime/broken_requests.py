"""Requests whose state on the device is lost: a pass, a restore or a truncate of theirs failed.

Owns their reasons. Such a request's rows are left out of later passes, which may be submitted
already, and answered as failed, so that nobody else's rows fail with them.
"""

import msgspec

from .plans import RowFailure, SchedulerOutput
from .types import Generation

ROWS = ("finalize", "prefill", "prelude", "loops", "coda", "verify")


class BrokenRequests:
    def __init__(self) -> None:
        self._reasons: dict[Generation, str] = {}

    def add(self, generation: Generation, reason: str) -> None:
        self._reasons[generation] = reason

    def add_all(self, plan: SchedulerOutput, reason: str) -> None:
        """The whole pass failed."""
        for generation in _named(plan):
            self._reasons[generation] = reason

    def forget(self, generation: Generation) -> None:
        self._reasons.pop(generation, None)

    def split(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, tuple[RowFailure, ...]]:
        """The plan without their rows, and one failure for each of them that had some."""
        if not self._reasons:
            return plan, ()
        named = _named(plan)
        failures = tuple(
            RowFailure(generation, reason)
            for generation, reason in list(self._reasons.items())
            if generation in named
        )
        if not failures:
            return plan, ()
        broken = {failure.generation for failure in failures}
        kept = {
            kind: tuple(row for row in getattr(plan, kind) if row.generation not in broken)
            for kind in ROWS
        }
        return msgspec.structs.replace(plan, **kept), failures


def _named(plan: SchedulerOutput) -> set[Generation]:
    return {row.generation for kind in ROWS for row in getattr(plan, kind)}
