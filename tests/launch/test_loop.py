"""The launcher's loop: descriptors and timers in one place."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from rlt.launch.loop import Loop


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def loop(time: Time) -> Iterator[Loop]:
    with closing(Loop(time)) as loop:
        yield loop


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_what_is_due_runs_in_the_order_of_its_times_and_once(loop: Loop, time: Time) -> None:
    ran: list[str] = []
    for name, delay_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 9.0)):
        loop.after(name, delay_s, lambda name=name: ran.append(name))  # type: ignore[misc]
    time.now_s = 5.0
    loop.turn()
    assert ran == ["a", "b", "c"]
    loop.after("e", 0.0, lambda: ran.append("e"))
    loop.turn()
    assert ran == ["a", "b", "c", "e"]


def test_setting_a_timer_again_moves_it(loop: Loop, time: Time) -> None:
    ran: list[str] = []
    loop.after("x", 1.0, lambda: ran.append("early"))
    loop.after("x", 3.0, lambda: ran.append("late"))
    loop.after("other", 2.0, lambda: None)
    time.now_s = 2.0
    loop.turn()
    assert ran == []
    time.now_s = 3.0
    loop.turn()
    assert ran == ["late"]


def test_a_timer_cancelled_by_another_of_the_same_moment_does_not_run(
    loop: Loop, time: Time
) -> None:
    ran: list[str] = []
    loop.after("first", 1.0, lambda: loop.cancel("second"))
    loop.after("second", 1.5, lambda: ran.append("second"))
    time.now_s = 2.0
    loop.turn()
    assert ran == []


def test_a_timer_that_sets_itself_again_lets_the_turn_end(loop: Loop) -> None:
    ran: list[int] = []

    def again() -> None:
        ran.append(1)
        loop.after("x", 0.0, again)

    loop.after("x", 0.0, again)
    loop.turn()
    assert len(ran) == 1


def test_a_descriptor_that_another_stopped_watching_is_not_heard_in_the_same_turn(
    loop: Loop, pipe: tuple[int, int]
) -> None:
    """Its number may belong to something else by then."""
    reading, writing = pipe
    twin = os.dup(reading)
    heard: list[str] = []

    def take(name: str) -> None:
        heard.append(name)
        loop.unwatch(reading)
        loop.unwatch(twin)
        loop.watch(reading, lambda: heard.append("new"))

    loop.watch(reading, lambda: take("one"))
    loop.watch(twin, lambda: take("two"))
    os.write(writing, b"x")
    loop.turn()
    assert len(heard) == 1
    loop.turn()
    assert heard[1:] == ["new"]
    loop.unwatch(reading)
    os.close(twin)
