"""One client-facing request: queued, running, ended. It ends exactly once.

Owns what was delivered to the client so far, across attempts. Knows nothing of workers beyond the
names of those that refused it.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from ..runtime.errors import ProtocolError
from ..runtime.interfaces import GenerateRequest
from ..runtime.stop_text import OutputText
from ..runtime.types import EngineRequest, FinishReason, Generation
from .timeline import Timeline


class RequestPhase(Enum):
    QUEUED = "queued"
    RUNNING = "running"  # an attempt lives
    ENDED = "ended"


_MOVES = {
    RequestPhase.QUEUED: {RequestPhase.RUNNING, RequestPhase.ENDED},
    RequestPhase.RUNNING: {RequestPhase.QUEUED, RequestPhase.ENDED},
    RequestPhase.ENDED: set[RequestPhase](),
}


@dataclass(eq=False, kw_only=True)
class Request:
    client: bytes
    asked: GenerateRequest
    prompt: tuple[int, ...]
    seed: int  # the caller's, or drawn at admission; the same for every attempt
    received_s: float
    deadline_s: float
    text: OutputText | None
    timeline: Timeline
    number: int = 0  # by which this service counts it; a caller's ID may come back
    phase: RequestPhase = RequestPhase.QUEUED
    resolved: EngineRequest | None = None  # None until a worker has told what it serves
    attempt: Generation | None = None
    attempts: int = 0  # that were ever started
    tokens: list[int] = field(default_factory=list)  # outputs that went to the client
    exit_depths: list[int] = field(default_factory=list)  # of these
    first_output_s: float | None = None
    last_output_s: float | None = None
    complete: bool = False  # the whole output did, with its finish reason
    finish_reason: FinishReason | None = None  # how it ended, and with which error
    error_code: str | None = None
    refused_by: dict[str, tuple[str, str]] = field(default_factory=dict)  # incarnation: code, why
    refusals: int = 0
    failures: int = 0  # attempts that failed since the last token was delivered
    failed_at: Counter[str] = field(default_factory=Counter)  # by incarnation, its failed attempts
    last_failure: tuple[str, str] | None = None  # code and error of the last failed attempt
    bypassed: int = 0  # younger requests that were started before this one

    @property
    def delivered(self) -> int:
        """Outputs 0..delivered-1 went to the client."""
        return len(self.tokens)

    def move(self, to: RequestPhase) -> None:
        if to not in _MOVES[self.phase]:
            name = self.asked.request_id
            raise ProtocolError(f"request {name}: {self.phase.value} -> {to.value} is not a move")
        self.phase = to
