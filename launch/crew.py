"""The supervisor's children: started, started again later, heard, and reaped when they have ended.

Owns who lives and who is to be started when. Never decides that a child must end or start again.
A child counts as living until it is reaped: then nothing of it is left, neither process nor pipe.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..connector.messages import Supervised
from .children import Child, ChildSpec
from .console import Console
from .loop import Loop
from .restart import FAILED, Fate, Restarts


@dataclass(frozen=True)
class Ended:
    """status: an exit code, or minus the signal. fate: what its policy says, if it matters."""

    name: str
    incarnation: str
    pid: int
    status: int
    fate: Fate


class Crew:
    def __init__(self, loop: Loop, console: Console, on_end: Callable[[Ended], None]) -> None:
        self._loop = loop
        self._console = console
        self._on_end = on_end
        self._living: dict[str, Child] = {}
        self._restarts: dict[str, Restarts] = {}
        self._awaited: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether anyone lives or is to be started."""
        return bool(self._living or self._awaited)

    def get(self, name: str) -> Child | None:
        return self._living.get(name)

    def living(self) -> tuple[Child, ...]:
        return tuple(self._living.values())

    def workers(self) -> tuple[Supervised, ...]:
        return tuple(
            Supervised(worker=child.name, incarnation=child.incarnation, pid=child.pid)
            for child in self._living.values()
            if child.incarnation
        )

    def start(self, spec: ChildSpec) -> None:
        """Raises OSError if no process can be had."""
        restarts = self._restarts.setdefault(spec.name, Restarts(spec.policy))
        restarts.started(self._loop.now_s())
        child = Child(spec, self._console.child)
        self._living[child.name] = child
        self._loop.watch(child.pidfd, lambda: self._take_exit(child))
        self._loop.watch(child.output_fd, lambda: self._take_output(child))
        self._console.say(f"started {child.name} (process {child.pid})")

    def start_after(self, delay_s: float, make: Callable[[], ChildSpec], name: str) -> None:
        """Start what `make` gives then. A machine that has no process to give is a failed start."""

        def start() -> None:
            self._awaited.discard(name)
            try:
                self.start(make())
            except OSError as error:
                self._console.say(f"cannot start {name}: {error}")
                fate = self._restarts[name].ended(FAILED, self._loop.now_s())
                self._on_end(Ended(name, "", 0, FAILED, fate))

        self._awaited.add(name)
        self._loop.after(f"start {name}", delay_s, start)

    def start_nobody(self) -> None:
        """Whoever is to be started again is not."""
        for name in self._awaited:
            self._loop.cancel(f"start {name}")
        self._awaited.clear()

    def terminate(self) -> None:
        for child in self._living.values():
            child.terminate()

    def kill(self) -> None:
        for child in self._living.values():
            self._console.say(f"killing {child.name}")
            child.kill()

    def expel(self, incarnation: str) -> None:
        """Kill it, if it is one of these. Its end is heard as any other."""
        for child in self._living.values():
            if child.incarnation == incarnation:
                self._console.say(f"killing {child.name}: the coordinator has given it up")
                child.kill()

    def end_all(self) -> None:
        """After an exception: nothing may be left running."""
        for child in self._living.values():
            child.kill()
            os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
            child.reap()

    def _take_output(self, child: Child) -> None:
        if not child.read_output():
            self._loop.unwatch(child.output_fd)

    def _take_exit(self, child: Child) -> None:
        self._loop.unwatch(child.pidfd)
        self._loop.unwatch(child.output_fd)
        del self._living[child.name]
        status = child.reap()
        fate = self._restarts[child.name].ended(status, self._loop.now_s())
        self._on_end(Ended(child.name, child.incarnation, child.pid, status, fate))
