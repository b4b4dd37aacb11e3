"""Every state that a process was ever seen in, numbered, and what each event makes of it.

A process is driven once for each (state, event); whoever comes by again is told what came of it.
Owns the process objects. An object that is driven on is a copy: a numbered state never changes.
"""

from typing import Any

import msgspec

from .canonical import Canon
from .cloning import clone
from .records import Broken, Came, Look


class Cell(msgspec.Struct):
    process: Any
    look: Look


class Step(msgspec.Struct, frozen=True, gc=False):
    """fault: what is wrong, or None."""

    cell: int
    sent: tuple[tuple[str, int], ...]  # receiver, number of the message
    posted: tuple[int, ...]
    fault: str | None = None


class Numbers:
    """Values that are often looked up, as small integers."""

    def __init__(self) -> None:
        self._of: dict[Any, int] = {}
        self.values: list[Any] = []

    def __call__(self, value: Any, key: Any = None) -> int:
        """key: stands for a value that cannot be hashed."""
        number = self._of.setdefault(value if key is None else key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Cells:
    """merge False: for one history alone. Every state counts as new, and each process is one object
    that is driven on, so that states that are past are not there any more."""

    def __init__(self, *, merge: bool = True) -> None:
        self._merge = merge
        self._canon = Canon()
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, tuple[Any, ...]], Step] = {}
        self.cells: list[Cell] = []
        self.messages = Numbers()
        self.writes = Numbers()

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def steps(self) -> int:
        return len(self._steps)

    def digest(self, cell: int) -> bytes:
        process = self.cells[cell].process
        return self._canon.digest(process, process.now_s)

    def enter(self, process: Any) -> int:
        digest = self._canon.digest(process, process.now_s)
        if not self._merge:
            digest = len(self.cells).to_bytes(8, "big")
        number = self._numbers.setdefault(digest, len(self.cells))
        if number == len(self.cells):
            self.cells.append(Cell(process, process.look()))
        return number

    def begin(self, process: Any) -> Step:
        return self._step(process, ("begin",))

    def look(self, cell: int) -> Look:
        return self.cells[cell].look

    def process(self, cell: int) -> Any:
        return self.cells[cell].process

    def step(self, cell: int, event: tuple[Any, ...]) -> Step:
        """event: as the process takes it, but for a message, which is given by number."""
        found = self._steps.get((cell, event)) if self._merge else None
        if found is None:
            process = self.cells[cell].process
            process = clone(process) if self._merge else process
            found = self._steps[cell, event] = self._step(process, self._spelled(event))
        return found

    def message(self, message: Any) -> int:
        return self.messages(message, msgspec.msgpack.encode(message))

    def _spelled(self, event: tuple[Any, ...]) -> tuple[Any, ...]:
        if event[0] == "hear":
            return ("hear", event[1], self.messages.values[event[2]])
        return event

    def _step(self, process: Any, event: tuple[Any, ...]) -> Step:
        try:
            came: Came = process.apply(event)
            cell = self.enter(process)
        except Exception as error:
            kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
            return Step(-1, (), (), f"{process.name}: {kind}{error}")
        return Step(
            cell,
            tuple((to, self.message(message)) for to, message in came.sent),
            tuple(self.writes(write) for write in came.posted),
        )
