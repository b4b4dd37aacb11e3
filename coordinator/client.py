"""The client library: `Client` for ordinary code, `AsyncClient` for asyncio.

Both are one connection to one service and may carry many requests at once. Leaving a stream early
cancels its request. Imports pyzmq, msgspec and the standard library, nothing else.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from ..connector.messages import DrainAnswer
from ..runtime.errors import ServiceUnreachable
from ..runtime.interfaces import Delta, GenerateRequest
from ..runtime.types import RequestId
from .asking import Collector, GenerateOptions, Prompt, Result, make_request, raise_if_failed
from .async_client import DEFAULT_TIMEOUT_S, AsyncClient
from .client_link import Sink
from .discovery import discover

__all__ = ["AsyncClient", "Client", "DeltaStream", "Result"]

T = TypeVar("T")


class DeltaStream(Iterator[Delta]):
    """The deltas of one request. Closing it early, or dropping it, cancels the request."""

    def __init__(self, client: "Client", request: GenerateRequest, timeout_s: float | None) -> None:
        self.request_id = request.request_id
        self._ended = True
        self._client = client
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._submission = client.submit_to(request, self._deltas.put)
        self._ended = False

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        left_s = None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
        try:
            delta = self._deltas.get(timeout=left_s)
        except queue.Empty:
            self.close()
            raise TimeoutError(f"request {self.request_id} was not done in time") from None
        self._ended = delta.finish_reason is not None
        raise_if_failed(delta)
        return delta

    def close(self) -> None:
        """Returns once no more output can come."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ServiceUnreachable):  # then nothing comes either
                self._client.cancel(self.request_id, self._submission)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended:
            self._client.cancel_soon(self.request_id, self._submission)


class Client:
    """May be used from several threads. The connection lives on a thread of its own.

    Also a Frontend: submit() and outputs() for callers that serve many requests in one place.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.endpoint = endpoint or discover()
        self._outputs: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may end a stream while it is held
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rlt-client", daemon=True)
        self._thread.start()
        self._async = AsyncClient(self.endpoint, timeout_s=timeout_s)
        try:
            self._call(self._async.connect())
        except BaseException:
            self.close()
            raise

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "DeltaStream": ...
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "Result | DeltaStream":
        """A Result, or with stream=True its deltas one by one. timeout_s bounds the whole: then
        TimeoutError is raised and the request cancelled."""
        deltas = DeltaStream(self, make_request(prompt, options), timeout_s)
        if stream:
            return deltas
        collector = Collector()
        with deltas:
            for delta in deltas:
                collector.add(delta)
        return collector.result()

    def stats(self) -> dict[str, object]:
        return self.statistics()

    def drain(self, worker: str, restart: bool = False) -> DrainAnswer:
        """Give this worker nothing new and end it when it is done; restart: its supervisor starts
        it again. Returns when that has begun, or could not: `error` says why."""
        return self._call(self._async.drain(worker, restart))

    # The Frontend

    def submit(self, request: GenerateRequest) -> None:
        """Returns once the service has accepted the request, or raises why it did not."""
        self.submit_to(request, self._outputs.put)

    def cancel(self, request_id: str, submission: int | None = None) -> None:
        """Returns once no more output of this request can come. With a submission, an ID that is
        another's by now is left alone. Does not wait on the connection's own thread, where a sink
        or the garbage collector may call it."""
        if threading.current_thread() is self._thread:
            self.cancel_soon(request_id, submission)
        else:
            self._call(self._async.cancel(request_id, submission))

    def active(self) -> tuple[RequestId, ...]:
        async def ask() -> tuple[RequestId, ...]:
            return self._async.active()

        return self._call(ask())

    def outputs(self, timeout_s: float | None = None) -> list[Delta]:
        """Deltas of submitted requests; empty when time is up or the client was closed."""
        try:
            found = [self._outputs.get(timeout=timeout_s)]
            while not self._outputs.empty():
                found.append(self._outputs.get_nowait())
        except queue.Empty:
            return []
        if found[-1] is None:
            self._outputs.put(None)  # whoever asks next hears of the end, too
        return [delta for delta in found if delta is not None]

    def statistics(self) -> dict[str, object]:
        return self._call(self._async.stats())

    def shutdown(self) -> None:
        """Close the connection; the service goes on."""
        self.close()

    def submit_to(self, request: GenerateRequest, sink: Sink) -> int:
        """As submit(), with every delta given to `sink`, on the connection's thread. Returns the
        submission, for cancel()."""
        return self._call(self._async.link.submit(request, sink))

    def cancel_soon(self, request_id: str, submission: int | None = None) -> None:
        """Cancel without waiting for the answer. Takes no lock: the garbage collector calls it, at
        any point of any thread, close() included."""
        with contextlib.suppress(ServiceUnreachable, RuntimeError):  # closed: nothing lives
            cancel = self._async.link.cancel_soon
            self._loop.call_soon_threadsafe(cancel, RequestId(request_id), submission)

    def close(self) -> None:
        """Idempotent. Requests that still live are cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._async.close(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._outputs.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            waiting = asyncio.all_tasks(self._loop)
            for task in waiting:
                task.cancel()
            if waiting:
                self._loop.run_until_complete(asyncio.wait(waiting))
        finally:
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._closed:
                work.close()
                raise ServiceUnreachable("this client is closed")
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ServiceUnreachable("this client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise
