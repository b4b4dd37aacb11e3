"""Bars from stamps: which loop computed, which depth was in flight, what a request waited for."""

import pytest

from rlt.coordinator.history import History
from rlt.coordinator.spans import (
    handoff_spans,
    request_parts,
    transfer_bytes,
    transfer_seconds,
    unsent_bytes,
)
from rlt.runtime.types import Stamp

from .world import World

P, D = "p0", "d0"
STAMPS = (
    Stamp("received", 0.0),
    Stamp("admitted", 1.0),
    Stamp("reserved", 2.0, D),
    Stamp("prefill_started", 3.0, P),
    Stamp("computed", 4.0, P, 0),
    Stamp("posted", 4.2, P, 0, 100),
    Stamp("computed", 5.0, P, 1),
    Stamp("compute_end", 5.0, P, None, 200),
    Stamp("arrived", 5.1, D, 0),
    Stamp("posted", 5.2, P, 1, 100),
    Stamp("hidden_posted", 5.3, P, None, 8),
    Stamp("arrived", 5.9, D, 1),
    Stamp("hidden_arrived", 6.0, D),
    Stamp("received", 6.1, D),
    Stamp("activated", 7.0, D),
    Stamp("first_token", 7.5),
    Stamp("last_token", 9.0),
)


def spans(stamps: tuple[Stamp, ...]) -> list[tuple[str, int | None, float, float | None]]:
    return [(s.kind, s.depth, s.start_s, s.stop_s) for s in handoff_spans(stamps)]


def test_each_loop_is_a_span_and_each_transfer_another() -> None:
    assert spans(STAMPS) == [
        ("computed", 0, 3.0, 4.0),
        ("computed", 1, 4.0, 5.0),
        ("in_flight", 0, 4.2, 5.1),
        ("in_flight", 1, 5.2, 5.9),
        ("in_flight", None, 5.3, 6.0),
    ]
    assert transfer_seconds(STAMPS) == pytest.approx(6.1 - 4.2)
    assert (transfer_bytes(STAMPS), unsent_bytes(STAMPS)) == (208, 200)


def test_the_parts_of_a_request_follow_one_another_without_a_gap() -> None:
    parts = request_parts(STAMPS)
    assert [part.name for part in parts] == [
        *("queued", "reserving", "waiting_for_prefill", "prefill", "last_transfers"),
        *("waiting_for_slot", "decode"),
    ]
    assert [part.start_s for part in parts[1:]] == [part.stop_s for part in parts[:-1]]
    assert (parts[0].start_s, parts[-1].stop_s) == (0.0, 9.0)


def test_what_still_goes_on_has_no_end() -> None:
    so_far = tuple(stamp for stamp in STAMPS if stamp.at_s <= 5.25)
    assert spans(so_far)[-1] == ("in_flight", 1, 5.2, None)
    assert transfer_seconds(so_far) is None
    assert request_parts(so_far)[-1].stop_s is None


def test_chunks_of_one_depth_arrive_in_the_order_of_their_posts() -> None:
    stamps = (
        Stamp("posted", 1.0, P, 0, 5),
        Stamp("posted", 2.0, P, 0, 5),
        Stamp("arrived", 2.5, D, 0),
        Stamp("arrived", 3.0, D, 0),
    )
    assert [span[2:] for span in spans(stamps)] == [(1.0, 2.5), (2.0, 3.0)]


def test_clocks_that_disagree_give_no_negative_length() -> None:
    early = tuple(
        Stamp(s.event, s.at_s - 5.0 * (s.worker == D), s.worker, s.depth, s.num_bytes)
        for s in STAMPS
    )
    assert all(s.stop_s is None or s.stop_s >= s.start_s for s in handoff_spans(early))
    assert all(p.stop_s is None or p.stop_s >= p.start_s for p in request_parts(early))
    assert transfer_seconds(early) == 0.0


def test_no_stamps_are_no_spans() -> None:
    assert handoff_spans(()) == () and request_parts(()) == ()
    assert transfer_seconds(()) is None and unsent_bytes(()) is None


def test_history_is_bounded_and_gives_the_newest_first() -> None:
    world, history = World(), History(kept=2)
    for name in "abc":
        world.generate(name)
    for request in world.state._desk.live():
        world.cancel(request.asked.request_id)
        history.add(request, world.now)
    assert [ended.request_id for ended in history.latest()] == ["c", "b"]
    first, *_ = history.latest()
    story = history.story(first.number)
    assert story is not None and story.stamps[0].event == "received"
    assert history.story(1) is None


def test_an_ended_request_takes_in_the_release_that_comes_after_its_end() -> None:
    world = World()
    world.generate("r", max_tokens=2)
    for _ in range(10):
        world.deliver_all()
        world.work()
    world.deliver_all()
    (ended,) = world.state.snapshot(world.now).ended
    story = world.state.story(ended.number)
    assert story is not None
    assert [s.event for s in story.stamps].count("released") == 2
    assert (ended.outcome, ended.outputs, story.exit_depths) == ("length", 2, (4, 2))


def test_bars_are_those_of_the_last_attempt() -> None:
    earlier = tuple(
        Stamp(s.event, s.at_s - 10.0, s.worker, s.depth, s.num_bytes)
        for s in STAMPS
        if s.worker == P
    )
    assert spans((*earlier, Stamp("retried", 0.5), *STAMPS)) == spans(STAMPS)
