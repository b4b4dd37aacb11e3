"""One moment of the explored world, unpacked: who is in which state, and what is on its way.

Owns nothing for long: it is read from a state's numbers and packed into numbers again. Looks;
what may happen is told by choices.py, and happening.py makes it happen.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from .bounds import Bounds
from .cells import Cells, Numbers
from .records import Look
from .wire import Posted

State = tuple[int, int, int, int, int]  # numbers of: processes, lines, wire, budget, put off
Event = tuple[Any, ...]

# What is known of a WRITE that the world still has to do with.
FLYING = "flying"  # posted
LANDED = "landed"  # it is in and notified; its handle is still open
GIVEN_UP = "given up"  # its handle has ended, and the bytes are still on their way
ORPHANED = "orphaned"  # the same, but they may also come without a notification, or never

GONE = ("dead", "reaped", "none")  # of a process's status; else it is up, or stopped


class Tables(msgspec.Struct):
    """What the numbers of a state stand for."""

    procs: Numbers
    lines: Numbers
    wires: Numbers
    budgets: Numbers
    put_off: Numbers


class Moment:
    def __init__(
        self,
        bounds: Bounds,
        cells: Cells,
        tables: Tables,
        procs: dict[str, tuple[int, str]],
        lines: dict[tuple[str, str], list[int]],
        wire: dict[tuple[str, int], tuple[str, int, Any]],
        budget: list[int],
        put_off: list[Event],
    ) -> None:
        self.bounds = bounds
        self.cells = cells
        self._tables = tables
        self.procs = procs  # name -> its cell, its status
        self.lines = lines  # (from, to) -> numbers of messages
        self.wire = wire  # (writer, ticket) -> what is known, which WRITE, its content once taken
        self.budget = budget  # of each kind of fault; delays, faults together, rounds
        self.put_off = put_off

    @staticmethod
    def read(bounds: Bounds, cells: Cells, tables: Tables, state: State) -> "Moment":
        procs, lines, wire, budget, put_off = state
        return Moment(
            bounds,
            cells,
            tables,
            dict(zip(bounds.names, tables.procs.values[procs], strict=True)),
            {(source, to): list(ms) for source, to, ms in tables.lines.values[lines]},
            dict(tables.wires.values[wire]),
            list(tables.budgets.values[budget]),
            list(tables.put_off.values[put_off]),
        )

    def close(self) -> State:
        tables = self._tables
        lines = tuple(sorted((a, b, tuple(ms)) for (a, b), ms in self.lines.items() if ms))
        wire = tuple(sorted(self.wire.items(), key=lambda item: item[0]))
        return (
            tables.procs(tuple(self.procs.values())),
            tables.lines(lines),
            tables.wires(wire),
            tables.budgets(tuple(self.budget)),
            tables.put_off(tuple(sorted(self.put_off))),
        )

    def status(self, name: str) -> str:
        return self.procs[name][1]

    def cell(self, name: str) -> int:
        return self.procs[name][0]

    def look(self, name: str) -> Look:
        return self.cells.look(self.procs[name][0])

    def process(self, name: str) -> Any:
        return self.cells.process(self.procs[name][0])

    def write(self, key: tuple[str, int]) -> Posted:
        write: Posted = self.cells.writes.values[self.wire[key][1]]
        return write

    def workers(self) -> Iterator[str]:
        return (name for name in self.bounds.names[2:] if self.status(name) != "none")

    def hears(self, name: str) -> bool:
        return name == "S" or self.status(name) == "up"

    def is_member(self, name: str) -> bool:
        """Whether the coordinator counts this worker as one of its own."""
        return self.process("C").state._registry.get(name) is not None

    def spare(self, name: str) -> str | None:
        """The incarnation that is started after this one, unless another of that worker runs."""
        worker = name.partition(".")[0]
        family = [n for n in self.bounds.names if n.partition(".")[0] == worker]
        if any(self.status(incarnation) not in ("reaped", "none") for incarnation in family):
            return None
        return next((n for n in family if self.status(n) == "none"), None)

    def over(self) -> bool:
        """Every request was asked for and has ended, and nothing is held or on its way."""
        return (
            self.process("K").next == len(self.bounds.requests)
            and all(known == ORPHANED for known, _, _ in self.wire.values())
            and not self.unended()
        )

    def unended(self) -> list[str]:
        """Who still holds something."""
        names = ("C", "K", *self.workers())
        return [n for n in names if self.status(n) not in GONE and not self._at_rest(n)]

    def _at_rest(self, name: str) -> bool:
        """It holds nothing, but for what a writer that was not reaped could still write."""
        look = self.look(name)
        return look.clean and all(self.status(feared) != "reaped" for feared in look.feared)
