"""Histories as text, so that one that was found can be run again alone.

`NAME: EVENT; EVENT; ...`, where NAME is one of the bounds. The processes are driven straight from
their beginning, with no state merged with another, so a fault seen here is none of the search's.
"""

import os

from .bounds import BOUNDS, Bounds
from .cells import Cells
from .search import Found
from .world import Event, Faulty, World

TRACE = os.environ.get("RLT_TRACE")  # tests/exploration/test_trace.py runs this one


def spell(event: Event) -> str:
    return " ".join(str(word) for word in event)


def read(text: str) -> Event:
    return tuple(int(word) if word.isdigit() else word for word in text.split())


def write_trace(name: str, found: Found) -> str:
    return f"{name}: {'; '.join(spell(event) for event in found.trace)}"


def read_trace(text: str) -> tuple[str, Bounds, tuple[Event, ...]]:
    name, _, events = text.partition(":")
    return name, BOUNDS[name], tuple(read(event) for event in events.split(";") if event.strip())


def tell(name: str, found: Found) -> str:
    """For the message of a failed test."""
    lines = [found.fault, "after:", *(f"  {spell(event)}" for event in found.trace)]
    if found.ending:
        lines += ["and then, with nothing more going wrong:"]
        lines += [f"  {spell(event)}" for event in found.ending]
    lines += ["alone: RLT_TRACE='" + write_trace(name, found) + "'"]
    return "\n".join(lines)


def run_trace(bounds: Bounds, events: tuple[Event, ...], longest_ending: int = 1000) -> str | None:
    """The fault that comes of it, or None."""
    world = World(bounds, Cells(merge=False))
    state = world.start
    try:
        for event in events:
            state = world.after(state, event)
        for _ in range(longest_ending):
            next_event = world.orderly_event(state)
            if next_event is None:
                return None
            state = world.after(state, next_event)
    except Faulty as fault:
        return str(fault)
    return world.unended(state)
