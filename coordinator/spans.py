"""What happened from when to when in one request, read from its stamps. Pure.

Within one depth the k-th arrival is that of the k-th post. A span without an end is still going on.
A worker's stamp carries its name; the coordinator's own have none.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ..runtime.types import Stamp

Kind = Literal["computed", "in_flight"]
_POSTED, _ARRIVED = ("posted", "hidden_posted"), ("arrived", "hidden_arrived")
# Each part of a request's life lasts from its event to the next part's.
_PARTS = (
    ("queued", "received", False),
    ("reserving", "admitted", False),
    ("waiting_for_prefill", "reserved", True),
    ("prefill", "prefill_started", True),
    ("last_transfers", "compute_end", True),
    ("waiting_for_slot", "received", True),
    ("decode", "activated", True),
)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One loop over some positions, or their KV on its way. depth: None is the hidden state."""

    kind: Kind
    depth: int | None
    start_s: float
    stop_s: float | None
    num_bytes: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the request's life."""

    name: str
    start_s: float
    stop_s: float | None


def handoff_spans(stamps: Sequence[Stamp]) -> tuple[Span, ...]:
    """Of the last attempt: those before it posted what never arrived."""
    retried_s = max((s.at_s for s in stamps if s.event == "retried"), default=None)
    if retried_s is not None:
        stamps = [stamp for stamp in stamps if stamp.at_s >= retried_s]
    return tuple(sorted([*_computed(stamps), *_in_flight(stamps)], key=lambda s: s.start_s))


def _computed(stamps: Sequence[Stamp]) -> Iterable[Span]:
    """A prefill worker stamps the end of each loop; the loop began when the one before ended."""
    began_s = _first(stamps, "prefill_started", True)
    for stamp in _in_order(stamps, ("computed",)):
        start_s = stamp.at_s if began_s is None else min(began_s, stamp.at_s)
        yield Span(kind="computed", depth=stamp.depth, start_s=start_s, stop_s=stamp.at_s)
        began_s = stamp.at_s


def _in_flight(stamps: Sequence[Stamp]) -> Iterable[Span]:
    posts, arrivals = _in_order(stamps, _POSTED), _in_order(stamps, _ARRIVED)
    for depth in {stamp.depth for stamp in posts}:
        ends = iter([stamp.at_s for stamp in arrivals if stamp.depth == depth])
        for post in posts:
            if post.depth == depth:
                end_s = next(ends, None)
                yield Span(
                    kind="in_flight",
                    depth=depth,
                    start_s=post.at_s,
                    stop_s=None if end_s is None else max(post.at_s, end_s),
                    num_bytes=post.num_bytes or 0,
                )


def request_parts(stamps: Sequence[Stamp]) -> tuple[Part, ...]:
    """From acceptance to the last token. A part that left no stamp belongs to the one before."""
    starts = [(name, _first(stamps, event, worker)) for name, event, worker in _PARTS]
    known = [(name, start_s) for name, start_s in starts if start_s is not None]
    parts = []
    for index, (name, start_s) in enumerate(known):
        last = index == len(known) - 1
        stop_s = _first(stamps, "last_token", False) if last else known[index + 1][1]
        stop_s = None if stop_s is None else max(start_s, stop_s)
        parts.append(Part(name=name, start_s=start_s, stop_s=stop_s))
    return tuple(parts)


def transfer_seconds(stamps: Sequence[Stamp]) -> float | None:
    """From the first post to the moment when D held everything; None if nothing was posted."""
    begin_s = min((stamp.at_s for stamp in _in_order(stamps, _POSTED)), default=None)
    end_s = _first(stamps, "received", True)
    return None if begin_s is None or end_s is None else max(0.0, end_s - begin_s)


def transfer_bytes(stamps: Sequence[Stamp]) -> int:
    return sum(stamp.num_bytes or 0 for stamp in stamps if stamp.event in _POSTED)


def unsent_bytes(stamps: Sequence[Stamp]) -> int | None:
    """What was left to send when the prompt had been computed."""
    return next((s.num_bytes or 0 for s in stamps if s.event == "compute_end"), None)


def _in_order(stamps: Sequence[Stamp], events: Sequence[str]) -> list[Stamp]:
    return sorted((s for s in stamps if s.event in events), key=lambda stamp: stamp.at_s)


def _first(stamps: Sequence[Stamp], event: str, of_worker: bool) -> float | None:
    found = (s.at_s for s in stamps if s.event == event and bool(s.worker) is of_worker)
    return min(found, default=None)
