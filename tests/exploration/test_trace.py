"""One history again: RLT_TRACE names it, as a failed exploration printed it."""

from .bounds import BOUNDS
from .search import Found
from .traces import TRACE, read_trace, run_trace, write_trace

CANCEL_WHILE_POSTED = (
    "cancel: submit; deliver C D1.1; deliver D1.1 C; deliver C P1.1; compute P1.1; cancel a"
)


def test_the_history_that_was_named_goes_well() -> None:
    _, bounds, events = read_trace(TRACE or CANCEL_WHILE_POSTED)
    fault = run_trace(bounds, events)
    assert fault is None, fault


def test_a_history_is_read_as_it_was_written() -> None:
    name, bounds, events = read_trace(CANCEL_WHILE_POSTED)
    assert bounds is BOUNDS["cancel"] and events[-1] == ("cancel", "a")
    assert write_trace(name, Found("", events)) == CANCEL_WHILE_POSTED
