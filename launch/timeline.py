"""Draws one request's timeline as text: every event in order, or the handoff alone. Pure."""

from collections.abc import Sequence

from ..runtime.types import Stamp

WIDTH = 48
MILESTONES = (
    "reserved",
    "prefill_started",
    "compute_end",
    "received",
    "activated",
    "first_token",
    "last_token",
)


def draw_events(stamps: Sequence[Stamp]) -> list[str]:
    """One line per event, in time order."""
    events = sorted(stamps, key=lambda stamp: stamp.at_s)
    lines = [f"{'ms':>9}  {'where':<12} event"]
    for event in events:
        at_ms = (event.at_s - events[0].at_s) * 1000
        lines.append(f"{at_ms:9.2f}  {event.worker or 'coordinator':<12} {_name(event)}")
    return lines


def draw_handoff(stamps: Sequence[Stamp]) -> list[str]:
    """A row per depth: when its loop was computed (=), and when its KV was on its way (#)."""
    if not stamps:
        return ["(no timeline)"]
    begin_s = _first(stamps, "prefill_started") or min(stamp.at_s for stamp in stamps)
    end_s = max(stamp.at_s for stamp in stamps if stamp.event in (*_MOVES, "computed"))
    scale = _Scale(begin_s, max(end_s, begin_s + 1e-9))
    rows = []
    computed_s = begin_s
    for depth in sorted({s.depth for s in stamps if s.event == "computed" and s.depth is not None}):
        plane = [stamp for stamp in stamps if stamp.depth == depth]
        started_s, computed_s = computed_s, _last(plane, "computed") or computed_s
        bars = [(started_s, computed_s, "="), (*_transit(plane, "posted", "arrived"), "#")]
        rows.append(f"  depth {depth:<3} |{scale.draw(bars)}| {_kib(plane, 'posted')}")
    bars = [(*_transit(stamps, "hidden_posted", "hidden_arrived"), "#")]
    rows.append(f"  hidden    |{scale.draw(bars)}| {_kib(stamps, 'hidden_posted')}")
    span_ms = (scale.end_s - scale.begin_s) * 1000
    head = f"handoff: = computed at P, # on its way to D; the whole width is {span_ms:.1f} ms"
    return [head, *rows, f"  {_milestones(stamps)}"]


_MOVES = ("posted", "arrived", "hidden_posted", "hidden_arrived")


class _Scale:
    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s

    def draw(self, bars: Sequence[tuple[float, float, str]]) -> str:
        row = [" "] * WIDTH
        for start_s, stop_s, sign in bars:
            start, stop = self._column(start_s), self._column(stop_s)
            row[start : stop + 1] = sign * (stop + 1 - start)
        return "".join(row)

    def _column(self, at_s: float) -> int:
        share = (at_s - self.begin_s) / (self.end_s - self.begin_s)
        return round(min(1.0, max(0.0, share)) * (WIDTH - 1))


def _transit(stamps: Sequence[Stamp], posted: str, arrived: str) -> tuple[float, float]:
    start_s, stop_s = _first(stamps, posted), _last(stamps, arrived)
    begin_s = stamps[0].at_s if start_s is None else start_s
    return begin_s, begin_s if stop_s is None else max(stop_s, begin_s)


def _first(stamps: Sequence[Stamp], event: str) -> float | None:
    return min((stamp.at_s for stamp in stamps if stamp.event == event), default=None)


def _last(stamps: Sequence[Stamp], event: str) -> float | None:
    return max((stamp.at_s for stamp in stamps if stamp.event == event), default=None)


def _kib(stamps: Sequence[Stamp], event: str) -> str:
    return f"{sum(s.num_bytes or 0 for s in stamps if s.event == event) / 1024:.1f} KiB"


def _milestones(stamps: Sequence[Stamp]) -> str:
    begin_s = min(stamp.at_s for stamp in stamps)
    # The coordinator's own "received" is the request's; a worker's is that of its KV.
    later = [s for s in stamps if s.worker or s.event in ("first_token", "last_token")]
    known = [(name, _first(later, name)) for name in MILESTONES]
    told = [f"{n.replace('_', ' ')} {(at - begin_s) * 1000:.1f}" for n, at in known if at]
    return "ms after the request came: " + ", ".join(told)


def _name(stamp: Stamp) -> str:
    name = stamp.event.replace("_", " ")
    if stamp.depth is not None:
        name += f" depth {stamp.depth}"
    if stamp.num_bytes:
        name += f" {stamp.num_bytes / 1024:.1f} KiB"
    return name
