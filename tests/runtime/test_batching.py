"""What shares a pass: cohorts without refill, prompts beside decode rows, and whose prompt is next.

Also layout shared, whose prompts advance one position at a time.
"""

import itertools

import pytest

from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import EngineEvent
from rlt.runtime.passes import MAX_PASSED_OVER
from rlt.runtime.plans import Stage
from rlt.runtime.types import Generation

from .helpers import at_rest, drain, engine_request, local_core, outcomes
from .oracle import oracle
from .scripted_handoff import Pair, Side
from .simulated_executor import SimulatedExecutor

G = Generation(1)


def run_until_it_loops(core: EngineCore) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while core.statistics()["recurrent_loops"] == 0:
        events += core.step()
    return events


def stages_of(executor: SimulatedExecutor) -> list[Stage]:
    return [plan.stage for plan in executor.plans]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("refill", [True, False])
def test_without_refill_a_cohorts_coda_waits_for_its_last_member(
    refill: bool, max_in_flight: int
) -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, chunk_tokens=8, refill=refill, max_in_flight=max_in_flight)
    traces = ((4, 1, 1, 1), (4, 3, 2, 1), (4, 2, 4, 4))
    for generation, trace in enumerate(traces, start=1):
        core.add_local(engine_request(generation, (1, 2), mode="trace", trace=trace, min_loops=1))
    ended = outcomes(drain(core))
    assert [tuple(ended[Generation(g)].depths) for g in (1, 2, 3)] == list(traces)
    codas = [len(plan.coda) for plan in executor.plans if plan.coda]
    loops = [len(plan.loops) for plan in executor.plans if plan.loops]
    if refill:
        assert len(codas) > 4
    else:
        assert codas == [3] * 4
        # loops of the tokens' first to fourth depth: whoever exited leaves its place empty
        assert loops == [3, 2, 1, 3, 2, 1, 1, 3, 1, 1, 1]


def test_a_prompt_that_is_done_joins_a_cohort_at_its_next_coda() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, refill=False, mixed_batches=True)
    core.add_local(engine_request(1, threshold=1.0, max_tokens=6))
    while core.statistics()["recurrent_loops"] < 5:
        core.step()
    core.add_local(engine_request(2, threshold=1.0, max_tokens=4))
    drain(core)
    codas = [[row.generation for row in plan.coda] for plan in executor.plans if plan.coda]
    joined = codas.index([G, Generation(2)])
    assert codas[:joined] == [[G]] * joined and joined < 4


def test_a_loop_pass_takes_prompt_rows_too_so_that_no_decode_waits_for_a_prompt() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, mixed_batches=True)
    core.add_local(engine_request(1, threshold=1.0, max_tokens=20))
    events = run_until_it_loops(core)
    before = len(executor.plans)
    core.add_local(engine_request(2, range(1, 10), max_tokens=2))
    ended = outcomes(events + drain(core))
    later = executor.plans[before:]
    assert Stage.PREFILL not in [plan.stage for plan in later]
    mixed = [plan for plan in later if plan.prefill]
    assert len(mixed) == 3 * 4 and all(plan.loops for plan in mixed)
    assert ended[Generation(2)].result == oracle(engine_request(2, range(1, 10), max_tokens=2))


def test_chunk_bounds_do_not_depend_on_neighbours() -> None:
    def spans(neighbours: int, mixed_batches: bool) -> list[tuple[int, int]]:
        executor = SimulatedExecutor(num_blocks=400)
        core = local_core(executor, mixed_batches=mixed_batches, token_budget=6)
        for generation in range(2, 2 + neighbours):
            core.add_local(engine_request(generation, (1,), max_tokens=20))
        core.step()
        core.add_local(engine_request(1, range(11), max_tokens=1))
        drain(core)
        rows = [row for plan in executor.plans for row in plan.prefill]
        return [(r.range.start, r.range.stop) for r in rows if r.generation == 1 and r.depth == 0]

    found = {tuple(spans(n, mixed)) for n in range(4) for mixed in (True, False)}
    assert found == {((0, 4), (4, 8), (8, 11))}


def test_where_no_chunk_fits_beside_the_decode_rows_prompts_get_passes_of_their_own() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, mixed_batches=True, token_budget=4)
    core.add_local(engine_request(1, threshold=1.0, max_tokens=20))
    run_until_it_loops(core)
    before = len(executor.plans)
    core.add_local(engine_request(2, range(1, 10), max_tokens=2))
    drain(core)
    later = executor.plans[before:]
    assert not any(plan.prefill and plan.loops for plan in later)
    stages = [plan.stage for plan in later if plan.stage in (Stage.PREFILL, Stage.RECURRENT)]
    assert (Stage.PREFILL, Stage.PREFILL) not in itertools.pairwise(stages)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("bound", [1, 2, 5])
