"""The last requests that ended, kept for whoever looks afterwards.

Owns a bounded list. Keeps each one's Timeline itself and no copy, because workers tell of their
release after the request has ended. Never keeps a prompt or a text.
"""

from collections import deque

import msgspec

from ..runtime.types import FinishReason, Stamp
from .now import Now
from .request import Request
from .timeline import Timeline

KEPT = 32


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """code: the error's. first_token_s: from acceptance; None if none came."""

    number: int
    request_id: str
    outcome: FinishReason
    code: str | None
    prompt_tokens: int
    outputs: int
    mean_depth: float | None
    seconds: float
    first_token_s: float | None


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """What one request did, live or ended. exit_depths: of every token given out."""

    number: int
    request_id: str
    exit_depths: tuple[int, ...]
    stamps: tuple[Stamp, ...]


class _Kept(msgspec.Struct, frozen=True):
    ended: Ended
    exit_depths: tuple[int, ...]
    timeline: Timeline


class History:
    def __init__(self, kept: int = KEPT) -> None:
        self._kept: deque[_Kept] = deque(maxlen=kept)

    def add(self, request: Request, now: Now) -> None:
        assert request.finish_reason is not None
        first = request.first_output_s
        ended = Ended(
            number=request.number,
            request_id=request.asked.request_id,
            outcome=request.finish_reason,
            code=request.error_code,
            prompt_tokens=len(request.prompt),
            outputs=request.delivered,
            mean_depth=mean_depth(request),
            seconds=now.mono_s - request.received_s,
            first_token_s=None if first is None else first - request.received_s,
        )
        self._kept.append(_Kept(ended, tuple(request.exit_depths), request.timeline))

    def latest(self) -> tuple[Ended, ...]:
        """The newest first."""
        return tuple(kept.ended for kept in reversed(self._kept))

    def story(self, number: int) -> Story | None:
        for kept in self._kept:
            if kept.ended.number == number:
                return Story(
                    number=number,
                    request_id=kept.ended.request_id,
                    exit_depths=kept.exit_depths,
                    stamps=kept.timeline.stamps(),
                )
        return None


def story_of(request: Request) -> Story:
    return Story(
        number=request.number,
        request_id=request.asked.request_id,
        exit_depths=tuple(request.exit_depths),
        stamps=request.timeline.stamps(),
    )


def mean_depth(request: Request) -> float | None:
    """Loops per token after the first, which comes from the prompt and always runs all of them."""
    later = request.exit_depths[1:]
    return sum(later) / len(later) if later else None
