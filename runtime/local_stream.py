"""One live request of the local engine: from engine events to the deltas that its caller reads.

Owns the text decoder and the timeline of that request. The LocalEngine calls it under its lock.
The last delta carries why the request ended; nothing follows it.
"""

from collections.abc import Callable

from .errors import RltError
from .events import TokensProduced
from .interfaces import Clock, Delta
from .prompt import TextDecoder
from .types import FinishReason, RequestId, Stamp

Deliver = Callable[[Delta], None]


class LocalStream:
    def __init__(
        self,
        request_id: RequestId,
        *,
        num_prompt_tokens: int,
        deadline_at_s: float | None,
        decoder: TextDecoder | None,
        clock: Clock,
        deliver: Deliver,
    ) -> None:
        self.request_id = request_id
        self.deadline_at_s = deadline_at_s
        self._num_prompt_tokens = num_prompt_tokens
        self._decoder = decoder
        self._clock = clock
        self._deliver = deliver
        self._next_index = 0
        self._timeline = [Stamp("received", clock.wall_s())]

    def on_tokens(self, event: TokensProduced) -> None:
        if self._next_index == 0:
            self._stamp("first_token")
        finished = event.finish_reason is not None
        self._next_index = event.start_index + len(event.token_ids)
        if finished:
            self._stamp("last_token")
        self._deliver(
            Delta(
                request_id=self.request_id,
                start_index=event.start_index,
                token_ids=event.token_ids,
                exit_depths=event.exit_depths,
                logprobs=event.logprobs,
                text=self._text(event.token_ids, finished),
                finish_reason=event.finish_reason,
                num_prompt_tokens=self._num_prompt_tokens if finished else None,
                timeline=tuple(self._timeline) if finished else (),
            )
        )

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

    def _text(self, token_ids: tuple[int, ...], finished: bool) -> str:
        if self._decoder is None:
            return ""
        text = self._decoder.push(token_ids)
        return text + self._decoder.finish() if finished else text

    def _stamp(self, event: str) -> None:
        self._timeline.append(Stamp(event, self._clock.wall_s()))
