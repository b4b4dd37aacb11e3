"""Submission ahead of results: what is known early, what must wait, what late news may change."""

import msgspec
import pytest

from rlt.runtime.events import EngineEvent, Released
from rlt.runtime.plans import LoopRow, Stage
from rlt.runtime.types import ExitMode, FinishReason, Generation

from .helpers import at_rest, drain, engine_request, local_core, outcomes
from .oracle import oracle
from .simulated_executor import EOS, SimulatedExecutor

G = Generation(1)


def loops_of(executor: SimulatedExecutor) -> list[LoopRow]:
    return [row for plan in executor.plans for row in plan.loops]


@pytest.mark.parametrize("mode", ["ouro_delayed", "random_lookahead"])
def test_a_loop_is_submitted_before_the_score_of_the_loop_before_it_is_read(mode: ExitMode) -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, max_in_flight=2)
    core.add_local(engine_request(1, mode=mode, min_loops=1, threshold=0.9))
    while not loops_of(executor):
        core.step()
    executor.hold_readback = True
    for _ in range(5):
        core.step()
    first, second = loops_of(executor)
    assert (first.position, first.depth, first.want_score) == (3, 0, True)
    assert (second.position, second.depth) == (3, 1)
    executor.hold_readback = False
    drain(core)


def test_ouro_waits_for_the_score_of_a_loop_that_may_be_the_last() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, max_in_flight=2)
    core.add_local(engine_request(1, min_loops=1, threshold=0.9))
    while not loops_of(executor):
        core.step()
    executor.hold_readback = True
    for _ in range(5):
        core.step()
    assert [row.depth for row in loops_of(executor)] == [0]
    assert core.live() == {G: "awaits_score"}
    executor.hold_readback = False
    drain(core)


def test_a_fixed_depth_needs_no_result_up_to_the_bound_of_passes_in_flight() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, max_in_flight=9)
    request = engine_request(1, threshold=1.0, max_tokens=30)
    core.add_local(request)
    executor.hold_readback = True
    for _ in range(5):
        assert core.step() == []
        core.check()
    stages = [plan.stage for plan in executor.plans]
    assert stages == [
        *[Stage.PREFILL] * 4,
        *(Stage.CODA, Stage.PRELUDE, Stage.RECURRENT, Stage.RECURRENT, Stage.RECURRENT),
    ]
    executor.hold_readback = False
    assert outcomes(drain(core))[G].result == oracle(request)


@pytest.mark.parametrize("mode", ["ouro", "ouro_delayed", "random_lookahead", "trace"])
@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_no_loop_runs_beyond_the_exit_depth(mode: ExitMode, max_in_flight: int) -> None:
    executor = SimulatedExecutor(num_blocks=400)
    executor.one_by_one = True
    core = local_core(executor, max_in_flight=max_in_flight)
    requests = [
        engine_request(
            generation,
            (generation, 2),
            max_tokens=12,
            min_loops=1,
            mode=mode,
            trace=(4, *[1, 2, 3, 4] * 3)[:12] if mode == "trace" else (),
        )
        for generation in (1, 2, 3)
    ]
    for request in requests:
        core.add_local(request)
    ended = outcomes(drain(core))
    for request in requests:
        assert ended[request.generation].result == oracle(request)
    depths = [depth for request in requests for depth in ended[request.generation].depths[1:]]
    assert len(loops_of(executor)) == sum(depths)
    assert set(depths) > {2, 3}, "the scores are too alike to tell anything"
    assert core.statistics()["dropped_results"] == 0


def test_a_token_stays_on_the_device_until_its_prelude_and_never_after_the_last_output() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, max_in_flight=2)
    core.add_local(engine_request(1, max_tokens=3, threshold=1.0))
    drain(core)
    codas = [row for plan in executor.plans for row in plan.coda]
    preludes = [row for plan in executor.plans for row in plan.prelude]
    assert [row.keep_slot for row in codas] == [0, 0, None]
    assert [(row.token, row.output_index) for row in preludes] == [(None, 1), (None, 2)]


