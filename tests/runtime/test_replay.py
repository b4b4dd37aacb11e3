"""Requests that go on after a death: whatever was delivered, the rest is as if nothing happened.

The simulated model's outputs depend on every K/V entry read, so one position at a wrong depth, or
one loop too many, changes what follows.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rlt.runtime.config import SchedulerConfig
from rlt.runtime.errors import ProtocolError
from rlt.runtime.events import Refuse, Reservation, Wait
from rlt.runtime.plans import PrefillRow
from rlt.runtime.types import EngineRequest, FinishReason, Generation, KVLayout, TokenRange

from . import strategies
from .growing_executor import GrowingExecutor
from .helpers import Outcome, at_rest, drain, engine_request, local_core, outcomes
from .oracle import oracle
from .scripted_handoff import Pair, Side
from .simulated_executor import VOCAB, SimulatedExecutor

G = Generation(1)
DEPTHS = (4, 2, 1, 1, 3, 4, 2, 1, 3, 4)


def replayed(request: EngineRequest, layout: KVLayout, outputs: int) -> EngineRequest:
    """The request after so many of its outputs were delivered."""
    tokens, depths, _ = oracle(request, layout)
    return msgspec.structs.replace(
        request,
        delivered=tuple(tokens[:outputs]),
        delivered_depths=tuple(depths[:outputs]),
    )


def cuts(request: EngineRequest, layout: KVLayout) -> int:
    """Outputs that can have been delivered before the last one."""
    return len(oracle(request, layout)[0]) - 1


def goes_on(request: EngineRequest, layout: KVLayout, outcome: Outcome) -> bool:
    tokens, depths, finish = oracle(request, layout)
    behind = len(request.delivered)
    assert outcome.error is None, outcome.error
    return outcome.result == (tokens[behind:], depths[behind:], finish)


def traced(prompt: Sequence[int] = (1, 2, 3), generation: int = 1) -> EngineRequest:
    return engine_request(
        generation, prompt, max_tokens=len(DEPTHS), min_loops=1, mode="trace", trace=DEPTHS
    )


@st.composite
def cut_requests(draw: st.DrawFn) -> tuple[KVLayout, list[EngineRequest]]:
    """Of each request, some number of outputs was delivered, often none."""
    layout: KVLayout = draw(st.sampled_from(["last_exited", "shared"]))
    made = draw(strategies.requests())
    return layout, [
        replayed(request, layout, draw(st.integers(0, cuts(request, layout)))) for request in made
    ]


@examples(max_examples=150, deadline=None)
@given(
    asked=cut_requests(),
    settings=strategies.scheduling(),
    incremental=st.booleans(),
    prefix_cache=st.booleans(),
    spare_columns=st.integers(0, 6),
    num_slots=st.integers(1, 4),
    block_size=st.integers(1, 4),
)
def test_wherever_requests_were_cut_they_go_on_as_if_they_were_not(
    asked: tuple[KVLayout, list[EngineRequest]],
    settings: dict[str, Any],
    incremental: bool,
    prefix_cache: bool,
    spare_columns: int,
    num_slots: int,
    block_size: int,
) -> None:
    layout, made = asked
    planes = 4 if layout == "last_exited" else 1
    largest = max(-(-request.capacity_tokens // block_size) for request in made)
    executor = GrowingExecutor(
        num_blocks=(largest + spare_columns) * planes,
        num_slots=num_slots,
        block_size=block_size,
        layout=layout,
    )
    more = {"admission": "incremental" if incremental else "full", "prefix_cache": prefix_cache}
    core = local_core(executor, **settings, **more)
    for request in made:
        core.add_local(executor.know(request))
    ended = outcomes(drain(core), made)
    core.step()
    at_rest(core)
    for request in made:
        assert goes_on(request, layout, ended[request.generation])


@examples(max_examples=80, deadline=None)
@given(
    asked=cut_requests(),
    settings=strategies.scheduling(),
    incremental=st.booleans(),
    prefix_cache=st.booleans(),
    spare_columns=st.integers(0, 6),
    order=st.lists(st.integers(0, 9), max_size=60),
)
def test_p_runs_what_was_delivered_and_d_goes_on_behind_it(
    asked: tuple[KVLayout, list[EngineRequest]],
    settings: dict[str, Any],
    incremental: bool,
    prefix_cache: bool,
    spare_columns: int,
    order: list[int],
) -> None:
    layout, made = asked
    planes = 4 if layout == "last_exited" else 1
    largest = max(-(-request.capacity_tokens // 2) for request in made)
    config = SchedulerConfig(
        **settings,
        admission="incremental" if incremental else "full",
        prefix_cache=prefix_cache,
    )
    sides = [
        Side(
            GrowingExecutor(num_blocks=(largest + spare_columns) * planes, layout=layout),
            config=config,
        )
        for _ in range(2)
    ]
    pair, waiting = Pair(*sides), list(made)
    for side in sides:
        for request in made:
            assert isinstance(side.executor, GrowingExecutor)
            side.executor.know(request)
    for _ in range(2000):
        while waiting and not isinstance(pair.start(waiting[0]), Wait):
            waiting.pop(0)
        pair.prefill.step()
        pair.deliver(order.pop(0) if order else 0)
        pair.decode.step()
        if not waiting and pair.prefill.core.idle() and pair.decode.core.idle():
            break
    ended = outcomes(pair.decode.events, made)
    for request in made:
        assert goes_on(request, layout, ended[request.generation])
    pair.decode.step()
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)


def prompt_rows(executor: SimulatedExecutor) -> list[PrefillRow]:
    return [row for plan in executor.plans for row in plan.prefill]


def test_in_each_loop_those_take_part_that_ran_it_and_the_others_are_copied_before() -> None:
    executor = SimulatedExecutor()
    request = replayed(traced(), "last_exited", 6)  # context: 3 of the prompt, loops 2 1 1 3 4
    core = local_core(executor, chunk_tokens=9)
    core.add_local(request)
    drain(core)
    assert [row.active for row in prompt_rows(executor)] == [
        None,
        (TokenRange(0, 4), TokenRange(6, 8)),
        (TokenRange(0, 3), TokenRange(6, 8)),
        (TokenRange(0, 3), TokenRange(7, 8)),
    ]
    before = [len(plan.finalize) for plan in executor.plans[:4]]
    targets = [len(row.targets) for plan in executor.plans[:4] for row in plan.finalize]
    assert (before, targets) == ([0, 2, 1, 1], [3, 3, 2, 1])


def test_a_chunk_in_which_nobody_runs_a_loop_any_more_is_told_and_sent_as_any_other() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, chunk_tokens=2)
    core.add_local(replayed(traced((1, 2)), "last_exited", 6))
    drain(core)
    rows = [row for row in prompt_rows(executor) if row.range == TokenRange(2, 4)]
    ran = [[(run.start, run.stop) for run in row.runs] for row in rows]
    assert ran == [[(2, 4)], [(2, 3)], [], []]


def test_a_prompt_that_was_never_cut_and_one_whose_first_output_was_delivered_run_alike() -> None:
    plans = []
    for outputs in (0, 1):
        executor = SimulatedExecutor()
        core = local_core(executor, chunk_tokens=2)
        core.add_local(replayed(traced(), "last_exited", outputs))
        drain(core)
        plans.append([(row.depth, row.range, row.active) for row in prompt_rows(executor)])
    assert plans[0] == plans[1]
    assert {active for _, _, active in plans[0]} == {None}


def test_layout_shared_runs_a_replayed_position_as_often_as_it_ran() -> None:
    executor = SimulatedExecutor(layout="shared")
    core = local_core(executor)
    core.add_local(replayed(traced(), "shared", 6))
    drain(core)
    loops = [
        sum(row.range.start == position for row in prompt_rows(executor)) for position in range(8)
    ]
    assert loops == [4, 4, 4, 2, 1, 1, 3, 4]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_token_behind_the_check_is_known_here_and_is_the_delivered_one(
    max_in_flight: int,
) -> None:
    executor = SimulatedExecutor()
    request = replayed(traced(), "last_exited", 4)
    core = local_core(executor, max_in_flight=max_in_flight)
    core.add_local(request)
    drain(core)
    codas = [row for plan in executor.plans for row in plan.coda]
    assert (codas[0].expected, codas[0].keep_slot) == (request.delivered[-1], None)
    assert (codas[0].output_index, codas[0].exit_depth) == (3, DEPTHS[3])
    assert {row.expected for row in codas[1:]} == {None}
    first = next(row for plan in executor.plans for row in plan.prelude)
    assert (first.token, first.output_index) == (request.delivered[-1], 4)


def wrong(request: EngineRequest, output: int) -> EngineRequest:
    delivered = list(request.delivered)
    delivered[output] = (delivered[output] + 1) % VOCAB
    return msgspec.structs.replace(request, delivered=tuple(delivered))


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_delivered_token_that_does_not_come_out_again_fails_the_request_by_name(
    layout: KVLayout, max_in_flight: int
) -> None:
    good = replayed(traced(), layout, 5)
    for output in range(5):
        core = local_core(SimulatedExecutor(layout=layout), max_in_flight=max_in_flight)
        core.add_local(wrong(good, output))
        outcome = outcomes(drain(core))[G]
        assert (outcome.error, outcome.tokens, outcome.released) == ("replay_mismatch", [], 1)
        core.step()
        at_rest(core)
        assert core.statistics()["replay_ties"] == 0


def test_a_wrong_depth_is_found_too() -> None:
    good = replayed(traced(), "last_exited", 6)
    for output in range(1, 6):
        depths = list(good.delivered_depths)
        depths[output] = depths[output] % 4 + 1
        core = local_core(SimulatedExecutor())
        core.add_local(msgspec.structs.replace(good, delivered_depths=tuple(depths)))
        assert outcomes(drain(core))[G].error == "replay_mismatch"


def test_d_gives_its_receive_slot_back_when_the_check_fails() -> None:
    pair = Pair(Side(SimulatedExecutor()), Side(SimulatedExecutor()))
    pair.start(wrong(replayed(traced((1, 2)), "last_exited", 3), 2))
    pair.settle()
    outcome = outcomes(pair.decode.events)[G]
    assert (outcome.error, outcome.tokens, outcome.released) == ("replay_mismatch", [], 1)
    at_rest(pair.decode.core)
    assert pair.decode.core.statistics()["receive_slots_free"] == 2


@pytest.mark.parametrize(("gap", "stands"), [(9e-5, True), (1.1e-4, False)])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_tie_is_counted_and_the_delivered_token_stands(
    gap: float, stands: bool, max_in_flight: int
) -> None:
    """What follows is what follows the delivered token, though another one came out."""
    request = wrong(replayed(traced(), "last_exited", 3), 2)
    executor = SimulatedExecutor()
    executor.gap = gap
    core = local_core(executor, max_in_flight=max_in_flight)
    core.add_local(request)
    outcome = outcomes(drain(core), [request])[G]
    assert core.statistics()["replay_ties"] == int(stands)
    if not stands:
        assert outcome.error == "replay_mismatch"
        return
    assert (outcome.error, outcome.finish) == (None, FinishReason.LENGTH)
    assert len(outcome.tokens) == len(DEPTHS) - 3
    for outputs in range(4, len(DEPTHS)):  # each is derived again from the delivered token on
        known = outputs - 3
        tokens = (*request.delivered, *outcome.tokens[:known])
        again = msgspec.structs.replace(
            request, delivered=tokens, delivered_depths=DEPTHS[:outputs]
        )
        fresh = local_core(SimulatedExecutor())
        fresh.add_local(again)
        assert outcomes(drain(fresh), [again])[G].tokens == outcome.tokens[known:]


def test_generated_positions_are_never_shared_by_p_or_by_d() -> None:
    """Later prompts that begin with everything that was replayed find the prompt's pages alone."""
    config = SchedulerConfig(chunk_tokens=3, prefix_cache=True)
    sides = [Side(GrowingExecutor(num_blocks=200), config=config) for _ in range(2)]
    pair = Pair(*sides)
    first = replayed(traced((1, 2, 3, 4, 5)), "last_exited", 8)
    longer = engine_request(2, (*first.context, 7), max_tokens=3)
    for request in (first, longer):
        for side in sides:
            assert isinstance(side.executor, GrowingExecutor)
            side.executor.know(request)
    pair.start(first)
    pair.settle()
    assert [side.core.statistics()["blocks_cached"] for side in sides] == [2 * 4, 2 * 4]
    answer = pair.start(longer)
    assert isinstance(answer, Reservation) and answer.cached_tokens == 4
    pair.settle()
    assert goes_on(longer, "last_exited", outcomes(pair.decode.events, [first])[Generation(2)])
    assert [side.core.statistics()["prefix_hit_tokens"] for side in sides] == [4, 4]


