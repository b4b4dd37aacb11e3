"""A whole engine in this process: prefill and decode on one EngineCore, no coordinator.

Owns the generations that it numbers, and which request ID each one serves. The core is touched on
the engine's thread alone; callers leave commands for it.
A request ID is free again as soon as its last delta is out.
"""

import queue
import secrets
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from .clock import SystemClock
from .config import EngineConfig, SchedulerConfig
from .engine_core import EngineCore
from .engine_thread import EngineThread
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
from .local_result import Result, joined
from .local_stream import Deliver, LocalStream
from .prompt import Tokenizer, prompt_token_ids
from .stop_text import OutputText
from .types import EngineRequest, Generation, RequestId
from .validate import resolve_request


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
        executor = executor or _load(config, self._clock)
        capabilities, limits = executor.capabilities(), executor.admission_limits()
        geometry = capabilities.geometry
        self._model = capabilities.model
        self._pool_tokens = limits.num_blocks // geometry.num_planes * geometry.block_size
        self._core = EngineCore(
            executor,
            SchedulerConfig.from_engine(config, max_waiting=max_waiting),
            clock=self._clock,
        )
        self._lock = threading.Lock()  # guards the four below
        self._streams: dict[Generation, LocalStream] = {}
        self._generations: dict[RequestId, Generation] = {}
        self._last_generation = 0
        self._closed: str | None = None  # why nothing is accepted any more
        self._deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._thread = EngineThread(self._tick, self._on_thread_failure)
        executor.set_event_sink(self._thread.wake)
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
        return [joined(collected[request.request_id]) for request in requests]

    def cancel(self, request_id: RequestId) -> None:
        """Its last delta says CANCELLED. An ID that is not live: nothing to do."""
        with self._lock:
            generation = self._generations.get(request_id)
            if generation is not None:
                self._close_stream(generation).cancel()
                self._thread.post(lambda: self._core.cancel(generation))

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
            self._deltas.put(None)  # whoever asks next hears of the end too
        return [delta for delta in found if delta is not None]

    def statistics(self) -> dict[str, object]:
        return dict(self._thread.ask(self._core.statistics))

    def check(self) -> None:
        """Raises InvariantBroken if the engine's books do not add up."""
        self._thread.ask(self._core.check)

    def shutdown(self) -> None:
        """Cancel what lives, end the thread, then the executor. Idempotent."""
        self._close("the engine was shut down", None)
        self._thread.stop()
        self._core.shutdown()

    # On the caller's thread.

    def _submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        resolved = resolve_request(
            request,
            prompt_token_ids(request, self._tokenizer),
            generation=Generation(0),  # numbered when it is queued
            seed=secrets.randbits(63),
            model=self._model,
            pool_tokens=self._pool_tokens,
        )
        deadline_s = request.deadline_s
        stream = LocalStream(
            request.request_id,
            num_prompt_tokens=len(resolved.prompt),
            deadline_at_s=None if deadline_s is None else self._clock.now_s() + deadline_s,
            text=OutputText(self._tokenizer.decoder(), request.stop) if self._tokenizer else None,
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
            self._thread.post(lambda: self._add(numbered))

    def _close(self, reason: str, error: RltError | None) -> None:
        """Accept nothing more and end every stream. The first reason stands."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            for generation in list(self._streams):
                stream = self._close_stream(generation)
                if error is None:
                    stream.cancel()
                else:
                    stream.fail(error)
            self._deltas.put(None)

    def _close_stream(self, generation: Generation) -> LocalStream:
        stream = self._streams.pop(generation)
        del self._generations[stream.request_id]
        return stream

    # On the engine's thread.

    def _tick(self) -> float | None:
        self._expire(self._clock.now_s())
        for event in self._core.step():
            self._deliver(event)
        with self._lock:
            deadlines = [stream.deadline_at_s for stream in self._streams.values()]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - self._clock.now_s()) if known else None

    def _on_thread_failure(self, error: Exception) -> None:
        message = f"the engine failed: {type(error).__name__}: {error}"
        self._close(message, WorkerError(message))

    def _add(self, request: EngineRequest) -> None:
        with self._lock:
            if request.generation not in self._streams:
                return  # over before it began: its deadline was too near
        try:
            self._core.add_local(request)
        except RequestError as error:
            self._fail(request.generation, error)

    def _fail(self, generation: Generation, error: RltError) -> None:
        with self._lock:
            if generation in self._streams:
                self._close_stream(generation).fail(error)

    def _deliver(self, event: EngineEvent) -> None:
        if isinstance(event, RequestFailed):
            self._fail(event.generation, error_from(event.code, event.message))
        elif isinstance(event, TokensProduced):
            with self._lock:
                stream = self._streams.get(event.generation)
                if stream is not None and stream.on_tokens(event):
                    self._close_stream(event.generation)
                    if event.finish_reason is None:
                        self._core.cancel(event.generation)

    def _expire(self, now_s: float) -> None:
        with self._lock:
            deadlines = [(g, stream.deadline_at_s) for g, stream in self._streams.items()]
        for generation, deadline_s in deadlines:
            if deadline_s is not None and deadline_s <= now_s:
                self._fail(generation, DeadlineExceeded("the request's deadline has passed"))
                self._core.cancel(generation)


def _load(config: EngineConfig, clock: Clock) -> Executor:
    from .executor import build_executor  # loads torch: only where a model is wanted

    return build_executor(config, clock)
