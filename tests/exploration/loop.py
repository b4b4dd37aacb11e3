"""An event loop and ZeroMQ channels without sockets: a worker's engine runs on them step by step.

Owns the callbacks and timers of one worker process, and what it has sent. Time stands still until
advance(). The product's engines find this loop as the running one and notice no difference.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlt.connector.channel import SendResult
from rlt.connector.messages import Message

EVERYWHERE = ("rlt.connector.link", "rlt.prefill.pairs", "rlt.decode.pairs")


class Handle:
    def __init__(self, when: float, serial: int, callback: Callable[..., None], args: Any) -> None:
        self.when = when
        self.serial = serial
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def run(self) -> None:
        if not self.cancelled:
            self.callback(*self.args)


class Result:
    """A future that nobody waits for: it is looked at."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, value: Any) -> None:
        self.value, self._done = value, True

    def set_exception(self, error: BaseException) -> None:
        self.error, self._done = error, True


class Loop:
    def __init__(self, name: str) -> None:
        self.name = name
        self.now_s = 1000.0
        self.sent: list[tuple[str, Message]] = []
        self.dealers: dict[str, Dealer] = {}  # by what they dialled
        self.router: Router | None = None
        self._soon: list[Handle] = []
        self._timers: list[Handle] = []
        self._serial = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., None], *args: Any) -> Handle:
        handle = Handle(self.now_s, next(self._serial), callback, args)
        self._soon.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Handle:
        handle = Handle(self.now_s + delay_s, next(self._serial), callback, args)
        self._timers.append(handle)
        return handle

    def create_future(self) -> Result:
        return Result()

    def settle(self) -> None:
        """Run what is to run soon, until nothing is."""
        while self._soon:
            soon, self._soon = self._soon, []
            for handle in soon:
                handle.run()
        self._timers = [handle for handle in self._timers if not handle.cancelled]

    def advance(self, seconds: float) -> None:
        """Let time pass; each timer that is due by then runs once."""
        self.now_s += seconds
        due = sorted(
            (handle for handle in self._timers if handle.when <= self.now_s),
            key=lambda handle: (handle.when, handle.serial),
        )
        self._timers = [handle for handle in self._timers if handle.when > self.now_s]
        for handle in due:
            handle.run()
        self.settle()

    def hear(self, source: str, message: Any) -> None:
        """A message has come from the coordinator ("C") or a peer."""
        if self.router is not None and source != "C":
            self.router.on_message(source.encode(), message)
        elif (dealer := self.dealers.get(source)) is not None:
            dealer.on_message(message)
        self.settle()


@contextmanager
def running(loop: Loop) -> Iterator[None]:
    asyncio._set_running_loop(loop)  # type: ignore[arg-type]
    try:
        yield
    finally:
        asyncio._set_running_loop(None)


def _loop() -> Loop:
    loop: Any = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    return loop


class Dealer:
    """Stands for DealerChannel. An endpoint is the name of who listens there."""

    def __init__(
        self, incoming: Any, on_message: Callable[[Any], None], *, identity: bytes, **more: Any
    ) -> None:
        self._loop = _loop()
        self.on_message = on_message
        self.malformed = 0
        self._endpoint = ""

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._loop.dealers[endpoint] = self

    def send(self, message: Any) -> SendResult:
        self._loop.sent.append((self._endpoint, message))
        return SendResult.SENT

    def close(self) -> None:
        self._loop.dealers.pop(self._endpoint, None)


class Router:
    """Stands for RouterChannel."""

    def __init__(
        self, incoming: Any, on_message: Callable[[bytes, Any], None], **more: Any
    ) -> None:
        self._loop = _loop()
        self.on_message = on_message
        self.malformed = 0

    def bind(self, endpoint: str) -> str:
        self._loop.router = self
        return self._loop.name

    def send(self, peer: bytes, message: Any) -> SendResult:
        self._loop.sent.append((peer.decode(), message))
        return SendResult.SENT

    def close(self) -> None:
        self._loop.router = None


@contextmanager
def channels_without_sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in EVERYWHERE:
            patch.setattr(f"{module}.DealerChannel", Dealer, raising=False)
            patch.setattr(f"{module}.RouterChannel", Router, raising=False)
        yield
