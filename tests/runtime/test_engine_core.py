"""EngineCore over the simulated executor: one request, many, stops, failures, stray results."""

import itertools

import msgspec
import pytest

from rlt.runtime.errors import Overloaded, ProtocolError, TooLong
from rlt.runtime.events import Released, RequestFailed, TokensProduced
from rlt.runtime.plans import FinishedLoop, ModelRunnerOutput, RowFailure, SampledToken, Stage
from rlt.runtime.types import FinishReason, Generation

from .helpers import alone, at_rest, drain, engine_request, local_core, outcomes
from .simulated_executor import EOS, SimulatedExecutor


def test_the_first_output_ran_every_loop_even_when_max_loops_is_less() -> None:
    tokens, depths, finish = alone(engine_request(1, max_loops=2, min_loops=1, threshold=1.0))
    assert depths == [4, 2, 2, 2]
    assert (len(tokens), finish) == (4, FinishReason.LENGTH)


def test_one_output_token_needs_no_loop_after_the_prompt() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, chunk_tokens=16)
    core.add_local(engine_request(1, max_tokens=1))
    drain(core)
    stages = [plan.stage for plan in executor.plans]
    assert stages == [Stage.PREFILL] * 4 + [Stage.CODA]
    assert core.statistics()["recurrent_loops"] == 0


def test_a_chunk_runs_all_its_loops_before_the_next_chunk_starts() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, chunk_tokens=2)
    core.add_local(engine_request(1, (1, 2, 3), max_tokens=1))
    drain(core)
    rows = [row for plan in executor.plans for row in plan.prefill]
    spans = [(row.range.start, row.range.stop, row.depth) for row in rows]
    assert spans == [(0, 2, d) for d in range(4)] + [(2, 3, d) for d in range(4)]
    assert [row.tokens for row in rows if row.tokens] == [(1, 2), (3,)]
    assert [row.keep_hidden for row in rows] == [False] * 7 + [True]


def test_prompts_share_a_pass_within_the_token_budget() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor, chunk_tokens=6)
    for generation in (1, 2, 3):
        core.add_local(engine_request(generation, (1, 2, 3), max_tokens=1))
    drain(core)
    assert [len(plan.prefill) for plan in executor.plans[:4]] == [2, 2, 2, 2]


def test_rows_of_mixed_depth_share_a_loop_pass() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor)
    for generation in range(1, 5):
        core.add_local(engine_request(generation, (generation, 2), max_tokens=12, min_loops=1))
    drain(core)
    depths = [{row.depth for row in plan.loops} for plan in executor.plans if plan.loops]
    assert any(len(mixed) > 1 for mixed in depths)


def test_at_most_one_prompt_pass_stands_between_two_loop_passes() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, chunk_tokens=2)
    core.add_local(engine_request(1, (1,), max_tokens=20, threshold=1.0))
    while core.statistics()["recurrent_loops"] == 0:
        core.step()
    before = len(executor.plans)
    core.add_local(engine_request(2, range(1, 20), max_tokens=1))
    drain(core)
    stages = [plan.stage for plan in executor.plans[before:] if plan.stage is not Stage.CODA]
    stages = stages[: stages.index(Stage.PREFILL) + 60]
    pairs = list(itertools.pairwise(stages))
    assert (Stage.PREFILL, Stage.PREFILL) not in pairs
    assert stages.count(Stage.PREFILL) > 20


def test_eos_is_part_of_the_output_and_stops_the_request() -> None:
    endless = alone(engine_request(1, (5, 6), max_tokens=50))[0]
    assert EOS in endless, "choose another prompt: the simulated model never says EOS"
    stopped = alone(engine_request(1, (5, 6), max_tokens=50, ignore_eos=False))
    assert stopped[0] == endless[: endless.index(EOS) + 1]
    assert stopped[2] is FinishReason.STOP


def test_a_stop_token_stops_even_when_eos_is_ignored() -> None:
    endless = alone(engine_request(1, max_tokens=8))[0]
    stopped = alone(engine_request(1, max_tokens=8, stop=(endless[2],)))
    assert stopped[0] == endless[: endless.index(endless[2]) + 1]
    assert stopped[2] is FinishReason.STOP


def test_exit_depths_follow_from_the_scores_of_each_token_alone() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor)
    core.add_local(engine_request(1, max_tokens=20, threshold=0.6, min_loops=2))
    outcome = outcomes(drain(core))[Generation(1)]
    by_position: dict[int, list[float]] = {}
    for score in executor.scores:
        by_position.setdefault(score.position, []).append(score.score)
    expected = [4]
    for _, hazards in sorted(by_position.items()):
        survival, depth = 1.0, 4
        for loop, hazard in enumerate(hazards, start=1):
            survival *= 1.0 - hazard
            if loop >= 2 and 1.0 - survival >= 0.6:
                depth = loop
        expected.append(depth)
    assert outcome.depths == expected
    assert set(expected[1:]) >= {2, 3}, "the scores are too alike to tell anything"


def test_a_fixed_depth_asks_for_no_score() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor)
    core.add_local(engine_request(1, threshold=1.0))
    drain(core)
    assert not any(row.want_score for plan in executor.plans for row in plan.loops)


def test_nothing_is_finalized_for_the_last_token() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor)
    core.add_local(engine_request(1, max_tokens=3, threshold=0.0, min_loops=1))
    drain(core)
    rows = [row for plan in executor.plans for row in plan.finalize]
    assert [len(row.targets) for row in rows] == [3]