def test_a_replayed_request_reads_what_is_cached_of_its_prompt() -> None:
    config = SchedulerConfig(chunk_tokens=3, prefix_cache=True)
    sides = [Side(GrowingExecutor(num_blocks=200), config=config) for _ in range(2)]
    pair = Pair(*sides)
    whole = traced((1, 2, 3, 4, 5))
    cut = msgspec.structs.replace(replayed(whole, "last_exited", 8), generation=Generation(2))
    for request in (whole, cut):
        for side in sides:
            assert isinstance(side.executor, GrowingExecutor)
            side.executor.know(request)
        pair.start(request)
        pair.settle()
    assert goes_on(cut, "last_exited", outcomes(pair.decode.events, [cut])[Generation(2)])
    assert [side.core.statistics()["prefix_hit_tokens"] for side in sides] == [4, 4]


def test_p_takes_blocks_for_the_context_and_d_for_everything() -> None:
    pair = Pair(Side(SimulatedExecutor()), Side(SimulatedExecutor()))
    pair.start(replayed(traced(), "last_exited", 6))  # 3 + 5 positions of 3 + 9
    pair.prefill.step()
    free = [side.core.statistics()["blocks_free"] for side in (pair.prefill, pair.decode)]
    assert free == [40 - 4 * 4, 40 - 6 * 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delivered_depths": (4, 2)}, "3 delivered tokens and 2 depths"),
        ({"delivered_depths": (3, 2, 1)}, "output 0 was delivered with 3 loops"),
        ({"delivered_depths": (4, 5, 1)}, "the model has 4 loops"),
        ({"delivered_depths": (4, 0, 1)}, "the model has 4 loops"),
        ({"delivered": (1, 2, VOCAB)}, "outside the vocabulary"),
        ({"delivered": (1, -1, 2)}, "outside the vocabulary"),
        ({"delivered": (1,) * 10, "delivered_depths": (4,) * 10}, "none is left"),
    ],
)
def test_what_cannot_have_been_delivered_is_refused_wherever_it_comes_in(
    changes: dict[str, Any], words: str
) -> None:
    good = msgspec.structs.replace(traced(), delivered=(1, 2, 3), delivered_depths=(4, 2, 1))
    bad = msgspec.structs.replace(good, **changes)
    side = Side(SimulatedExecutor())
    answer = side.core.reserve(bad)
    assert isinstance(answer, Refuse) and answer.code == "protocol" and words in answer.reason
    for add in (side.core.add_prefill, side.core.add_local):
        with pytest.raises(ProtocolError, match=words):
            add(bad)
    assert side.core.live() == {}


