"""The last requests that ended, kept for whoever looks afterwards.

Owns a bounded list. Keeps the live Timeline object of each, because workers tell of their release
after the request has ended. Never keeps a prompt or a text.
"""

from collections import deque

import msgspec

from ..runtime.types import FinishReason
from .now import Now
from .request import Request
from .timeline import Timeline

KEPT = 32


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """outcome: the finish reason; code: the error's. first_token_s: None if none came."""

    number: int
    request_id: str
    outcome: FinishReason
    code: str | None
    prompt_tokens: int
    exit_depths: tuple[int, ...]
    seconds: float
    first_token_s: float | None
    timeline: Timeline


class History:
    def __init__(self, kept: int = KEPT) -> None:
        self._ended: deque[Ended] = deque(maxlen=kept)

    def add(self, request: Request, now: Now) -> None:
        assert request.finish_reason is not None
        first = request.first_output_s
        self._ended.append(
            Ended(
                number=request.number,
                request_id=request.asked.request_id,
                outcome=request.finish_reason,
                code=request.error_code,
                prompt_tokens=len(request.prompt),
                exit_depths=tuple(request.exit_depths),
                seconds=now.mono_s - request.received_s,
                first_token_s=None if first is None else first - request.received_s,
                timeline=request.timeline,
            )
        )

    def latest(self) -> tuple[Ended, ...]:
        """The newest first."""
        return tuple(reversed(self._ended))
