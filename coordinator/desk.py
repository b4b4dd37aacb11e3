"""The clients' side: takes requests in, gives their output out, and ends each exactly once.

Owns every live request by (connection, request ID), the answers given to submissions, and each
connection's deltas. Knows nothing of workers and attempts. The first ending of a request wins.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from ..connector.messages import Accepted, Generate, OutputRow, Rejected
from ..runtime.errors import DuplicateRequest, InvalidRequest, RequestError, ServiceLost
from ..runtime.interfaces import Delta, GenerateRequest
from ..runtime.prompt import Tokenizer
from ..runtime.stop_text import OutputText, Piece
from ..runtime.types import FinishReason, RequestId
from .answers import Answer, Answers
from .deadlines import Deadlines
from .effects import Deliver, Effect, SendClient
from .now import Now
from .observer import Observer
from .prompts import Prompt, read_prompt
from .request import Request, RequestPhase
from .timeline import Timeline

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 256  # of a request ID, which comes back with every piece of output


class Desk:
    def __init__(
        self,
        *,
        emit: Callable[[Effect], None],
        counters: Counter[str],
        admit: Callable[[Request], None],
        on_end: Callable[[Request], None],
        tokenizer: Tokenizer | None,
        draw_seed: Callable[[], int],
        default_deadline_s: float,
        observer: Observer,
    ) -> None:
        """admit: raises a RequestError if the request cannot be taken. on_end: called once for
        each request that was admitted, whatever ended it."""
        self._emit = emit
        self._counters = counters
        self._admit = admit
        self._on_end = on_end
        self._tokenizer = tokenizer
        self._draw_seed = draw_seed
        self._default_deadline_s = default_deadline_s
        self._observer = observer
        self._numbers = itertools.count(1)
        self._live: dict[bytes, dict[RequestId, Request]] = {}
        self._answers: dict[bytes, Answers] = {}
        self._deadlines = Deadlines()

    def generate(
        self, client: bytes, message: Generate, now: Now, prompt: Prompt | None = None
    ) -> None:
        answers = self._answers.setdefault(client, Answers())
        answer = answers.again(message.submission)
        if answer is not None:
            self._answer_again(client, message, answer)
            return
        answer = self._answer(client, message, now, prompt)
        answers.add(answer)
        self._emit(SendClient(client, answer))

    def _answer_again(self, client: bytes, message: Generate, answer: Answer) -> None:
        """The first answer may be lost, and with it the whole output: then nobody may wait for it.
        Who did hear the output has forgotten the request, and passes over its second end."""
        self._emit(SendClient(client, answer))
        name = message.request.request_id
        if isinstance(answer, Rejected) or self.find(client, name) is not None:
            return
        error = ServiceLost(f"request {name} has ended, and its output may be lost: ask again")
        last = Delta(
            request_id=name,
            start_index=0,
            finish_reason=FinishReason.ERROR,
            error_code=error.code,
            error=str(error),
        )
        self._emit(Deliver(client, last))

    def _answer(self, client: bytes, message: Generate, now: Now, prompt: Prompt | None) -> Answer:
        asked = message.request
        try:
            if asked.request_id in self._live.get(client, {}):
                raise DuplicateRequest(
                    f"request {asked.request_id} is still live: cancel it or choose another ID"
                )
            request = self._request(client, asked, now, prompt)
            self._admit(request)
        except RequestError as error:
            self._counters[f"rejected.{error.code}"] += 1
            return Rejected(
                submission=message.submission,
                request_id=RequestId(asked.request_id[:MAX_ID_BYTES]),  # it is remembered
                code=error.code,
                error=str(error),
            )
        self._counters["accepted"] += 1
        self._live.setdefault(client, {})[asked.request_id] = request
        self._deadlines.add(request)
        return Accepted(submission=message.submission)

    def _request(
        self, client: bytes, asked: GenerateRequest, now: Now, prompt: Prompt | None
    ) -> Request:
        id_bytes = len(asked.request_id.encode())
        if id_bytes > MAX_ID_BYTES:
            raise InvalidRequest(
                f"request_id has {id_bytes} bytes; at most {MAX_ID_BYTES} are taken"
            )
        if asked.deadline_s is not None and not asked.deadline_s > 0:
            raise InvalidRequest(f"deadline_s is {asked.deadline_s}; it must be above 0")
        prompt = read_prompt(asked, self._tokenizer) if prompt is None else prompt
        if isinstance(prompt, RequestError):
            raise prompt
        timeline = Timeline()
        timeline.mark("received", now.wall_s)
        seed = asked.sampling.seed
        return Request(
            client=client,
            asked=asked,
            prompt=prompt,
            seed=self._draw_seed() if seed is None else seed,
            received_s=now.mono_s,
            deadline_s=now.mono_s + (asked.deadline_s or self._default_deadline_s),
            text=self._output_text(asked),
            timeline=timeline,
            number=next(self._numbers),
        )

    def _output_text(self, asked: GenerateRequest) -> OutputText | None:
        return OutputText(self._tokenizer.decoder(), asked.stop) if self._tokenizer else None

    def deliver(self, request: Request, row: OutputRow, now: Now) -> None:
        """Give out what is new in the row, and end the request if the row says so."""
        skip = request.delivered - row.start_index
        tokens = row.token_ids[skip:]
        if request.phase is RequestPhase.ENDED or (not tokens and row.finish_reason is None):
            return
        piece = Piece("", len(tokens), False)
        if request.text is not None:
            piece = request.text.push(tokens)
        stop = skip + piece.taken
        tokens, depths = row.token_ids[skip:stop], row.exit_depths[skip:stop]
        start = request.delivered
        if tokens:
            self._note(request, tokens, depths, now)
        text, reason = piece.text, row.finish_reason
        if reason is not None and request.text is not None:
            text += request.text.finish()
        if request.text is not None and request.text.stopped:
            reason = FinishReason.STOP
        delta = Delta(
            request_id=request.asked.request_id,
            start_index=start,
            token_ids=tokens,
            exit_depths=depths,
            logprobs=row.logprobs[skip:stop],
            text=text,
        )
        self._counters["output_tokens"] += len(tokens)
        if reason is None:
            self._emit(Deliver(request.client, delta))
        else:
            request.timeline.mark("last_token", now.wall_s)
            # A worker that does not know that its output is over has to be told.
            request.complete = row.finish_reason is not None and stop == len(row.token_ids)
            self._end(request, delta, reason)

    def _note(
        self, request: Request, tokens: tuple[int, ...], depths: tuple[int, ...], now: Now
    ) -> None:
        self._observer.output(request, depths, now)
        if request.first_output_s is None:
            request.first_output_s = now.mono_s
            request.timeline.mark("first_token", now.wall_s)
        request.last_output_s = now.mono_s
        request.tokens += tokens
        request.exit_depths += depths
        request.failures = request.refusals = 0

    def fail(self, request: Request, code: str, error: str) -> None:
        self._end(request, self._empty(request), FinishReason.ERROR, code, error)

    def cancel(self, request: Request, *, silent: bool = False) -> None:
        self._end(request, self._empty(request), FinishReason.CANCELLED, silent=silent)

    def _empty(self, request: Request) -> Delta:
        return Delta(request_id=request.asked.request_id, start_index=request.delivered)

    def _end(
        self,
        request: Request,
        last: Delta,
        reason: FinishReason,
        code: str | None = None,
        error: str | None = None,
        silent: bool = False,
    ) -> None:
        if request.phase is RequestPhase.ENDED:
            return
        request.move(RequestPhase.ENDED)
        request.finish_reason, request.error_code = reason, code
        self._deadlines.forget(request)
        name, count = request.asked.request_id, request.delivered
        logger.debug("request %s ended after %d tokens: %s", name, count, code or reason.value)
        self._counters[f"failed.{code}" if code is not None else f"ended.{reason.value}"] += 1
        live = self._live[request.client]
        del live[request.asked.request_id]
        if not live:
            del self._live[request.client]
        if not silent:
            tail = request.text.finish() if request.text is not None else ""
            last = msgspec.structs.replace(
                last,
                text=last.text + tail,
                finish_reason=reason,
                error_code=code,
                error=error,
                num_prompt_tokens=len(request.prompt),
                timeline=request.timeline.stamps(),
            )
            self._emit(Deliver(request.client, last))
        self._on_end(request)

    def forget_client(self, client: bytes) -> None:
        """The connection is gone; its requests end unheard."""
        for request in self.of_client(client):
            self.cancel(request, silent=True)
        self._answers.pop(client, None)

    def find(self, client: bytes, request_id: RequestId) -> Request | None:
        return self._live.get(client, {}).get(request_id)

    def of_client(self, client: bytes) -> tuple[Request, ...]:
        return tuple(self._live.get(client, {}).values())

    def live(self) -> tuple[Request, ...]:
        return tuple(r for requests in self._live.values() for r in requests.values())

    def clients_with_requests(self) -> tuple[bytes, ...]:
        return tuple(self._live)

    def expired(self, mono_s: float) -> list[Request]:
        return self._deadlines.expired(mono_s)
