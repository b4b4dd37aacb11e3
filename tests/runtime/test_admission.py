"""Who is let in: priority, order, the bounded right to pass, and who is held back."""

from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.admission import FORGET_S, ReservationLine, WaitingQueue
from rlt.runtime.types import Generation

G, H, K = Generation(1), Generation(2), Generation(3)


class Queue:
    """A waiting queue, and how many blocks each entry wants."""

    def __init__(self, *sizes: int, max_bypass: int = 2, max_scan: int = 32) -> None:
        self.queue = WaitingQueue(100, max_bypass, max_scan)
        self.sizes = {Generation(n): size for n, size in enumerate(sizes, start=1)}
        for generation in self.sizes:
            self.queue.add(generation, (0, generation))

    def next(self, free_blocks: int) -> Generation | None:
        return self.queue.next_to_admit(lambda g: self.sizes[g] <= free_blocks)


def test_first_come_is_first_served() -> None:
    waiting = Queue(2, 2)
    assert [waiting.next(4), waiting.next(2)] == [1, 2]


def test_a_lower_priority_number_goes_first_and_equals_go_in_order() -> None:
    waiting = WaitingQueue(100)
    for generation, priority in ((G, 1), (H, 0), (K, 1)):
        waiting.add(generation, (priority, generation))
    assert [waiting.next_to_admit(lambda _: True) for _ in range(3)] == [H, G, K]


def test_a_small_request_passes_a_blocked_large_one_only_so_often() -> None:
    waiting = Queue(10, 1, 1, 1)
    assert [waiting.next(5) for _ in range(3)] == [2, 3, None]
    assert waiting.queue.bypasses == 2
    assert [waiting.next(10), waiting.next(5)] == [1, 4]


def test_one_with_precedence_that_comes_later_passes_nobody() -> None:
    waiting = Queue(10, max_bypass=0)
    waiting.queue.add(H, (-1, 2))
    waiting.sizes[H] = 1
    assert waiting.next(5) == H
    assert waiting.queue.bypasses == 0


def test_a_scan_looks_at_no_more_entries_than_its_bound() -> None:
    looked: list[Generation] = []
    waiting = Queue(9, 9, 9, 1, max_scan=3)
    assert waiting.queue.next_to_admit(lambda g: looked.append(g) is not None) is None
    assert looked == [1, 2, 3]


def test_only_entries_more_urgent_than_a_suspended_request_may_go() -> None:
    waiting = Queue(1, 1)
    assert waiting.queue.next_to_admit(lambda _: True, before=(0, 0)) is None
    assert waiting.queue.next_to_admit(lambda _: True, before=(0, 2)) == G


def test_a_removed_entry_is_never_admitted() -> None:
    waiting = Queue(1, 1, 1)
    waiting.queue.remove(H)
    assert [waiting.next(1), waiting.next(1), waiting.next(1)] == [1, 3, None]


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=30),
    free=st.lists(st.integers(0, 10), max_size=100),
    bound=st.integers(0, 4),
)
def test_no_entry_is_passed_more_often_than_the_bound(
    sizes: list[int], free: list[int], bound: int
) -> None:
    waiting = Queue(*sizes, max_bypass=bound)
    order = [chosen for blocks in free if (chosen := waiting.next(blocks))]
    for generation in range(1, len(sizes) + 1):
        cut = order.index(Generation(generation)) if generation in order else len(order)
        passed_by = [chosen for chosen in order[:cut] if chosen > generation]
        assert len(passed_by) <= bound


def test_reservations_may_pass_a_waiting_one_only_so_often() -> None:
    line = ReservationLine(max_bypass=2)
    line.wait(G, (0, 1), 0.0)
    for number in (2, 3):
        assert not line.held_back((0, number), 0.0)
        line.granted(Generation(number), (0, number))
    assert line.held_back((0, 4), 0.0)
    assert not line.held_back((0, 1), 0.0), "the one that was passed is not held back itself"
    assert not line.held_back((-1, 5), 0.0), "nor is one that has precedence"
    line.granted(G, (0, 1))
    assert not line.held_back((0, 4), 0.0)


def test_a_reservation_that_is_not_asked_for_again_holds_nobody_back() -> None:
    line = ReservationLine(max_bypass=0)
    line.wait(G, (0, 1), 0.0)
    line.wait(G, (0, 1), 5.0)
    assert line.held_back((0, 2), 5.0 + FORGET_S)
    assert not line.held_back((0, 2), 5.1 + FORGET_S)
    line.wait(G, (0, 1), 0.0)
    line.forget(G)
    assert not line.held_back((0, 2), 0.0)


def test_a_reservation_keeps_the_place_of_its_first_ask() -> None:
    line = ReservationLine()
    line.wait(G, (0, 1), 0.0)
    line.wait(G, (0, 7), 1.0)
    assert line.urgency(G) == (0, 1)
    assert line.urgency(H) is None
