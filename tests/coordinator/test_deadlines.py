"""Whose time is up, and that nothing is kept of requests that have ended."""

import gc
import itertools
import tracemalloc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from rlt.coordinator.deadlines import Deadlines
from rlt.coordinator.request import Request
from rlt.coordinator.timeline import Timeline
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import RequestId

from .world import World

_numbers = itertools.count(1)


def request(deadline_s: float) -> Request:
    number = next(_numbers)
    return Request(
        client=b"c",
        asked=GenerateRequest(request_id=RequestId(str(number)), prompt_token_ids=(1,)),
        prompt=(1,),
        seed=0,
        received_s=0.0,
        deadline_s=deadline_s,
        text=None,
        timeline=Timeline(),
        number=number,
    )


def test_a_service_keeps_nothing_of_requests_that_ended_behind_one_that_lives() -> None:
    world = World(max_queue=200)
    world.generate("long", max_tokens=500)
    world.deliver_all()
    for number in range(100):
        world.generate(f"r{number}", deadline_s=1e6)
    held = [weakref.ref(live) for live in world.state._desk.live()]
    for number in range(100):
        world.cancel(f"r{number}")
    for _ in range(5):  # until nobody is asked any more to let go of those that ran
        world.deliver_all()
        world.work()
        world.pass_time(0.3)
    gc.collect()
    living = [ref() for ref in held if ref() is not None]
    assert len(held) == 101 and living == list(world.state._desk.live()) and len(living) == 1


def test_memory_is_bounded_by_what_lives_not_by_what_ever_came() -> None:
    deadlines = Deadlines()
    deadlines.add(request(1.0))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(2000):
            ended = request(1e6)
            deadlines.add(ended)
            deadlines.forget(ended)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # an entry for each would be 200 kB


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "forget", "expired"]), st.integers(0, 20)), max_size=60
    )
)
def test_each_live_request_is_named_once_when_its_time_is_up(steps: list[tuple[str, int]]) -> None:
    deadlines, live = Deadlines(), list[Request]()
    for step, number in steps:
        match step:
            case "add":
                live.append(request(float(number)))
                deadlines.add(live[-1])
            case "forget" if live:
                deadlines.forget(live.pop(number % len(live)))
            case "expired":
                due = [one for one in live if one.deadline_s <= number]
                named = deadlines.expired(float(number))
                assert named == sorted(due, key=lambda one: (one.deadline_s, one.number))
                live = [one for one in live if one not in due]
