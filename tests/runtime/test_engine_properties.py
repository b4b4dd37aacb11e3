"""Random arrivals, cancels, exits and pass failures in small pools: nothing is lost or confused."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.runtime.admission import MAX_BYPASS
from rlt.runtime.events import EngineEvent
from rlt.runtime.types import EngineRequest, Generation

from .helpers import alone, at_rest, drain, engine_request, local_core, outcomes
from .simulated_executor import SimulatedExecutor


@st.composite
def requests(draw: st.DrawFn) -> list[EngineRequest]:
    made = []
    for generation in range(1, draw(st.integers(1, 9)) + 1):
        min_loops = draw(st.integers(1, 4))
        made.append(
            engine_request(
                generation,
                draw(st.lists(st.integers(0, 19), min_size=1, max_size=9)),
                max_tokens=draw(st.integers(1, 6)),
                threshold=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
                min_loops=min_loops,
                max_loops=draw(st.integers(min_loops, 4)),
                ignore_eos=draw(st.booleans()),
                stop=tuple(draw(st.lists(st.integers(0, 19), max_size=3))),
            )
        )
    return made


ACTIONS = ["add", "add", "step", "step", "step", "finish", "finish", "cancel", "fail"]


@settings(max_examples=250, deadline=None)
@given(
    made=requests(),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=120),
    victims=st.lists(st.integers(1, 9), max_size=20),
    num_blocks=st.integers(28, 60),
    num_slots=st.integers(1, 4),
    chunk_tokens=st.integers(1, 8),
    block_size=st.integers(1, 4),
)
def test_every_request_ends_once_and_its_tokens_are_those_it_gives_alone(
    made: list[EngineRequest],
    actions: list[str],
    victims: list[int],
    num_blocks: int,
    num_slots: int,
    chunk_tokens: int,
    block_size: int,
) -> None:
    executor = SimulatedExecutor(
        num_blocks=num_blocks + 28 * (block_size == 1),
        num_slots=num_slots,
        block_size=block_size,
        eager=False,
    )
    core = local_core(executor, chunk_tokens=chunk_tokens)
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
        core.check()
    for request in to_add:
        core.add_local(request)
    executor.eager = True
    if not core.idle():
        events += drain(core)
    events += core.step()
    at_rest(core)
    for plan in executor.plans:
        assert sum(len(row.range) for row in plan.prefill) <= chunk_tokens
    ended = outcomes(events)
    assert {request.generation for request in made} == set(ended)
    for request in made:
        outcome, expected = ended[request.generation], alone(request)
        assert outcome.released == 1
        if request.generation in silent_after:
            assert len(outcome.tokens) == silent_after[request.generation]
        elif outcome.error is None:
            assert outcome.result == expected
        assert outcome.tokens == expected[0][: len(outcome.tokens)]
        assert outcome.depths == expected[1][: len(outcome.tokens)]


@settings(max_examples=60, deadline=None)
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
