"""Makes one event happen in a moment: drives the process that it meets, and carries on its words.

Owns the rules of the lines and of the NIXL wire. Messages between client and coordinator are taken
at once; everything else waits for its event.
"""

from typing import Any

from rlt.connector.messages import Expel, Supervise, Supervised, WorkerExited
from rlt.connector.transport import unpack_notice

from .bounds import FAULTS, Bounds
from .cells import Step
from .choices import BUDGET_OF_DELAYS, BUDGET_OF_ROUNDS, BUDGET_TOGETHER
from .client_process import ClientProcess
from .coordinator_process import CoordinatorProcess
from .moment import FLYING, GIVEN_UP, GONE, LANDED, ORPHANED, Event, Moment
from .worker_process import WorkerProcess

PID = 4711  # nobody looks at it


class Faulty(Exception):
    """A property was found broken on the way into a state."""


class Happening:
    def __init__(self, moment: Moment) -> None:
        self._at = moment
        self._cells = moment.cells

    def happen(self, event: Event) -> None:
        kind, moment = event[0], self._at
        if kind == "put_off":
            moment.budget[BUDGET_OF_DELAYS] -= 1
            moment.put_off.append(event[1:])
            return
        if event in moment.put_off:  # nothing else could happen: all of it may now
            moment.put_off.clear()
        if kind in FAULTS and not (kind == "silent" and self._at.status(event[1]) != "up"):
            moment.budget[FAULTS.index(kind)] -= 1
            moment.budget[BUDGET_TOGETHER] -= 1
        match event:
            case ("deliver", source, to):
                self._take(source, to, self._at.lines[source, to].pop(0))
            case ("double", source, to):
                self._take(source, to, self._at.lines[source, to][0])
            case ("lose", source, to):
                self._at.lines[source, to].pop(0)
            case ("swap", source, to):
                line = self._at.lines[source, to]
                line[0], line[1] = line[1], line[0]
            case ("compute" | "late", name):
                self._apply(name, (kind,))
            case ("early", name):
                self._apply(name, ("time",))
            case ("round",):
                moment.budget[BUDGET_OF_ROUNDS] -= 1
                self._round()
            case ("submit",):
                self._apply("K", ("submit",))
            case ("cancel", request):
                self._apply("K", ("cancel", request))
            case ("deadline",):
                self._apply("C", ("deadline",))
            case ("silent", name):
                self._apply("C", ("silent", name))
            case ("kill", name):
                self._set(name, "dead")
            case ("reap", name):
                self._reap(name)
            case ("stop", name):
                self._set(name, "stopped")
            case ("wake", name):
                self._set(name, "up")
            case ("start", name):
                self.create(name)
            case ("land" | "seep", writer, ticket):
                self._land((writer, ticket), notify=kind == "land")
            case ("done" | "break" | "fail", writer, ticket):
                self._end((writer, ticket), kind)
            case _:
                raise AssertionError(event)
        self._forget_what_cannot_land()

    def create(self, name: str) -> None:
        self._came(name, self._cells.begin(make(name, self._at.bounds)))

    def _take(self, source: str, to: str, message: int) -> None:
        if to == "S":
            self._supervise(self._cells.messages.values[message])
        else:
            self._apply(to, ("hear", source, message))

    def _supervise(self, message: Any) -> None:
        """A supervisor kills whom it is told to, stopped or not, and says when it is reaped."""
        assert isinstance(message, Expel)
        if (
            message.incarnation in self._at.bounds.names
            and self._at.status(message.incarnation) != "none"
        ):
            self._reap(message.incarnation)

    def _reap(self, name: str) -> None:
        if self._at.status(name) != "reaped":
            self._set(name, "reaped")
        exited = WorkerExited(worker=name.partition(".")[0], incarnation=name, pid=PID, status=-9)
        self._send("S", "C", self._cells.message(exited))

    def _round(self) -> None:
        """Time passes for everybody."""
        self.say_children(repeats=True)
        for name in ("C", *self._at.workers()):
            if self._at.status(name) == "up":
                self._apply(name, ("time",), repeats=True)

    def say_children(self, *, repeats: bool = False) -> None:
        """The supervisor tells the coordinator which processes it has."""
        children = tuple(
            Supervised(name.partition(".")[0], name, PID)
            for name in self._at.workers()
            if self._at.status(name) != "reaped"
        )
        message = self._cells.message(Supervise(children=children))
        self._send("S", "C", message, repeats=repeats)

    def _apply(self, name: str, event: Event, *, repeats: bool = False) -> None:
        self._came(name, self._cells.step(self._at.cell(name), event), repeats=repeats)

    def _came(self, name: str, step: Step, *, repeats: bool = False) -> None:
        if step.fault is not None:
            raise Faulty(step.fault)
        self._at.procs[name] = (step.cell, "up")
        for number in step.posted:
            key = (name, self._cells.writes.values[number].ticket)
            if key in self._at.wire:
                raise Faulty(f"{name}: a WRITE was posted a second time")
            self._at.wire[key] = (FLYING, number, None)
        for to, message in step.sent:
            self._send(name, to, message, repeats=repeats)
        if self._cells.look(step.cell).exit_code is not None:
            self._set(name, "dead")

    def _send(self, source: str, to: str, message: int, *, repeats: bool = False) -> None:
        """What is only said again is not put behind itself: it could as well have been lost."""
        if to == "K" or source == "K":
            self._apply(to, ("hear", source, message))
            return
        if to != "S" and (to not in self._at.bounds.names or self._at.status(to) in GONE):
            return
        line = self._at.lines.setdefault((source, to), [])
        if not (repeats and message in line):
            line.append(message)

    def _set(self, name: str, status: str) -> None:
        self._at.procs[name] = (self._at.cell(name), status)
        if status not in GONE:
            return
        for source, to in list(self._at.lines):
            if to == name:
                del self._at.lines[source, to]
        for key, (known, number, content) in list(self._at.wire.items()):
            if key[0] != name:
                continue
            if known == LANDED:
                del self._at.wire[key]
            else:
                self._at.wire[key] = (ORPHANED, number, content or self._content(key))

    # The wire

    def _content(self, key: tuple[str, int]) -> Any:
        """What a WRITE carries: its source as it stands now."""
        process = self._at.process(key[0])
        return tuple((theirs, process.content(mine)) for mine, theirs in self._at.write(key).place)

    def _land(self, key: tuple[str, int], *, notify: bool) -> None:
        write, (known, number, content) = self._at.write(key), self._at.wire[key]
        if known == FLYING:
            content = self._content(key)
            self._at.wire[key] = (LANDED, number, None)
        else:
            del self._at.wire[key]
        if not self._at.is_member(write.target) and _is_torn(content, write.notice):
            return  # P owes nothing to one that was expelled, and nobody hears that one any more
        self._apply(write.target, ("land", key[0], content, write.notice, notify))

    def _end(self, key: tuple[str, int], how: str) -> None:
        ticket, (known, number, _) = self._at.write(key).ticket, self._at.wire[key]
        if known == FLYING and how != "break":
            after = GIVEN_UP if how == "done" else ORPHANED
            self._at.wire[key] = (after, number, self._content(key))
        else:
            del self._at.wire[key]
        error = None if how == "done" else "the wire broke"
        self._apply(key[0], ("ended", ticket, error))

    def _forget_what_cannot_land(self) -> None:
        """Nobody is there; or the writer is reaped and the agent that faced it destroyed."""
        for key, (known, _, _) in list(self._at.wire.items()):
            target = self._at.write(key).target
            if known in (GIVEN_UP, ORPHANED) and (
                self._at.status(target) in GONE
                or (
                    self._at.status(key[0]) == "reaped"
                    and key[0] not in self._at.look(target).sources
                )
            ):
                del self._at.wire[key]


def make(name: str, bounds: Bounds) -> Any:
    """C: the coordinator, K: the client, P...: a prefill worker, D...: a decode worker."""
    match name[0]:
        case "C":
            return CoordinatorProcess(bounds)
        case "K":
            return ClientProcess(bounds)
        case role:
            return WorkerProcess("prefill" if role == "P" else "decode", name, bounds)


def _is_torn(content: Any, packed: bytes) -> bool:
    """Its source was given away while the bytes left."""
    notice = unpack_notice(packed)
    assert notice is not None
    return any(
        found is None or found[0] != notice.generation
        for _, stands in content
        for _, found in stands
    )