@pytest.mark.parametrize("threshold", [1.0, 0.9])
def test_prompt_passes_between_two_loop_passes_are_bounded(
    bound: int, max_in_flight: int, threshold: float
) -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor, chunk_tokens=2, prefill_passes=bound, max_in_flight=max_in_flight)
    core.add_local(engine_request(1, (1,), max_tokens=20, threshold=threshold, min_loops=1))
    run_until_it_loops(core)
    before = len(executor.plans)
    core.add_local(engine_request(2, range(1, 15), max_tokens=1))
    drain(core)
    runs = itertools.groupby(
        stage for stage in stages_of(executor)[before:] if stage is not Stage.CODA
    )
    lengths = [len(list(run)) for stage, run in runs if stage is Stage.PREFILL]
    assert max(lengths) <= bound and sum(lengths) >= 25
    if max_in_flight == 1:
        assert bound in lengths


def test_prompts_of_lower_priority_numbers_run_first() -> None:
    executor = SimulatedExecutor(num_blocks=400)
    core = local_core(executor)
    for generation, priority in ((1, 5), (2, 0), (3, -1), (4, 0)):
        request = engine_request(generation, range(4), max_tokens=1, priority=priority)
        core.add_local(request)
    drain(core)
    order = [row.generation for plan in executor.plans for row in plan.prefill if row.depth == 0]
    assert order == [3, 2, 4, 1]


def test_a_prompt_of_low_priority_is_passed_over_only_so_often() -> None:
    executor = SimulatedExecutor(num_blocks=400, num_slots=2)
    core = local_core(executor)
    core.add_local(engine_request(1, range(12), max_tokens=1, priority=9))
    core.step()
    for generation in range(2, 40):
        core.add_local(engine_request(generation, range(4), max_tokens=1, priority=0))
    drain(core)
    order = [plan.prefill[0].generation for plan in executor.plans if plan.prefill]
    turns = [place for place, generation in enumerate(order) if generation == G]
    assert len(turns) == 12
    gaps = [later - earlier - 1 for earlier, later in itertools.pairwise(turns)]
    assert max(gaps) == MAX_PASSED_OVER


def test_layout_shared_runs_a_prompt_position_by_position_and_many_prompts_per_wave() -> None:
    executor = SimulatedExecutor(layout="shared")
    core = local_core(executor)
    requests = [engine_request(g, (g, 2, 3), max_tokens=2) for g in (1, 2, 3)]
    for request in requests:
        core.add_local(request)
    ended = outcomes(drain(core))
    waves = [plan.prefill for plan in executor.plans if plan.prefill]
    assert [(len(wave), wave[0].depth, wave[0].range.start) for wave in waves] == [
        (3, depth, position) for position in range(3) for depth in range(4)
    ]
    assert all(len(row.range) == 1 for wave in waves for row in wave)
    assert not any(plan.finalize for plan in executor.plans)
    for request in requests:
        assert ended[request.generation].result == oracle(request, "shared")
    assert core.statistics()["blocks_total"] == 40
    at_rest(core)


def test_layout_shared_takes_one_plane_of_blocks() -> None:
    core = local_core(SimulatedExecutor(layout="shared"))
    core.add_local(engine_request(1, (1, 2, 3), max_tokens=4))  # 6 positions, 2 in a block
    core.step()
    assert core.statistics()["blocks_free"] == 40 - 3


def test_the_two_layouts_answer_differently() -> None:
    request = engine_request(1, (1, 2, 3), max_tokens=8)
    assert oracle(request, "shared")[0] != oracle(request, "last_exited")[0]


def test_layout_shared_sends_a_position_after_its_last_loop_and_continues_on_d() -> None:
    pair = Pair(Side(SimulatedExecutor(layout="shared")), Side(SimulatedExecutor(layout="shared")))
    request = engine_request(1, (1, 2, 3, 4, 5), max_tokens=6)
    pair.start(request)
    pair.settle()
    ranges = pair.prefill.connector.ranges
    assert [(r.depth, r.range.start, len(r.range)) for r in ranges] == [
        (0, position, 1) for position in range(5)
    ]
    assert [r.hidden_ready for r in ranges] == [False] * 4 + [True]
    assert outcomes(pair.decode.events)[G].result == oracle(request, "shared")
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)
