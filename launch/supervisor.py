"""Starts a main child and its workers, starts again who fails, and ends them all in order.

Owns in which phase of its life the whole is. Never talks to a worker and never loads a model. When
run() returns, every child has ended and been reaped.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, assert_never

from ..connector.config import EXIT_RESTART
from ..connector.messages import WorkerExited
from .children import ChildSpec
from .console import Console
from .crew import Crew, Ended
from .loop import Loop, Readable
from .restart import FAILED, EndedForGood, GivenUp, StartAgain
from .signals import SignalPipe
from .silence import ENDLESS, Patience, Silence
from .supervisor_link import SUPERVISE_S, SupervisorLink

KILLED_BY_SECOND_SIGNAL = 130


class Phase(Enum):
    STARTING = "starting"  # whoever ends now ends the start
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


class ReadySignal(Readable, Protocol):
    """Readable when the service may have become ready; check() tells whether it has."""

    def check(self) -> bool: ...


class Supervisor:
    """The main child's end for good is the end of the whole. ready: on_ready is called when it says
    so, once; without it there is no start that could fail as a whole. coordinator: where it listens
    for workers and supervisors. patience: with a main child that is that coordinator; it is killed
    when it does not answer. main_again: what a later start of the main child is, given the names of
    the workers that have ended for good.
    """

    def __init__(
        self,
        main: ChildSpec,
        workers: Sequence[ChildSpec],
        *,
        console: Console,
        coordinator: str | None = None,
        patience: Patience = ENDLESS,
        ready: ReadySignal | None = None,
        on_ready: Callable[[], None] = lambda: None,
        main_again: Callable[[frozenset[str]], ChildSpec] | None = None,
        grace: Grace = Grace(),
    ) -> None:
        self._main = main
        self._specs = {spec.name: spec for spec in (main, *workers)}
        self._main_again = main_again
        self._coordinator = coordinator
        self._silence = Silence(patience)
        self._ready = ready
        self._console = console
        self._on_ready = on_ready
        self._grace = grace
        self._phase = Phase.SERVING if ready is None else Phase.STARTING
        self._code = 0
        self._ended_for_good: set[str] = set()
        self._loop = Loop()
        self._crew = Crew(self._loop, console, self._take_end)
        self._link: SupervisorLink | None = None

    def run(self) -> int:
        """The exit code for the whole."""
        with ExitStack() as stack:
            stack.callback(self._console.close)
            stack.callback(self._loop.close)
            signals = stack.enter_context(SignalPipe())
            self._loop.watch(signals, lambda: self._take_signals(signals))
            if self._ready is not None:
                ready = self._ready
                self._loop.watch(ready, lambda: self._check_ready(ready))
            stack.callback(self._crew.end_all)
            if self._coordinator is not None:
                self._link = self._connect(self._coordinator)
                stack.callback(self._link.close)
                self._mind_silence()
            for spec in self._specs.values():
                self._crew.start(spec)
            while self._crew.busy:
                self._loop.turn()
        return self._code

    def _connect(self, coordinator: str) -> SupervisorLink:
        return SupervisorLink(
            coordinator,
            self._loop,
            children=self._crew.workers,
            expel=self._crew.expel,
            answered=self._silence.answered,
        )

    def _mind_silence(self) -> None:
        """Once the service is ready; before, whoever starts it sees what is missing."""
        main = self._crew.get(self._main.name)
        if main is not None and self._phase is not Phase.STARTING:
            if self._silence.beat(main.pid, SUPERVISE_S):
                self._console.say(f"killing {main.name}: it does not answer")
                main.kill()
        self._loop.after("silence", SUPERVISE_S, self._mind_silence)

    def _take_end(self, ended: Ended) -> None:
        if self._link is not None and ended.incarnation:
            self._link.exited(
                WorkerExited(
                    worker=ended.name,
                    incarnation=ended.incarnation,
                    pid=ended.pid,
                    status=ended.status,
                )
            )
        match self._phase:
            case Phase.STARTING if ended.status != 0 or not self._is_main(ended):
                self._fail(ended, _code_of_failed_start(ended.status))
            case Phase.STARTING:
                self._leave(ended)
            case Phase.SERVING:
                self._go_on(ended)
            case Phase.DRAINING if self._is_main(ended):
                self._leave(ended)
            case Phase.DRAINING | Phase.LEAVING | Phase.TERMINATING | Phase.KILLING:
                self._console.say(f"{ended.name} stopped ({_words(ended.status)})")
            case _:
                assert_never(self._phase)

    def _go_on(self, ended: Ended) -> None:
        """While serving: what becomes of one that has ended, and of the others."""
        match ended.fate:
            case StartAgain(after_s=after_s):
                self._console.say(
                    f"{ended.name} (process {ended.pid}) {_words(ended.status)}; the others go on, "
                    f"and it is started again{f' in {after_s:g} s' if after_s else ''}"
                )
                self._crew.start_after(after_s, lambda: self._again(ended.name), ended.name)
            case EndedForGood() if self._is_main(ended):
                self._leave(ended)
            case EndedForGood():
                self._ended_for_good.add(ended.name)
                self._console.say(f"{ended.name} stopped (exit code 0) and stays down")
            case GivenUp(code=code, why=why):
                self._console.say(f"{ended.name}: {why}")
                self._fail(ended, code)
            case _:
                assert_never(ended.fate)

    def _again(self, name: str) -> ChildSpec:
        if name == self._main.name and self._main_again is not None:
            return self._main_again(frozenset(self._ended_for_good))
        return self._specs[name]

    def _is_main(self, ended: Ended) -> bool:
        return ended.name == self._main.name

    def _leave(self, main: Ended) -> None:
        self._code = 0 if main.status in (0, EXIT_RESTART) else FAILED
        self._console.say(f"{main.name} stopped ({_words(main.status)})")
        self._enter(Phase.LEAVING, self._grace.leaving_s)

    def _fail(self, ended: Ended, code: int) -> None:
        self._code = code
        others = "; stopping everything" if self._crew.living() else ""
        self._console.say(f"{ended.name} {_words(ended.status)}{others}")
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
        if ready.check():
            self._loop.unwatch(ready)
            if self._phase is Phase.STARTING:
                self._phase = Phase.SERVING
                self._on_ready()

    def _drain(self) -> None:
        main = self._crew.get(self._main.name)
        if main is None:  # it is about to be started again: nobody is there to ask the others
            self._terminate()
            return
        self._console.say("finishing what runs; another signal ends it at once")
        self._enter(Phase.DRAINING, self._grace.draining_s)
        main.terminate()

    def _escalate(self) -> None:
        if self._phase is Phase.TERMINATING:
            self._kill()
        else:
            self._terminate()

    def _terminate(self) -> None:
        self._enter(Phase.TERMINATING, self._grace.terminating_s)
        self._crew.terminate()

    def _kill(self) -> None:
        self._enter(Phase.KILLING, None)
        self._crew.kill()

    def _enter(self, phase: Phase, bound_s: float | None) -> None:
        """None of these phases starts anyone."""
        self._phase = phase
        self._crew.start_nobody()
        self._loop.cancel("escalate")
        if bound_s is not None:
            self._loop.after("escalate", bound_s, self._escalate)


def _code_of_failed_start(status: int) -> int:
    """A child's own code, where it says more than that it ended."""
    return status if status > 0 and status != EXIT_RESTART else FAILED


def _words(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
