"""The waiting queue: order, the bounded right to pass, and what can never be admitted."""

from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.admission import WaitingQueue
from rlt.runtime.types import Generation


def queue(*sizes: int, max_bypass: int = 2) -> WaitingQueue:
    made = WaitingQueue(max_waiting=100, max_bypass=max_bypass)
    for generation, size in enumerate(sizes, start=1):
        made.add(Generation(generation), size)
    return made


def test_first_come_is_first_served() -> None:
    waiting = queue(2, 2)
    assert [waiting.next_to_admit(4, 1), waiting.next_to_admit(2, 1)] == [1, 2]


def test_a_small_request_passes_a_blocked_large_one_only_so_often() -> None:
    waiting = queue(10, 1, 1, 1)
    assert [waiting.next_to_admit(5, 1) for _ in range(3)] == [2, 3, None]
    assert waiting.bypasses == 2
    assert [waiting.next_to_admit(10, 1), waiting.next_to_admit(5, 1)] == [1, 4]


def test_nobody_is_admitted_without_a_slot() -> None:
    assert queue(1).next_to_admit(5, 0) is None


def test_entries_beyond_what_is_left_are_named() -> None:
    assert queue(3, 9, 4).larger_than(4) == [2]


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=30),
    free=st.lists(st.integers(0, 10), max_size=100),
    bound=st.integers(0, 4),
)
def test_no_entry_is_passed_more_often_than_the_bound(
    sizes: list[int], free: list[int], bound: int
) -> None:
    waiting = queue(*sizes, max_bypass=bound)
    order = [chosen for blocks in free if (chosen := waiting.next_to_admit(blocks, 1))]
    for generation in range(1, len(sizes) + 1):
        cut = order.index(Generation(generation)) if generation in order else len(order)
        passed_by = [chosen for chosen in order[:cut] if chosen > generation]
        assert len(passed_by) <= bound
