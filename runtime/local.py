"""A whole engine in this process: prefill and decode on one EngineCore, no coordinator.

Owns the engine's thread, the generations that it numbers, and which request ID each one serves.
The core is touched on that thread alone: callers leave commands and wake it, and so does the
executor. A request ID is free again as soon as its last delta is out.
"""

import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from .clock import SystemClock
from .config import EngineConfig
from .engine_core import EngineCore
from .errors import (
    DeadlineExceeded,
    DuplicateRequest,
    RequestError,
    RltError,
    WorkerError,
    error_from,
)
from .events import EngineEvent, RequestFailed, TokensProduced
from .interfaces import Clock, Delta, Executor, GenerateRequest
from .local_stream import Deliver, LocalStream
from .prompt import Tokenizer, prompt_token_ids
from .types import EngineRequest, FinishReason, Generation, RequestId, Stamp, TokenLogprobs
from .validate import resolve_request

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All of one request's output. error_code and error are set where finish_reason is ERROR."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    error_code: str | None
    error: str | None
    timeline: tuple[Stamp, ...]


class LocalEngine:
    """The Frontend without a service. Every method may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        executor: Executor | None = None,
        clock: Clock | None = None,
        max_waiting: int = 1024,
    ) -> None:
        """executor: None loads config.model."""
        self._clock = clock or SystemClock()
        self._tokenizer = tokenizer
        self._executor = executor or _load(config, self._clock)
        capabilities, limits = self._executor.capabilities(), self._executor.admission_limits()
        geometry = capabilities.geometry
        self._model = capabilities.model
        self._pool_tokens = limits.num_blocks // geometry.num_depths * geometry.block_size
        self._core = EngineCore(
            self._executor,
            chunk_tokens=config.chunk_tokens,
            clock=self._clock,
            max_waiting=max_waiting,
        )
        self._lock = threading.Lock()  # guards the five below
        self._streams: dict[Generation, LocalStream] = {}
        self._generations: dict[RequestId, Generation] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._last_generation = 0
        self._closed: str | None = None  # why nothing is accepted any more
        self._deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._executor.set_event_sink(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="rlt-engine")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    # What a user calls.

    def submit(self, request: GenerateRequest) -> None:
        self._submit(request, self._deltas.put)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Result]:
        """Run them together and wait for all. Results come in the order of the requests."""
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        collected: dict[RequestId, list[Delta]] = {}
        try:
            for request in requests:
                self._submit(request, deltas.put)
                collected[request.request_id] = []
        except RltError:
            for request_id in collected:
                self.cancel(request_id)
            raise
        unfinished = len(collected)
        while unfinished:
            delta = deltas.get()
            collected[delta.request_id].append(delta)
            unfinished -= delta.finish_reason is not None
        return [_joined(collected[request.request_id]) for request in requests]

    def cancel(self, request_id: RequestId) -> None:
        """Its last delta says CANCELLED; unknown IDs are nothing to do."""
        with self._lock:
            generation = self._generations.get(request_id)
            if generation is None:
                return
            self._close_stream(generation).cancel()
            self._commands.append(lambda: self._drop(generation))
        self._wake.set()

    def active(self) -> tuple[RequestId, ...]:
        with self._lock:
            return tuple(self._generations)

    def outputs(self, timeout_s: float | None = None) -> list[Delta]:
        """Empty when time is up or the engine was shut down."""
        try:
            found = [self._deltas.get(timeout=timeout_s)]
            while not self._deltas.empty():
                found.append(self._deltas.get_nowait())
        except queue.Empty:
            return []
        if found[-1] is None:
            self._deltas.put(None)  # the engine is shut down: whoever asks next hears it too
        return [delta for delta in found if delta is not None]

    def statistics(self) -> dict[str, object]:
        return dict(self._ask(self._core.statistics))

    def check(self) -> None:
        """Raises InvariantBroken if the engine's books do not add up."""
        self._ask(self._core.check)

    def shutdown(self) -> None:
        """Cancel what lives, end the thread, close the executor. Idempotent."""
        self._close("the engine was shut down")
        self._thread.join()
        self._core.shutdown()

    # On the caller's thread.

    def _submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        prompt = prompt_token_ids(request, self._tokenizer)
        resolved = resolve_request(
            request,
            prompt,
            generation=Generation(0),
            seed=secrets.randbits(63),
            model=self._model,
            pool_tokens=self._pool_tokens,
        )
        deadline_s = request.deadline_s
        stream = LocalStream(
            request.request_id,
            num_prompt_tokens=len(resolved.prompt),
            deadline_at_s=None if deadline_s is None else self._clock.now_s() + deadline_s,
            decoder=self._tokenizer.decoder() if self._tokenizer else None,
            clock=self._clock,
            deliver=deliver,
        )
        self._enqueue(stream, resolved)

    def _enqueue(self, stream: LocalStream, resolved: EngineRequest) -> None:
        with self._lock:
            if self._closed is not None:
                raise WorkerError(f"{self._closed}; start a new one")
            if stream.request_id in self._generations:
                raise DuplicateRequest(
                    f"request {stream.request_id!r} is live; cancel it or choose another ID"
                )
            self._last_generation += 1
            generation = Generation(self._last_generation)
            numbered = msgspec.structs.replace(resolved, generation=generation)
            self._streams[generation] = stream
            self._generations[stream.request_id] = generation
            self._commands.append(lambda: self._add(numbered))
        self._wake.set()

    def _ask(self, question: Callable[[], T]) -> T:
        """Run on the engine's thread, where the core may be read."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            closed = self._closed is not None
            if not closed:
                self._commands.append(run)
        if closed:
            self._thread.join()
            return question()  # the thread has ended: nobody else touches the core
        self._wake.set()
        return answer.result()

    def _close(self, reason: str, error: RltError | None = None) -> None:
        """Accept nothing more and end every stream. The first reason stands."""
        with self._lock:
            if self._closed is None:
                self._closed = reason
                for generation in list(self._streams):
                    stream = self._close_stream(generation)
                    if error is None:
                        stream.cancel()
                    else:
                        stream.fail(error)
                self._deltas.put(None)
        self._wake.set()

    def _close_stream(self, generation: Generation) -> LocalStream:
        stream = self._streams.pop(generation)
        del self._generations[stream.request_id]
        return stream

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while self._closed is None:
                self._wake.wait(self._time_to_next_deadline_s())
                self._wake.clear()
                self._run_commands()
                self._expire()
                self._deliver(self._core.step())
        except Exception as error:
            logger.exception("the local engine's thread failed")
            message = f"the engine failed: {type(error).__name__}: {error}"
            self._close(message, WorkerError(message))
        self._run_commands()

    def _run_commands(self) -> None:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_local(request)
        except RequestError as error:
            self._fail(request.generation, error)

    def _drop(self, generation: Generation) -> None:
        self._core.cancel(generation)

    def _fail(self, generation: Generation, error: RltError) -> None:
        with self._lock:
            if generation in self._streams:
                self._close_stream(generation).fail(error)

    def _deliver(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, RequestFailed):
                self._fail(event.generation, error_from(event.code, event.message))
            elif isinstance(event, TokensProduced):
                self._deliver_tokens(event)

    def _deliver_tokens(self, event: TokensProduced) -> None:
        with self._lock:
            if (stream := self._streams.get(event.generation)) is not None:
                if event.finish_reason is not None:
                    self._close_stream(event.generation)
                stream.on_tokens(event)

    def _time_to_next_deadline_s(self) -> float | None:
        with self._lock:
            deadlines = [
                stream.deadline_at_s
                for stream in self._streams.values()
                if stream.deadline_at_s is not None
            ]
        return max(0.0, min(deadlines) - self._clock.now_s()) if deadlines else None

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            late = [
                generation
                for generation, stream in self._streams.items()
                if stream.deadline_at_s is not None and stream.deadline_at_s <= now_s
            ]
        for generation in late:
            self._fail(generation, DeadlineExceeded("the request's deadline has passed"))
            self._drop(generation)


def _load(config: EngineConfig, clock: Clock) -> Executor:
    from .executor import build_executor  # loads torch: only where a model is wanted

    return build_executor(config, clock)


def _joined(deltas: list[Delta]) -> Result:
    last = deltas[-1]
    assert last.finish_reason is not None and last.num_prompt_tokens is not None
    return Result(
        request_id=last.request_id,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        exit_depths=tuple(depth for delta in deltas for depth in delta.exit_depths),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        error_code=last.error_code,
        error=last.error,
        timeline=last.timeline,
    )
