"""One live request of the local engine: from engine events to the deltas that its caller reads.

Owns the text and the timeline of that request. The LocalEngine calls it under its lock.
The last delta carries why the request ended; nothing follows it.
"""

from collections.abc import Callable

from .errors import RltError
from .events import TokensProduced
from .interfaces import Clock, Delta
from .stop_text import OutputText, Piece
from .types import FinishReason, RequestId, Stamp

Deliver = Callable[[Delta], None]


class LocalStream:
    def __init__(
        self,
        request_id: RequestId,
        *,
        num_prompt_tokens: int,
        deadline_at_s: float | None,
        text: OutputText | None,
        clock: Clock,
        deliver: Deliver,
    ) -> None:
        self.request_id = request_id
        self.deadline_at_s = deadline_at_s
        self._num_prompt_tokens = num_prompt_tokens
        self._text = text
        self._clock = clock
        self._deliver = deliver
        self._next_index = 0
        self._timeline = [Stamp("received", clock.wall_s())]

    def on_tokens(self, event: TokensProduced) -> bool:
        """Whether the output is over: it may be by a stop string, which the engine cannot see."""
        if self._next_index == 0:
            self._stamp("first_token")
        piece = Piece("", len(event.token_ids), False)
        if self._text is not None:
            piece = self._text.push(event.token_ids)
        text, reason = piece.text, event.finish_reason
        if piece.stopped:
            reason = FinishReason.STOP
        elif reason is not None and self._text is not None:
            text += self._text.finish()
            reason = FinishReason.STOP if self._text.stopped else reason
        finished = reason is not None
        self._next_index = event.start_index + piece.taken
        if finished:
            self._stamp("last_token")
        self._deliver(
            Delta(
                request_id=self.request_id,
                start_index=event.start_index,
                token_ids=event.token_ids[: piece.taken],
                exit_depths=event.exit_depths[: piece.taken],
                logprobs=event.logprobs[: piece.taken],
                text=text,
                finish_reason=reason,
                num_prompt_tokens=self._num_prompt_tokens if finished else None,
                timeline=tuple(self._timeline) if finished else (),
            )
        )
        return finished

    def cancel(self) -> None:
        self._end(FinishReason.CANCELLED, None)

    def fail(self, error: RltError) -> None:
        self._end(FinishReason.ERROR, error)

    def _end(self, reason: FinishReason, error: RltError | None) -> None:
        self._stamp(reason.value)
        self._deliver(
            Delta(
                request_id=self.request_id,
                start_index=self._next_index,
                finish_reason=reason,
                error_code=error.code if error else None,
                error=str(error) if error else None,
                num_prompt_tokens=self._num_prompt_tokens,
                timeline=tuple(self._timeline),
            )
        )

    def _stamp(self, event: str) -> None:
        self._timeline.append(Stamp(event, self._clock.wall_s()))