def test_a_failed_pass_fails_its_requests_by_name_and_the_engine_goes_on() -> None:
    executor = SimulatedExecutor()
    core = local_core(executor)
    core.add_local(engine_request(1))
    core.step()
    executor.fail_next_pass = "out of memory"
    events = core.step()
    assert isinstance(events[0], RequestFailed) and events[0].code == "pass_failed"
    assert "out of memory" in events[0].message
    assert events[1] == Released(Generation(1))
    core.add_local(engine_request(2))
    assert outcomes(drain(core))[Generation(2)].result == alone(engine_request(2))
    at_rest(core)


def test_a_row_without_a_result_fails_its_request() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor)
    core.add_local(engine_request(1))
    core.step()
    executor.finish_pass()
    assert executor.collect()[0].finished_ranges
    executor.inject(ModelRunnerOutput(sequence=1, stage=Stage.PREFILL))
    assert outcomes(core.step())[Generation(1)].error == "pass_failed"


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.PRELUDE, Stage.RECURRENT, Stage.CODA])
def test_a_row_that_failed_alone_ends_its_request_with_the_devices_reason(stage: Stage) -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor)
    for number in (1, 2):
        core.add_local(engine_request(number))
    core.step()
    while executor.plans[-1].stage is not stage:
        executor.finish_pass()
        core.step()
    executor.finish_pass()
    [whole] = executor.collect()
    mine = {
        name: tuple(r for r in getattr(whole, name) if r.generation != Generation(1))
        for name in ("finished_ranges", "finished_loops", "gate_scores", "tokens")
    }
    failed = (RowFailure(Generation(1), "its snapshot was damaged"),)
    executor.inject(msgspec.structs.replace(whole, failed=failed, **mine))
    [ended] = [event for event in core.step() if isinstance(event, RequestFailed)]
    assert (ended.generation, ended.code) == (Generation(1), "pass_failed")
    assert "snapshot was damaged" in ended.message


def test_results_that_nobody_asked_for_are_dropped_and_counted() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor)
    core.add_local(engine_request(1))
    core.step()
    token = SampledToken(Generation(1), 0, 9, None)
    loop = FinishedLoop(Generation(8), 0, 0)
    executor.inject(ModelRunnerOutput(sequence=77, stage=Stage.CODA, tokens=(token,)))
    assert core.step() == []
    executor.finish_pass()
    real = executor.collect()[0]
    executor.inject(
        ModelRunnerOutput(
            sequence=1,
            stage=Stage.PREFILL,
            finished_ranges=real.finished_ranges * 2,
            tokens=(token,),
            finished_loops=(loop,),
        )
    )
    assert core.step() == []
    assert core.statistics()["dropped_results"] == 4
    executor.eager = True
    assert outcomes(drain(core))[Generation(1)].result == alone(engine_request(1))


def test_a_cancel_while_a_pass_runs_waits_for_that_pass() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor)
    core.add_local(engine_request(1))
    core.step()
    assert core.cancel(Generation(1)) and core.cancel(Generation(1))
    assert core.step() == [] and core.live() == {Generation(1): "cancelling"}
    executor.finish_pass()
    assert core.step() == [Released(Generation(1))]
    assert not core.cancel(Generation(1))
    at_rest(core)


def test_a_cancel_of_a_waiting_request_ends_it_at_once() -> None:
    core = local_core(SimulatedExecutor())
    core.add_local(engine_request(1))
    core.cancel(Generation(1))
    assert core.step() == [Released(Generation(1))]
    at_rest(core)


def test_what_can_never_fit_is_refused_at_once() -> None:
    core = local_core(SimulatedExecutor(num_blocks=8, max_positions=12))
    with pytest.raises(TooLong, match="need 12 blocks, the pool has 8"):
        core.add_local(engine_request(1, (1, 2, 3), max_tokens=3))
    with pytest.raises(TooLong, match="13 positions"):
        core.add_local(engine_request(2, (1, 2, 3), max_tokens=11))
    core.add_local(engine_request(3, (1, 2, 3), max_tokens=2))
    assert outcomes(drain(core))[Generation(3)].finish is FinishReason.LENGTH


def test_a_full_queue_says_overloaded() -> None:
    core = local_core(SimulatedExecutor(), max_waiting=2)
    core.add_local(engine_request(1))
    core.add_local(engine_request(2))
    with pytest.raises(Overloaded):
        core.add_local(engine_request(3))
    assert set(outcomes(drain(core))) == {1, 2}


def test_a_live_generation_cannot_be_added_again() -> None:
    core = local_core(SimulatedExecutor())
    core.add_local(engine_request(1))
    with pytest.raises(ProtocolError):
        core.add_local(engine_request(1))
    drain(core)


def test_a_range_at_another_depth_than_planned_is_dropped() -> None:
    executor = SimulatedExecutor(eager=False)
    core = local_core(executor)
    core.add_local(engine_request(1))
    core.step()
    executor.finish_pass()
    real = executor.collect()[0]
    strange = msgspec.structs.replace(real.finished_ranges[0], depth=2)
    executor.inject(msgspec.structs.replace(real, finished_ranges=(strange,)))
    assert outcomes(core.step())[Generation(1)].error == "pass_failed"
    assert core.statistics()["dropped_results"] == 1


@pytest.mark.parametrize("count", [None, 0, 3])
def test_logprobs_travel_with_their_token_when_asked_for(count: int | None) -> None:
    core = local_core(SimulatedExecutor())
    request = engine_request(1, max_tokens=2)
    sampling = msgspec.structs.replace(request.sampling, logprobs=count)
    core.add_local(msgspec.structs.replace(request, sampling=sampling))
    events = [event for event in drain(core) if isinstance(event, TokensProduced)]
    assert [len(event.logprobs) for event in events] == ([0, 0] if count is None else [1, 1])
