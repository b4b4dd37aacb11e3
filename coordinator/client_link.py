"""One connection to the service on an asyncio loop: the protocol core joined to a ZeroMQ socket.

Owns the socket, the futures of open asks and the watch over the service's silence. Lives on one
loop and is touched on it alone.
"""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, assert_never

from ..connector.channel import DealerChannel, SendResult
from ..connector.messages import (
    CancelRequest,
    ClientToCoordinator,
    CoordinatorToClient,
    Hello,
    ServiceInfo,
)
from ..runtime.errors import Overloaded, RltError, ServiceUnreachable
from ..runtime.interfaces import Delta, GenerateRequest
from ..runtime.types import RequestId
from .client_protocol import (
    CancelAnswered,
    ClientCore,
    Event,
    Heard,
    Refused,
    Taken,
    Told,
    Welcomed,
)

SILENCE_S = 10.0  # the service sends Alive every second while anything is open
WATCH_S = 0.5

T = TypeVar("T")
Sink = Callable[[Delta], None]


class ServiceLink:
    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._core = ClientCore()
        self._sinks: dict[RequestId, Sink] = {}
        self._welcome: asyncio.Future[ServiceInfo] = self._loop.create_future()
        self._taken: dict[RequestId, asyncio.Future[None]] = {}
        self._cancelled: dict[RequestId, asyncio.Future[None]] = {}
        self._told: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._channel: DealerChannel[CoordinatorToClient, ClientToCoordinator] = DealerChannel(
            CoordinatorToClient, self._hear, identity=f"client-{uuid.uuid4().hex}".encode()
        )

    async def open(self) -> ServiceInfo:
        """Say hello. Raises ServiceUnreachable if nobody answers in time."""
        self._channel.connect(self._endpoint)
        self._send(Hello())
        return await self._answer(self._welcome, "hello")

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Returns once the service has accepted; every delta goes to `sink`, in order."""
        generate = self._core.submit(request)
        name = request.request_id
        taken: asyncio.Future[None] = self._loop.create_future()
        self._taken[name], self._sinks[name] = taken, sink
        try:
            self._send(generate)
            self._watch_silence()
            await self._answer(taken, "the request")
        except BaseException:  # also when the caller was cancelled: nobody wants it any more
            self._sinks.pop(name, None)
            self.cancel_soon(name)
            raise
        finally:
            self._taken.pop(name, None)

    async def cancel(self, request_id: RequestId) -> None:
        """Returns once no more output can come. Unknown IDs are nothing to do."""
        self.cancel_soon(request_id)
        done = self._cancelled.get(request_id)
        if done is not None:
            await self._answer(done, "the cancel")

    def cancel_soon(self, request_id: RequestId) -> None:
        message = self._core.cancel(request_id)
        if message is not None:
            self._cancelled[request_id] = self._loop.create_future()
            self._send(message)
            self._watch_silence()

    async def statistics(self) -> dict[str, object]:
        ask = self._core.ask_statistics()
        told: asyncio.Future[dict[str, object]] = self._loop.create_future()
        self._told[ask.ask] = told
        try:
            self._send(ask)
            return await self._answer(told, "statistics")
        finally:
            del self._told[ask.ask]

    def active(self) -> tuple[RequestId, ...]:
        return self._core.active()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._handle(self._core.lose_service("the client was closed"))
        self._channel.close()

    def _send(self, message: ClientToCoordinator) -> None:
        if self._channel.send(message) is not SendResult.SENT:
            raise Overloaded(f"too much is waiting to be sent to {self._endpoint}")

    async def _answer(self, future: asyncio.Future[T], what: str) -> T:
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError:
            raise ServiceUnreachable(
                f"{self._endpoint} has not answered {what} within {self._timeout_s:g} s: "
                "is rlt-coordinator running there?"
            ) from None

    def _watch_silence(self) -> None:
        if self._watch is None:
            self._heard_s = self._loop.time()
            self._watch = self._loop.call_later(WATCH_S, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self._core.waiting:
            return
        silent_s = self._loop.time() - self._heard_s
        if silent_s > SILENCE_S:
            lost = self._core.active()
            reason = f"nothing was heard from {self._endpoint} for {silent_s:.0f} s"
            self._handle(self._core.lose_service(reason))
            for name in lost:  # should it live after all, it need not go on with them
                self._channel.send(CancelRequest(request_id=name))
        else:
            self._watch = self._loop.call_later(WATCH_S, self._look)

    def _hear(self, message: CoordinatorToClient) -> None:
        self._heard_s = self._loop.time()
        try:
            events = self._core.receive(message)
        except RltError as error:
            if not self._welcome.done():
                self._welcome.set_exception(error)
            events = self._core.lose_service(str(error))
        self._handle(events)

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Welcomed(info=info):
                    _settle(self._welcome, info)
                case Taken(request_id=name):
                    _settle(self._taken.get(name), None)
                case Refused(request_id=name, error=error):
                    self._sinks.pop(name, None)
                    future = self._taken.get(name)
                    if future is not None and not future.done():
                        future.set_exception(error)
                case Heard(delta=delta):
                    self._deliver(delta)
                case CancelAnswered(request_id=name):
                    self._sinks.pop(name, None)
                    _settle(self._cancelled.pop(name, None), None)
                case Told(ask=ask, statistics=statistics):
                    _settle(self._told.get(ask), statistics)
                case _:
                    assert_never(event)

    def _deliver(self, delta: Delta) -> None:
        sink = self._sinks.get(delta.request_id)
        if delta.finish_reason is not None:
            self._sinks.pop(delta.request_id, None)
        if sink is not None:
            sink(delta)


def _settle(future: "asyncio.Future[Any] | None", value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)
