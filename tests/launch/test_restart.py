"""When a child is started again: the policy alone, with the time given to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.connector.config import EXIT_RESTART
from rlt.launch.restart import (
    COULD_NOT_START,
    FOR_EVER,
    EndedForGood,
    GivenUp,
    RestartPolicy,
    Restarts,
    StartAgain,
)

COORDINATOR = RestartPolicy(most_failures=5)
KILLED = -9


def live_and_end(restarts: Restarts, start_s: float, lived_s: float, status: int) -> object:
    restarts.started(start_s)
    return restarts.ended(status, start_s + lived_s)


def waits(policy: RestartPolicy, lives_s: list[float], status: int = KILLED) -> list[float]:
    """How long each life's successor is waited for."""
    restarts, now_s, found = Restarts(policy), 0.0, []
    for lived_s in lives_s:
        fate = live_and_end(restarts, now_s, lived_s, status)
        assert isinstance(fate, StartAgain)
        found.append(fate.after_s)
        now_s += lived_s + fate.after_s
    return found


def test_each_failure_in_a_row_doubles_the_wait_up_to_a_bound() -> None:
    found = waits(FOR_EVER, [0.1] * 10)
    assert found == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_life_of_a_minute_begins_the_waits_anew() -> None:
    assert waits(FOR_EVER, [0.1, 59.9, 60.0, 0.1]) == [0.25, 0.5, 0.25, 0.5]


def test_thousands_of_failures_still_give_a_wait() -> None:
    assert waits(FOR_EVER, [0.0] * 5000)[-1] == 30.0


def test_who_asks_to_be_started_again_is_at_once() -> None:
    assert waits(FOR_EVER, [5.0, 1.0, 5.0], EXIT_RESTART) == [0.0, 0.0, 0.0]


def test_who_asks_for_it_before_it_can_have_served_has_failed() -> None:
    assert waits(FOR_EVER, [0.9, 0.0, 0.5], EXIT_RESTART) == [0.25, 0.5, 1.0]


def test_exit_code_0_is_an_end_for_good_however_often_it_failed_before() -> None:
    restarts = Restarts(FOR_EVER)
    live_and_end(restarts, 0.0, 1.0, 1)
    assert live_and_end(restarts, 2.0, 0.1, 0) == EndedForGood()


def test_five_failures_in_a_minute_are_given_up() -> None:
    restarts = Restarts(COORDINATOR)
    fates = [live_and_end(restarts, n * 14.0, 1.0, 1) for n in range(5)]
    assert [type(fate) for fate in fates] == [StartAgain] * 4 + [GivenUp]
    last = fates[-1]
    assert isinstance(last, GivenUp) and last.code == 1 and "5 times in 56 s" in last.why


def test_five_failures_over_more_than_a_minute_are_not() -> None:
    assert waits(COORDINATOR, [16.0] * 12)[-1] == 30.0


@given(st.lists(st.tuples(st.floats(0, 200), st.sampled_from([1, 2, 75, -9, -11])), max_size=40))
def test_a_worker_is_never_given_up_and_never_waited_for_longer_than_the_bound(
    lives: list[tuple[float, int]],
) -> None:
    restarts, now_s = Restarts(FOR_EVER), 0.0
    for lived_s, status in lives:
        fate = live_and_end(restarts, now_s, lived_s, status)
        assert isinstance(fate, StartAgain) and 0.0 <= fate.after_s <= 30.0
        now_s += lived_s + fate.after_s


@pytest.mark.parametrize(
    ("lived_s", "status", "given_up"),
    [(3.0, COULD_NOT_START, True), (3.0, 1, False), (61.0, COULD_NOT_START, False)],
)
def test_a_first_start_that_cannot_be_is_given_up_where_that_is_asked_for(
    lived_s: float, status: int, given_up: bool
) -> None:
    restarts = Restarts(RestartPolicy(must_start=True))
    fate = live_and_end(restarts, 0.0, lived_s, status)
    assert (fate == GivenUp(COULD_NOT_START, "it could not start")) is given_up
    if not given_up:
        later = live_and_end(restarts, 100.0, 1.0, COULD_NOT_START)
        assert isinstance(later, StartAgain)
