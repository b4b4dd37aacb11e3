"""Preemption: who gives way, who never does, and that nobody's answer shows that it happened."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.config import EngineConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.errors import ConfigError
from rlt.runtime.events import EngineEvent, Released
from rlt.runtime.preemption import Candidate, Urgency, choose_victim, resume_margin
from rlt.runtime.types import EngineRequest, Generation

from .growing_executor import GrowingExecutor
from .helpers import at_rest, drain, engine_request, local_core, outcomes
from .oracle import oracle

COLUMN = 4  # blocks


def test_the_lowest_priority_gives_way_first_and_of_equals_the_latest() -> None:
    crowd = [
        Candidate(Generation(g), urgency, busy=False)
        for g, urgency in ((1, (0, 1)), (2, (1, 2)), (3, (1, 3)), (4, (0, 4)))
    ]
    victim = choose_victim((0, 0), crowd)
    assert victim is not None and victim.generation == 3


def test_nobody_gives_way_to_a_less_urgent_one() -> None:
    assert choose_victim((1, 5), [Candidate(Generation(1), (1, 4), busy=False)]) is None
    assert choose_victim((1, 4), [Candidate(Generation(1), (1, 4), busy=False)]) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, unique=True))
def test_the_most_urgent_is_never_chosen_and_everybody_else_is_for_it(
    urgencies: list[Urgency],
) -> None:
    crowd = {u: Candidate(Generation(n), u, busy=False) for n, u in enumerate(urgencies)}
    top = min(urgencies)
    gone: list[Urgency] = []
    while (victim := choose_victim(top, crowd.values())) is not None:
        gone.append(victim.urgency)
        del crowd[victim.urgency]
    assert gone == sorted(set(urgencies) - {top}, reverse=True)


def test_nothing_is_kept_free_for_a_request_that_comes_back_alone() -> None:
    assert resume_margin(executing=0, num_planes=4, watermark=5) == 0
    assert resume_margin(executing=2, num_planes=4, watermark=5) == 17


class Engine:
    """Requests of 3 + 11 positions (7 columns of 2) in a pool of a given number of columns."""

    def __init__(
        self,
        columns: int,
        *,
        snapshot_bytes: int = 1 << 30,
        real_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        self.executor = GrowingExecutor(
            num_blocks=columns * COLUMN, snapshot_bytes=snapshot_bytes, real_bytes=real_bytes
        )
        settings = {"admission": "incremental", "watermark": 0.0} | settings
        self.core: EngineCore = local_core(self.executor, **settings)
        self.made: list[EngineRequest] = []
        self.events: list[EngineEvent] = []

    def add(
        self, generation: int, *, max_tokens: int = 12, threshold: float = 1.0, **more: Any
    ) -> EngineRequest:
        prompt = (generation, 2, 3)
        request = engine_request(
            generation, prompt, max_tokens=max_tokens, threshold=threshold, **more
        )
        self.made.append(request)
        self.core.add_local(self.executor.know(request))
        return request

    def step(self) -> None:
        self.events += self.core.step()
        self.core.check()

    def until_suspended(self) -> Generation:
        for _ in range(500):
            self.step()
            if self.executor.snapshots:
                return next(iter(self.executor.snapshots))
        raise AssertionError("nobody was suspended")

    def finish(self) -> None:
        self.events += drain(self.core)
        at_rest(self.core)
        found = outcomes(self.events)
        for request in self.made:
            assert found[request.generation].result == oracle(request), request.generation


def test_full_admission_holds_a_second_request_back_and_incremental_admission_does_not() -> None:
    for admission, running in (("full", 1), ("incremental", 3)):
        engine = Engine(9, admission=admission)
        for generation in (1, 2, 3):
            engine.add(generation)
        engine.step()
        assert engine.core.statistics()["running"] == running
        engine.finish()
        assert bool(engine.executor.suspended) == (admission == "incremental")


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_latest_is_suspended_and_comes_back_into_other_places(max_in_flight: int) -> None:
    engine = Engine(9, max_in_flight=max_in_flight)
    for generation in (1, 2):
        engine.add(generation)
    assert engine.until_suspended() == 2
    assert engine.core.live()[Generation(2)] == "suspended"
    engine.finish()
    assert engine.executor.restored == engine.executor.suspended
    numbers = engine.core.statistics()
    assert numbers["preemptions"] == numbers["resumes"] == len(engine.executor.suspended)


def test_a_lower_priority_gives_way_though_it_came_first() -> None:
    engine = Engine(9)
    engine.add(1, priority=1)
    engine.add(2)
    assert engine.until_suspended() == 1
    engine.finish()


def test_the_only_runnable_request_is_one_that_comes_back() -> None:
    engine = Engine(7)
    engine.add(1)
    engine.add(2)
    engine.until_suspended()
    engine.core.cancel(Generation(1))
    engine.made.pop(0)
    engine.events += drain(engine.core)
    assert engine.executor.restored[-1] == 2
    engine.finish()


def test_a_cancelled_suspended_request_leaves_no_snapshot() -> None:
    engine = Engine(9)
    engine.add(1)
    engine.add(2)
    victim = engine.until_suspended()
    engine.core.cancel(victim)
    assert not engine.executor.snapshots
    assert Released(victim) in engine.core.step()
    engine.made.pop()
    engine.finish()


def test_a_request_without_snapshot_memory_gets_all_its_blocks_at_once() -> None:
    engine = Engine(9, snapshot_bytes=100)
    engine.add(1)
    engine.add(2)
    engine.step()
    numbers = engine.core.statistics()
    assert (numbers["running"], numbers["blocks_free"]) == (1, 2 * COLUMN)
    engine.finish()
    assert not engine.executor.suspended


def test_a_victim_that_cannot_be_saved_is_failed_by_name_only_where_nobody_else_could_run() -> None:
    engine = Engine(9, real_bytes=10)
    for generation in (1, 2, 3):
        engine.add(generation)
    engine.events += drain(engine.core)
    at_rest(engine.core)
    found = outcomes(engine.events)
    assert [found[Generation(g)].error for g in (1, 2, 3)] == [None, "capacity", "capacity"]
    assert found[Generation(1)].result == oracle(engine.made[0])
    assert not engine.executor.suspended


def test_a_victim_whose_pass_is_in_flight_is_held_back_and_suspended_after_it() -> None:
    """Rows at different depths, so that the one who lacks a column and its victim do not take turns
    together. The executor refuses to suspend a request with a pass in flight."""
    engine = Engine(9, max_in_flight=3)
    for generation in (1, 2, 3):
        engine.add(generation, threshold=0.3)
    engine.finish()
    assert engine.executor.suspended
    assert engine.core.statistics()["deferred_hazard"] > 0


def test_a_request_that_comes_back_is_not_the_next_victim_at_once() -> None:
    """Ten requests over a pool for two: each is preempted a few times, not once per column."""
    engine = Engine(14)
    for generation in range(1, 11):
        engine.add(generation)
    engine.finish()
    most = max(engine.executor.suspended.count(Generation(g)) for g in range(1, 11))
    assert most <= 3


def test_more_urgent_arrivals_are_let_in_before_a_suspended_request_and_others_are_not() -> None:
    engine = Engine(9)
    engine.add(1)
    engine.add(2)
    assert engine.until_suspended() == 2
    engine.add(3, max_tokens=1)
    engine.add(4, max_tokens=1, priority=-1)
    engine.step()
    assert engine.core.live()[Generation(3)] == "waiting"
    assert engine.core.live().get(Generation(4)) != "waiting"
    engine.finish()


@pytest.mark.parametrize("wrong", [{"num_slots": 1}, {"snapshot_bytes": 0}])
def test_growth_without_a_second_slot_or_memory_for_snapshots_is_refused(
    wrong: dict[str, int],
) -> None:
    with pytest.raises(ConfigError, match="--admission incremental preempts"):
        EngineConfig(model="m", admission="incremental", **wrong)  # type: ignore[arg-type]
    EngineConfig(model="m", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 2])
def test_with_one_slot_every_request_has_all_its_blocks(slots: int) -> None:
    executor = GrowingExecutor(num_blocks=9 * COLUMN, num_slots=slots)
    core = local_core(executor, admission="incremental")
    core.add_local(executor.know(engine_request(1, max_tokens=12)))
    core.step()
    assert core.statistics()["blocks_free"] == (2 if slots == 1 else 7) * COLUMN
