"""Requests whose state on the device was lost between passes: a restore or truncate that failed.

Owns their reasons. Such a request's rows are left out of the next pass and answered as failed, so
that nobody else's rows fail with them.
"""

import msgspec

from .plans import RowFailure, SchedulerOutput
from .types import Generation


class BrokenRequests:
    def __init__(self) -> None:
        self._reasons: dict[Generation, str] = {}

    def add(self, generation: Generation, reason: str) -> None:
        self._reasons[generation] = reason

    def forget(self, generation: Generation) -> None:
        self._reasons.pop(generation, None)

    def split(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, tuple[RowFailure, ...]]:
        """The plan without their rows, and one failure for each of them that had some."""
        if not self._reasons:
            return plan, ()
        kinds = ("finalize", "prefill", "prelude", "loops", "coda", "verify")
        rows = {kind: getattr(plan, kind) for kind in kinds}
        named = {row.generation for kind in kinds for row in rows[kind]}
        failures = tuple(
            RowFailure(generation, reason)
            for generation, reason in list(self._reasons.items())
            if generation in named
        )
        if not failures:
            return plan, ()
        broken = {failure.generation for failure in failures}
        kept = {
            kind: tuple(row for row in rows[kind] if row.generation not in broken) for kind in kinds
        }
        return msgspec.structs.replace(plan, **kept), failures
