"""Starts a main child and its workers, hears of their ends and of signals, and ends them in order.

Owns which children live and in which phase of its life the whole is. Never talks to a worker and
never loads a model. When run() returns, every child has ended and been reaped.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .children import Child, ChildSpec
from .console import Console
from .signals import SignalPipe

KILLED_BY_SECOND_SIGNAL = 130
FAILED = 1


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # the main child was asked to stop, and asks the others
    LEAVING = "leaving"  # the main child has ended; the others get time to end by themselves
    TERMINATING = "terminating"  # everyone got SIGTERM
    KILLING = "killing"  # everyone got SIGKILL


@dataclass(frozen=True, kw_only=True)
class Grace:
    """Seconds until the next harder means. draining None: the main child bounds its own drain."""

    draining_s: float | None = None
    leaving_s: float = 10.0
    terminating_s: float = 5.0


class Readable(Protocol):
    def fileno(self) -> int: ...


class ReadySignal(Readable, Protocol):
    """Readable when the service may have become ready; check() tells whether it has."""

    def check(self) -> bool: ...


class Supervisor:
    """The main child's end is the end of the whole. on_ready is called once; without `ready` it
    never is. on_lost is called when a worker ends while the others go on, with its name, process ID
    and status.
    """

    def __init__(
        self,
        main: ChildSpec,
        workers: Sequence[ChildSpec],
        *,
        console: Console,
        ready: ReadySignal | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_lost: Callable[[str, int, int], None] = lambda *_: None,
        grace: Grace = Grace(),
    ) -> None:
        self._specs = [main, *workers]
        self._main = main.name
        self._ready = ready
        self._console = console
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._grace = grace
        self._phase = Phase.STARTING
        self._deadline_s: float | None = None
        self._code = 0
        self._children: dict[str, Child] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """The exit code for the whole."""
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            self._watch(stack.enter_context(SignalPipe()), self._take_signals)
            if self._ready is not None:
                self._watch(self._ready, self._check_ready)
            stack.callback(self._end_all)
            for spec in self._specs:
                self._start(spec)
            while self._children:
                self._turn()
        return self._code

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            key.data(key.fileobj)
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self._escalate()

    def _timeout_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _watch(self, source: Readable | int, act: Callable[..., None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _start(self, spec: ChildSpec) -> None:
        child = Child(spec, self._console.child)
        self._children[child.name] = child
        self._watch(child.pidfd, lambda _: self._take_exit(child))
        self._watch(child.output_fd, lambda _: self._take_output(child))
        self._console.say(f"started {child.name} (process {child.pid})")

    def _take_output(self, child: Child) -> None:
        if child.name in self._children and not child.read_output():
            self._selector.unregister(child.output_fd)

    def _take_exit(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        if child.output_fd in self._selector.get_map():
            self._selector.unregister(child.output_fd)
        del self._children[child.name]
        status = child.reap()
        if child.name == self._main:
            self._main_ended(child, status)
        else:
            self._worker_ended(child, status)

    def _main_ended(self, child: Child, status: int) -> None:
        match self._phase:
            case Phase.STARTING | Phase.SERVING if status != 0:
                self._fail(child, status)
            case Phase.STARTING | Phase.SERVING | Phase.DRAINING:
                self._code = FAILED if status else 0
                self._console.say(f"{child.name} stopped ({_words(status)})")
                self._enter(Phase.LEAVING, self._grace.leaving_s)
            case Phase.LEAVING | Phase.TERMINATING | Phase.KILLING:
                self._console.say(f"{child.name} stopped ({_words(status)})")

    def _worker_ended(self, child: Child, status: int) -> None:
        match self._phase:
            case Phase.STARTING:
                self._fail(child, status)
            case Phase.SERVING:
                self._console.say(
                    f"{child.name} (process {child.pid}) {_words(status)}; the others go on"
                )
                self._on_lost(child.name, child.pid, status)
            case Phase.DRAINING | Phase.LEAVING | Phase.TERMINATING | Phase.KILLING:
                self._console.say(f"{child.name} stopped ({_words(status)})")

    def _fail(self, child: Child, status: int) -> None:
        self._code = status if status > 0 else FAILED
        if self._children:
            self._console.say(f"{child.name} {_words(status)}; stopping everything")
        else:
            self._console.say(f"{child.name} {_words(status)}")
        self._terminate()

    def _take_signals(self, pipe: SignalPipe) -> None:
        for number in pipe.read():
            self._console.say(f"got {signal.Signals(number).name}")
            if self._phase is Phase.STARTING:
                self._terminate()
            elif self._phase is Phase.SERVING:
                self._drain()
            else:
                self._code = KILLED_BY_SECOND_SIGNAL
                self._kill()

    def _check_ready(self, ready: ReadySignal) -> None:
        if ready.check() and self._phase is Phase.STARTING:
            self._selector.unregister(ready)
            self._phase = Phase.SERVING
            self._on_ready()

    def _drain(self) -> None:
        self._console.say("finishing what runs; another signal ends it at once")
        self._enter(Phase.DRAINING, self._grace.draining_s)
        self._children[self._main].terminate()

    def _escalate(self) -> None:
        if self._phase is Phase.TERMINATING:
            self._kill()
        else:
            self._terminate()

    def _terminate(self) -> None:
        self._enter(Phase.TERMINATING, self._grace.terminating_s)
        for child in self._children.values():
            child.terminate()

    def _kill(self) -> None:
        self._enter(Phase.KILLING, None)
        for child in self._children.values():
            self._console.say(f"killing {child.name}")
            child.kill()

    def _enter(self, phase: Phase, bound_s: float | None) -> None:
        self._phase = phase
        self._deadline_s = None if bound_s is None else time.monotonic() + bound_s

    def _end_all(self) -> None:
        """Only after an exception: nothing may be left running."""
        for child in self._children.values():
            child.kill()
            os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
            child.reap()


def _words(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
