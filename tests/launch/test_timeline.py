"""The drawings of a request's timeline."""

from rlt.launch.answer import depth_line
from rlt.launch.timeline import WIDTH, draw_events, draw_handoff
from rlt.runtime.types import Stamp

STAMPS = (
    Stamp("received", 10.000),
    Stamp("reserved", 10.001, "d"),
    Stamp("prefill_started", 10.002, "p"),
    Stamp("computed", 10.004, "p", 0),
    Stamp("posted", 10.004, "p", 0, 2048),
    Stamp("arrived", 10.006, "d", 0),
    Stamp("computed", 10.008, "p", 1),
    Stamp("posted", 10.008, "p", 1, 2048),
    Stamp("hidden_posted", 10.009, "p", None, 512),
    Stamp("arrived", 10.010, "d", 1),
    Stamp("hidden_arrived", 10.010, "d"),
    Stamp("received", 10.010, "d"),
    Stamp("first_token", 10.012),
)


def test_events_come_in_time_order_with_their_place_and_size() -> None:
    lines = draw_events(STAMPS[::-1])
    assert lines[1] == "     0.00  coordinator  received"
    assert "     4.00  p            posted depth 0 2.0 KiB" in lines
    assert len(lines) == len(STAMPS) + 1


def test_a_depth_is_on_its_way_while_the_next_is_computed() -> None:
    rows = {line.split("|")[0].strip(): line.split("|")[1] for line in draw_handoff(STAMPS)[1:-1]}
    assert list(rows) == ["depth 0", "depth 1", "hidden"]
    assert all(len(row) == WIDTH for row in rows.values())
    assert rows["depth 0"].index("#") < rows["depth 1"].rindex("=")
    assert rows["depth 1"].endswith("#") and rows["depth 0"].startswith("=")


def test_milestones_take_the_workers_received_not_the_coordinators() -> None:
    last = draw_handoff(STAMPS)[-1]
    assert "received 10.0" in last and "first token 12.0" in last


def test_a_timeline_without_stamps_is_said() -> None:
    assert draw_handoff(()) == ["(no timeline)"]


def test_the_mean_depth_leaves_the_first_token_out() -> None:
    assert depth_line([4, 2, 3]) == "exit depths: 4 2 3, mean 2.50 after the first"
    assert depth_line([4]) == "exit depths: 4"
