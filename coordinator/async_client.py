"""The client library for asyncio. One AsyncClient is one connection, on one loop.

Leaving a stream early cancels its request. Imports pyzmq, msgspec and the standard library.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Literal, Self, Unpack, overload

from ..connector.messages import DrainAnswer
from ..runtime.errors import ServiceUnreachable
from ..runtime.interfaces import Delta, GenerateRequest
from ..runtime.types import RequestId
from .asking import Collector, GenerateOptions, Prompt, Result, make_request, raise_if_failed
from .client_link import ServiceLink
from .discovery import discover

DEFAULT_TIMEOUT_S = 10.0


class AsyncClient:
    """Use it as `async with AsyncClient() as client`, or await connect() and close().

    endpoint: None takes $RLT_CONNECT, else the one service running on this machine. timeout_s: how
    long the service may take to answer a question; output has the request's deadline_s.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.endpoint = endpoint or discover()
        self._timeout_s = timeout_s
        self._link: ServiceLink | None = None

    async def connect(self) -> None:
        """Raises ServiceUnreachable if nobody answers."""
        if self._link is None:
            link = ServiceLink(self.endpoint, self._timeout_s)
            try:
                await link.open()
            except BaseException:
                link.close()
                raise
            self._link = link

    async def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...
    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "AsyncDeltaStream": ...
    async def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "Result | AsyncDeltaStream":
        """A Result, or with stream=True its deltas one by one. timeout_s bounds the whole: then
        TimeoutError is raised and the request cancelled."""
        deltas = AsyncDeltaStream(self.link, make_request(prompt, options), timeout_s)
        await deltas.start()
        if stream:
            return deltas
        collector = Collector()
        async with deltas:
            async for delta in deltas:
                collector.add(delta)
        return collector.result()

    async def cancel(self, request_id: str, submission: int | None = None) -> None:
        """Returns once no more output of this request can come. With a submission, an ID that is
        another's by now is left alone."""
        await self.link.cancel(RequestId(request_id), submission)

    async def stats(self) -> dict[str, object]:
        return await self.link.statistics()

    async def drain(self, worker: str, restart: bool = False) -> DrainAnswer:
        """Give this worker nothing new and end it when it is done. Returns when that has begun."""
        return await self.link.drain(worker, restart=restart)

    def active(self) -> tuple[RequestId, ...]:
        return self.link.active()

    @property
    def link(self) -> ServiceLink:
        link = self._link  # once: the loop's thread may close meanwhile
        if link is None:
            raise ServiceUnreachable("this client is not connected: use `async with` or connect()")
        return link


class AsyncDeltaStream(AsyncIterator[Delta]):
    """The deltas of one request. Leave it by `async with`, aclose() or to its end."""

    def __init__(
        self, link: ServiceLink, request: GenerateRequest, timeout_s: float | None
    ) -> None:
        self._ended = True  # until it is submitted: before, there is nothing to cancel
        self._submission = 0
        self.request_id = request.request_id
        self._link = link
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._end_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()

    async def start(self) -> None:
        async with asyncio.timeout_at(self._end_s):
            self._submission = await self._link.submit(self._request, self._deltas.put_nowait)
            self._ended = False

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._end_s):
                delta = await self._deltas.get()
        except BaseException:
            self._leave()
            raise
        self._ended = delta.finish_reason is not None
        raise_if_failed(delta)
        return delta

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            await self._link.cancel(self.request_id, self._submission)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._link.cancel_soon(self.request_id, self._submission)

    def __del__(self) -> None:
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the connection
                cancel = self._link.cancel_soon
                self._loop.call_soon_threadsafe(cancel, self.request_id, self._submission)
