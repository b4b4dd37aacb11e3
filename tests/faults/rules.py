"""Which messages a relay treats how: one rule at a time, or a seeded schedule for all of them.

Pure: looks at decoded frames, moves none. A schedule's word on a message depends on its seed, the
message's kind and direction, and how many of those came before: not on when it came.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Action = Literal["drop", "hold", "copy", "delay", "swap", "spoil"]
To = Literal["coordinator", "worker", "decode", "prefill"]


@dataclass(frozen=True)
class Letter:
    """One frame on its way. route: the connection and direction on which it keeps its place."""

    frame: bytes
    route: tuple[int, To, bytes]
    kind: str
    generations: frozenset[int]

    @property
    def to(self) -> To:
        return self.route[1]

    @property
    def peer(self) -> str:
        """The identity of whoever dialled: a worker's or a supervisor's."""
        return self.route[2].decode(errors="replace")


@dataclass(eq=False)
class Rule:
    """What happens to messages that it matches; None matches all.

    peer: how the dialling worker's incarnation begins. skip: so many pass first. count: so many are
    treated, then no more. hold keeps them until the relay is told to release; delay_s keeps their
    order on the connection; swap lets one overtake it; copy sends it `copies` times more; spoil
    sends first what `bad` gives.
    """

    action: Action
    kind: str | None = None
    to: To | None = None
    peer: str | None = None
    generation: int | None = None
    skip: int = 0
    count: int | None = None
    delay_s: float = 0.0
    copies: int = 1
    bad: Callable[[Letter], list[bytes]] | None = None
    matched: int = 0
    kept: deque[Letter] = field(default_factory=deque)
    seen: threading.Event = field(default_factory=threading.Event)

    def takes(self, letter: Letter) -> bool:
        if not self._matches(letter):
            return False
        self.matched += 1
        taken = self.matched > self.skip and (
            self.count is None or self.matched <= self.skip + self.count
        )
        if taken:
            self.seen.set()
        return taken

    def wait(self, timeout_s: float = 20.0) -> None:
        assert self.seen.wait(timeout_s), f"no message came that {self} is for"

    def _matches(self, letter: Letter) -> bool:
        return (
            self.kind in (None, letter.kind)
            and self.to in (None, letter.to)
            and (self.peer is None or letter.peer.startswith(self.peer))
            and (self.generation is None or self.generation in letter.generations)
        )

    def __str__(self) -> str:
        said = {
            name: value
            for name in ("kind", "to", "peer", "generation", "skip", "count", "delay_s", "copies")
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default
        }
        return f"{self.action}({', '.join(f'{name}={value!r}' for name, value in said.items())})"


@dataclass
class Schedule:
    """Rates per message, from 0 to 1. drop and swap break what ZeroMQ promises of one connection,
    so they are for the kinds named alone; copies and delays are for all."""

    seed: int
    copy: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.05
    drop: float = 0.0
    swap: float = 0.0
    lossy: frozenset[str] = frozenset()
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def rule(self, letter: Letter) -> Rule | None:
        """What happens to this one."""
        key = (letter.to, letter.kind)
        self.seen[key] += 1
        draw = random.Random(f"{self.seed} {letter.to} {letter.kind} {self.seen[key]}")
        if letter.kind in self.lossy:
            if draw.random() < self.drop:
                return Rule("drop")
            if draw.random() < self.swap:
                return Rule("swap")
        if draw.random() < self.delay:
            return Rule("delay", delay_s=draw.uniform(0.0, self.delay_s))
        return Rule("copy") if draw.random() < self.copy else None

    def __str__(self) -> str:
        rates = ("seed", "copy", "delay", "delay_s", "drop", "swap")
        told = ", ".join(f"{name}={getattr(self, name)}" for name in rates)
        return f"Schedule({told}, lossy={sorted(self.lossy)})"


def letter(frame: bytes, route: tuple[int, To, bytes]) -> Letter:
    """A frame that is no message has kind ''."""
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        message = None
    if not isinstance(message, dict):
        return Letter(frame, route, "", frozenset())
    return Letter(frame, route, str(message.get("type", "")), frozenset(_generations(message)))


def _generations(message: dict[str, Any]) -> Iterator[int]:
    if isinstance(generation := message.get("generation"), int):
        yield generation
    for row in message.get("rows") or ():
        found = row.get("generation") if isinstance(row, dict) else row[0]
        if isinstance(found, int):
            yield found
