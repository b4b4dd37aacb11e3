"""Looks at every history within the bounds, breadth first, and at how each of them would end.

A fault found is told with the shortest list of events that leads to it.
"""

import time
from collections import deque

import msgspec

from .world import Event, Faulty, State, World

LONGEST_ENDING = 1000  # events; whoever needs more runs in circles


class Found(msgspec.Struct, frozen=True):
    """trace: the events that lead to the fault. ending: and then, nothing more going wrong."""

    fault: str
    trace: tuple[Event, ...]
    ending: tuple[Event, ...] = ()


class Explored(msgspec.Struct, frozen=True):
    """seconds: of processor time."""

    states: int
    transitions: int
    process_states: int
    process_steps: int
    seconds: float
    complete: bool
    found: Found | None

    def line(self) -> str:
        end = "complete" if self.complete else "as far as time allowed"
        return (
            f"{self.states:,} states, {self.transitions:,} transitions, {self.process_steps:,} "
            f"steps of the product's processes, {self.seconds:.1f} s, {end}"
        )


class Search:
    def __init__(self, world: World) -> None:
        self._world = world
        self._from: dict[State, tuple[State, Event] | None] = {}
        self._ends_well: set[State] = set()
        self._transitions = 0

    def run(self, *, max_states: int = 10_000_000, max_s: float = 1e9) -> Explored:
        begun_s = time.process_time()
        start = self._world.start
        self._from[start] = None
        found = self._ending(start)
        queue = deque([start])
        while queue and found is None:
            if len(self._from) > max_states or time.process_time() - begun_s > max_s:
                break
            found = self._expand(queue.popleft(), queue)
        return Explored(
            len(self._from),
            self._transitions,
            len(self._world.cells),
            self._world.cells.steps,
            time.process_time() - begun_s,
            not queue and found is None,
            found,
        )

    def _expand(self, state: State, queue: deque[State]) -> Found | None:
        for event in self._world.events(state):
            self._transitions += 1
            try:
                after = self._world.after(state, event)
            except Faulty as fault:
                return Found(str(fault), (*self.trace(state), event))
            if after in self._from:
                continue
            self._from[after] = (state, event)
            if (found := self._ending(after)) is not None:
                return found
            queue.append(after)
        return None

    def trace(self, state: State) -> tuple[Event, ...]:
        events: list[Event] = []
        while (step := self._from[state]) is not None:
            state, event = step
            events.append(event)
        return tuple(reversed(events))

    def _ending(self, state: State) -> Found | None:
        """From here on nothing goes wrong and everything is delivered: all must come to an end."""
        path: list[State] = []
        events: list[Event] = []
        on_path: set[State] = set()
        at = self._world.without_budget(state)
        while at not in self._ends_well:
            if at in on_path or len(path) > LONGEST_ENDING:
                return Found(self._world.unended(at), self.trace(state), tuple(events))
            path.append(at)
            on_path.add(at)
            try:
                event = self._world.orderly_event(at)
                if event is None:
                    break
                events.append(event)
                at = self._world.without_budget(self._world.after(at, event))
            except Faulty as fault:
                return Found(str(fault), self.trace(state), tuple(events))
        self._ends_well.update(path)
        return None
