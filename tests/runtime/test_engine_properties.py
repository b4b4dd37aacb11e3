"""Random arrivals, cancels, exits and pass failures in small pools: nothing is lost or confused."""

from typing import Any

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rlt.runtime.admission import MAX_BYPASS
from rlt.runtime.events import EngineEvent
from rlt.runtime.types import EngineRequest, Generation, KVLayout

from .helpers import at_rest, drain, engine_request, local_core, outcomes
from .oracle import oracle
from .simulated_executor import SimulatedExecutor
from .strategies import requests, scheduling

ACTIONS = [*["add"] * 4, *["step"] * 8, *["finish"] * 8, "cancel", "fail"]


@examples(max_examples=250, deadline=None)
@given(
    made=requests(),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=120),
    victims=st.lists(st.integers(1, 9), max_size=20),
    num_blocks=st.integers(28, 60),
    num_slots=st.integers(1, 4),
    settings=scheduling(),
    block_size=st.integers(1, 4),
    layout=st.sampled_from(["last_exited", "shared"]),
    one_by_one=st.booleans(),
)
def test_every_request_ends_once_and_its_tokens_are_those_it_gives_alone(
    made: list[EngineRequest],
    actions: list[str],
    victims: list[int],
    num_blocks: int,
    num_slots: int,
    settings: dict[str, Any],
    block_size: int,
    layout: KVLayout,
    one_by_one: bool,
) -> None:
    executor = SimulatedExecutor(
        num_blocks=num_blocks + 28 * (block_size == 1),
        num_slots=num_slots,
        block_size=block_size,
        eager=False,
        layout=layout,
    )
    core = local_core(executor, **settings)
    events: list[EngineEvent] = []
    to_add, to_cancel = list(made), list(victims)
    silent_after: dict[Generation, int] = {}
    for action in actions:
        if action == "add" and to_add:
            core.add_local(to_add.pop(0))
        elif action == "cancel" and to_cancel:
            generation = Generation(to_cancel.pop(0))
            if core.cancel(generation):
                produced = outcomes(events).get(generation)
                silent_after.setdefault(generation, len(produced.tokens) if produced else 0)
        elif action == "finish" and executor.pass_queued:
            executor.finish_pass()
        elif action == "fail" and executor.pass_queued:
            executor.fail_next_pass = "scripted"
            executor.finish_pass()
        else:
            events += core.step()
            assert executor.passes_queued <= settings["max_in_flight"]
        core.check()
    for request in to_add:
        core.add_local(request)
    executor.eager, executor.one_by_one = True, one_by_one
    if not core.idle():
        events += drain(core)
    events += core.step()
    at_rest(core)
    for plan in executor.plans:
        prompt_positions = sum(len(row.range) for row in plan.prefill)
        assert prompt_positions <= settings["chunk_tokens"]
        if plan.prefill and plan.loops and settings["token_budget"] is not None:
            assert prompt_positions + len(plan.loops) <= settings["token_budget"]
    ended = outcomes(events)
    assert {request.generation for request in made} == set(ended)
    for request in made:
        outcome, expected = ended[request.generation], oracle(request, layout)
        assert outcome.released == 1
        if request.generation in silent_after:
            assert len(outcome.tokens) == silent_after[request.generation]
        elif outcome.error is None:
            assert outcome.result == expected
        assert outcome.tokens == expected[0][: len(outcome.tokens)]
        assert outcome.depths == expected[1][: len(outcome.tokens)]


@examples(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_no_request_starts_after_more_later_ones_than_the_bound(sizes: list[int]) -> None:
    executor = SimulatedExecutor(num_blocks=32, num_slots=8, block_size=1)
    core = local_core(executor, chunk_tokens=4)
    for generation, size in enumerate(sizes, start=1):
        core.add_local(engine_request(generation, range(size), max_tokens=2, threshold=1.0))
    started: list[Generation] = []  # in order of admission
    while not core.idle():
        core.step()
        phases = core.live()
        for generation in map(Generation, range(1, len(sizes) + 1)):
            if generation not in started and phases.get(generation, "gone") != "waiting":
                started.append(generation)
    for place, generation in enumerate(started):
        assert sum(other > generation for other in started[:place]) <= MAX_BYPASS
