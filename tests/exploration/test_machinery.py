"""The exploration itself: copies share nothing, and states that count as equal behave equally."""

import itertools
import random
from collections import Counter, deque
from functools import partial
from typing import Any

import pytest

from .bounds import BOUNDS
from .cells import Cells
from .cloning import clone
from .moment import Moment
from .search import Search
from .world import Faulty, World


class Node:
    def __init__(self) -> None:
        self.items: list[int] = []
        self.add = self.items.append
        self.count = Counter({"a": 1})
        self.line = deque([self], maxlen=3)
        self.later = lambda: self.items
        self.bound = partial(self.total, 1)
        self.numbers = itertools.count(5)

    def total(self, more: int) -> int:
        return sum(self.items) + more


def test_a_copy_shares_no_changeable_object() -> None:
    node = Node()
    copied = clone(node)
    copied.add(7)
    copied.count["a"] += 1
    assert node.items == [] and copied.items == [7] and copied.later() is copied.items
    assert node.count["a"] == 1 and copied.line[0] is copied and copied.bound() == 8
    assert next(copied.numbers) == 5 == next(node.numbers)


def _lines(moment: Moment) -> dict[tuple[str, str], list[Any]]:
    messages = moment.cells.messages.values
    return {line: [messages[m] for m in ms] for line, ms in moment.lines.items()}


@pytest.mark.parametrize("name", ["lose", "cancel", "kill p", "fail", "stop d"])
def test_a_history_of_merged_states_is_a_history_of_the_processes_themselves(name: str) -> None:
    """The same walk through states that were merged with others, whose process objects came there
    on other ways, and through processes that walked it alone."""
    merged = World(BOUNDS[name])
    Search(merged).run(max_states=2000)  # so that there is something that was merged
    shuffle = random.Random(name)
    for _ in range(4):
        alone = World(BOUNDS[name], Cells(merge=False))
        one, other = merged.start, alone.start
        for _ in range(50):
            events = merged.events(one)
            assert events == alone.events(other)
            if not events:
                break
            event = shuffle.choice(events)
            try:
                one = merged.after(one, event)
            except Faulty as fault:
                pytest.fail(f"{name}: {fault}")
            other = alone.after(other, event)
            seen, own = merged.read(one), alone.read(other)
            assert [s for _, s in seen.procs.values()] == [s for _, s in own.procs.values()]
            assert seen.budget == own.budget and seen.wire.keys() == own.wire.keys()
            assert _lines(seen) == _lines(own)
