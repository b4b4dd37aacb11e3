"""One connection to the service on an asyncio loop: the protocol core joined to a ZeroMQ socket.

Owns the socket, the futures of open asks and the watch over the service's silence. Every ask is
sent again until it is answered, also to a service that was started again meanwhile. Lives on one
loop and is touched on it alone.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, assert_never

from ..connector.channel import DealerChannel, SendResult
from ..connector.messages import (
    CancelRequest,
    ClientToCoordinator,
    CoordinatorToClient,
    DrainAnswer,
    Hello,
    ServiceInfo,
)
from ..runtime.errors import Overloaded, RltError, ServiceUnreachable
from ..runtime.interfaces import Delta, GenerateRequest
from ..runtime.types import RequestId
from .client_protocol import (
    Abandoned,
    CancelAnswered,
    ClientCore,
    Drained,
    Event,
    Heard,
    Refused,
    Taken,
    Told,
    Welcomed,
)
from .unanswered import Unanswered

SILENCE_S = 10.0  # the service sends Alive every second while anything is open
WATCH_S = 0.5
HELLO_S = 1.0  # an unanswered hello is said again
MOST_ABANDONED = 4096  # without a connection; the service cancels what it had when it closed

T = TypeVar("T")
Sink = Callable[[Delta], None]


class ServiceLink:
    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._core = ClientCore()
        self._sinks: dict[RequestId, Sink] = {}
        self._unanswered = Unanswered()
        self._welcome: asyncio.Future[ServiceInfo] = self._loop.create_future()
        self._taken: dict[RequestId, asyncio.Future[None]] = {}
        self._cancelled: dict[RequestId, asyncio.Future[None]] = {}
        self._told: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._drained: dict[int, asyncio.Future[DrainAnswer]] = {}
        self._connected = False
        self._welcomed = False  # by this connection
        self._hello_s = 0.0  # when it was said last
        self._abandoned: deque[RequestId] = deque(maxlen=MOST_ABANDONED)  # the oldest go
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._channel: DealerChannel[CoordinatorToClient, ClientToCoordinator] = DealerChannel(
            CoordinatorToClient,
            self._hear,
            identity=f"client-{uuid.uuid4().hex}".encode(),
            on_change=self._connection_changed,
        )

    async def open(self) -> ServiceInfo:
        """Say hello. Raises ServiceUnreachable if nobody answers in time."""
        self._channel.connect(self._endpoint)
        return await self._answer(self._welcome, "hello")

    async def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """Returns the submission, for cancel(), once the service has accepted; every delta goes to
        `sink`, in order."""
        generate = self._core.submit(request)
        name = request.request_id
        taken: asyncio.Future[None] = self._loop.create_future()
        self._taken[name], self._sinks[name] = taken, sink
        try:
            self._ask(("generate", name), generate)
            await self._answer(taken, "the request")
        except BaseException:  # also when the caller was cancelled: nobody wants it any more
            if self._core.is_live(name, generate.submission):
                self._sinks.pop(name, None)
                self.cancel_soon(name, generate.submission)
            raise
        finally:
            if self._taken.get(name) is taken:  # not that of who has used a refused ID again
                del self._taken[name]
        return generate.submission

    async def cancel(self, request_id: RequestId, submission: int | None = None) -> None:
        """Returns once no more output can come. Unknown IDs are nothing to do, and so is an ID
        that is no longer this submission's."""
        self.cancel_soon(request_id, submission)
        done = self._cancelled.get(request_id)
        if done is not None and self._core.is_live(request_id, submission):
            await self._answer(done, "the cancel")

    def cancel_soon(self, request_id: RequestId, submission: int | None = None) -> None:
        message = self._core.cancel(request_id, submission)
        if message is not None:
            self._cancelled[request_id] = self._loop.create_future()
            self._ask(("cancel", request_id), message)

    async def statistics(self) -> dict[str, object]:
        ask = self._core.ask_statistics()
        told: asyncio.Future[dict[str, object]] = self._loop.create_future()
        self._told[ask.ask] = told
        try:
            self._ask(("statistics", ask.ask), ask)
            return await self._answer(told, "statistics")
        finally:
            del self._told[ask.ask]
            self._unanswered.answered(("statistics", ask.ask))

    async def drain(self, worker: str, *, restart: bool = False) -> DrainAnswer:
        """The answer comes when the drain has begun; it says why if it has not."""
        ask = self._core.ask_drain(worker, restart=restart)
        drained: asyncio.Future[DrainAnswer] = self._loop.create_future()
        self._drained[ask.ask] = drained
        try:
            self._ask(("drain", ask.ask), ask)
            return await self._answer(drained, f"the drain of {worker}")
        finally:
            del self._drained[ask.ask]
            self._unanswered.answered(("drain", ask.ask))

    def active(self) -> tuple[RequestId, ...]:
        return self._core.active()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._handle(self._core.lose_service("the client was closed"))
        self._channel.close()

    # Out

    def _ask(self, key: Hashable, message: ClientToCoordinator) -> None:
        """Sent at once if the service is there, and again until it is answered."""
        self._look_later()
        full = self._welcomed and self._channel.send(message) is not SendResult.SENT
        if full and not isinstance(message, CancelRequest):
            raise Overloaded(f"too much is waiting to be sent to {self._endpoint}")
        self._unanswered.add(key, message, self._loop.time())

    async def _answer(self, future: asyncio.Future[T], what: str) -> T:
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError:
            raise ServiceUnreachable(
                f"{self._endpoint} has not answered {what} within {self._timeout_s:g} s: "
                "is rlt-coordinator running there?"
            ) from None

    def _say_hello(self) -> None:
        self._hello_s = self._loop.time()
        self._channel.send(Hello())
        self._look_later()

    def _cancel_abandoned(self) -> None:
        if self._welcomed:
            while self._abandoned:
                self._channel.send(CancelRequest(request_id=self._abandoned.popleft()))

    # Time

    def _look_later(self) -> None:
        if self._timer is None:
            self._heard_s = self._loop.time()
            self._timer = self._loop.call_later(WATCH_S, self._look)

    def _look(self) -> None:
        """While anything is open: repeat what is due, and notice silence."""
        self._timer = None
        now_s = self._loop.time()
        hello_is_open = self._connected and not self._welcomed
        if not (self._core.waiting or len(self._unanswered) or hello_is_open):
            return
        self._timer = self._loop.call_later(WATCH_S, self._look)
        if hello_is_open and now_s - self._hello_s >= HELLO_S:
            self._say_hello()
        if self._welcomed:
            for message in self._unanswered.due(now_s):
                self._channel.send(message)
        silent_s = now_s - self._heard_s
        if self._core.waiting and silent_s > SILENCE_S:
            self._give_up(f"nothing was heard from {self._endpoint} for {silent_s:.0f} s")

    def _give_up(self, reason: str) -> None:
        self._abandoned += self._core.active()
        self._handle(self._core.lose_service(reason))
        self._cancel_abandoned()  # should it live after all, it need not go on with them

    # In

    def _connection_changed(self, up: bool) -> None:
        self._connected = up
        if up:
            self._say_hello()
        elif self._welcomed:
            self._welcomed = False
            self._handle(self._core.connection_lost())

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
                    if not self._welcomed:
                        self._welcomed = True
                        self._cancel_abandoned()
                        for message in self._unanswered.all():
                            self._channel.send(message)
                case Taken(request_id=name):
                    self._unanswered.answered(("generate", name))
                    _settle(self._taken.get(name), None)
                case Refused(request_id=name, error=error):
                    self._unanswered.answered(("generate", name))
                    self._sinks.pop(name, None)
                    future = self._taken.get(name)
                    if future is not None and not future.done():
                        future.set_exception(error)
                case Heard(delta=delta):
                    self._deliver(delta)
                case CancelAnswered(request_id=name):
                    self._unanswered.answered(("generate", name))  # nobody wants it any more
                    self._unanswered.answered(("cancel", name))
                    self._sinks.pop(name, None)
                    _settle(self._cancelled.pop(name, None), None)
                case Told(ask=ask, statistics=statistics):
                    _settle(self._told.get(ask), statistics)
                case Drained(answer=answer):
                    _settle(self._drained.get(answer.ask), answer)
                case Abandoned(request_id=name):
                    self._abandoned.append(name)
                    self._cancel_abandoned()
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
