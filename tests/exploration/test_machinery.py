"""The exploration itself: copies share nothing, and states that count as equal behave equally."""

import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import pytest

from rlt.connector import receiver, sender
from rlt.coordinator import handoffs, members, supervisors
from rlt.decode import engine
from rlt.prefill import pairs
from rlt.runtime import admission

from . import coordinator_process, worker_process
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
        self.ordered = OrderedDict({"b": self.items})
        self.by_default = defaultdict(list, {"c": [1]})
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
    again = clone(copied)
    assert list(again.ordered.items()) == [("b", [7])] and again.ordered["b"] is again.items
    assert again.by_default["d"] == [] and "d" not in node.by_default
    assert next(copied.numbers) == 5 == next(node.numbers)


def test_a_step_of_time_outlasts_whatever_it_may_end() -> None:
    """Else "past" would not say enough about a time, and states would be merged that differ."""
    assert worker_process.STEP_S > max(receiver.SETTLE_S, engine.FENCING_S, admission.FORGET_S)
    assert worker_process.STEP_S > max(receiver.REPEAT_S, sender.REPEAT_S, pairs.REPEAT_S)
    assert coordinator_process.STEP_S > max(members.UNREACHABLE_S, handoffs.RECEIVED_S)
    assert coordinator_process.STEP_S < supervisors.SILENT_S < 2 * coordinator_process.STEP_S


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