def test_synchronous_passes_name_every_token() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, max_in_flight=1)
    core.add_local(engine_request(1, max_tokens=3))
    tokens = outcomes(drain(core))[G].tokens
    preludes = [row for plan in executor.plans for row in plan.prelude]
    assert [row.token for row in preludes] == tokens[:2]
    assert all(row.keep_slot is None for plan in executor.plans for row in plan.coda)


def ends_early() -> tuple[int, ...]:
    """A prompt whose answer says EOS in its middle."""
    for first in range(50):
        tokens = oracle(engine_request(1, (first % 20, 6), threshold=1.0, max_tokens=12))[0]
        if EOS in tokens[1:8]:
            return (first % 20, 6)
    raise AssertionError("the simulated model never says EOS")


def test_work_submitted_before_eos_was_read_is_dropped_and_counted() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, max_in_flight=4)
    request = engine_request(1, ends_early(), threshold=1.0, max_tokens=12, ignore_eos=False)
    core.add_local(request)
    events = drain(core)
    outcome = outcomes(events)[G]
    assert outcome.result == oracle(request) and outcome.finish is FinishReason.STOP
    assert len(loops_of(executor)) > sum(outcome.depths[1:]), "nothing had run ahead"
    numbers = core.statistics()
    assert numbers["dropped_results"] == len(loops_of(executor)) - sum(outcome.depths[1:])
    assert numbers["output_tokens"] == len(outcome.tokens)
    at_rest(core)


def test_a_request_that_ended_keeps_its_memory_until_every_pass_of_it_retired() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor, max_in_flight=3)
    request = engine_request(1, ends_early(), threshold=1.0, max_tokens=12, ignore_eos=False)
    core.add_local(request)
    events: list[EngineEvent] = []
    while not (seen := outcomes(events).get(G)) or seen.finish is None:
        events += core.step()
        executor.finish_pass()
    assert Released(G) not in events
    assert core.live() == {G: "cancelling"}
    assert core.statistics()["slots_free"] == 3
    core.check()
    executor.eager = True
    assert drain(core) == [Released(G)]
    at_rest(core)


def test_a_cancelled_request_waits_for_its_passes_in_flight() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor, max_in_flight=2)
    core.add_local(engine_request(1, threshold=1.0))
    core.step()
    assert len(executor.plans) == 2
    core.cancel(G)
    for _ in range(2):
        assert core.step() == [] and core.live() == {G: "cancelling"}
        executor.finish_pass()
    assert core.step() == [Released(G)]
    at_rest(core)


def test_nothing_is_submitted_beyond_max_tokens() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, max_in_flight=50)
    core.add_local(engine_request(1, threshold=1.0, max_tokens=5))
    drain(core)
    stages = [plan.stage for plan in executor.plans]
    assert (stages.count(Stage.CODA), stages.count(Stage.PRELUDE)) == (5, 4)
    assert core.statistics()["dropped_results"] == 0


def test_a_result_out_of_sequence_is_dropped() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor, max_in_flight=2)
    core.add_local(engine_request(1))
    core.step()
    executor.finish_pass()
    executor.finish_pass()
    first, second = executor.collect()
    executor.inject(msgspec.structs.replace(second, sequence=9))
    executor.inject(first)
    executor.inject(second)
    core.step()
    assert core.statistics()["dropped_results"] == 1
    executor.eager = True
    assert outcomes(drain(core))[G].result == oracle(engine_request(1))


def test_a_failed_pass_fails_its_requests_once_though_more_of_them_is_in_flight() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor, max_in_flight=2)
    core.add_local(engine_request(1))
    core.step()
    executor.fail_next_pass = "scripted"
    executor.finish_pass()
    executor.finish_pass()
    events = core.step()
    assert outcomes(events)[G].error == "pass_failed" and events[-1] == Released(G)
    at_rest(core)