def test_an_output_that_ended_the_request_cannot_be_followed() -> None:
    ended = engine_request(1, max_tokens=9, stop=(5,))
    bad = msgspec.structs.replace(ended, delivered=(1, 5, 3), delivered_depths=(4, 2, 2))
    with pytest.raises(ProtocolError, match="nothing follows it"):
        local_core(SimulatedExecutor()).add_local(bad)


@pytest.mark.parametrize("steps", range(0, 24, 2))
def test_a_replay_may_be_cancelled_anywhere(steps: int) -> None:
    pair = Pair(Side(SimulatedExecutor()), Side(SimulatedExecutor()))
    request = replayed(traced((1, 2)), "last_exited", 4)
    pair.start(request)
    for _ in range(steps):
        pair.prefill.step()
        pair.deliver()
        pair.decode.step()
    receiving = pair.decode.core.live().get(G) == "receiving"
    pair.cancel(G)
    if receiving:
        pair.stop_writer(G, proof=True)
    for _ in range(60):
        pair.prefill.step()
        pair.deliver()
        pair.decode.step()
    assert outcomes(pair.decode.events, [request])[G].released == 1
    at_rest(pair.decode.core)


def test_replayed_prompts_are_suspended_and_come_back() -> None:
    executor = GrowingExecutor(num_blocks=11 * 4, num_slots=3)
    core = local_core(executor, chunk_tokens=3, admission="incremental", watermark=0.0)
    made = [
        executor.know(replayed(traced((n, 2, 3), n), "last_exited", outputs))
        for n, outputs in ((1, 1), (2, 3), (3, 6))
    ]
    for request in made:
        core.add_local(request)
    executor.one_by_one = True
    ended = outcomes(drain(core), made)
    assert executor.suspended, "the pool was large enough: the test shows nothing"
    for request in made:
        assert goes_on(request, "last_exited", ended[request.generation])
