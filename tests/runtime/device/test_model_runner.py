"""What one pass does: order of work, one call per linear layer, results by kind, no stale reads."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from rlt.kernels.linear import Linear
from rlt.runtime.errors import InvariantBroken
from rlt.runtime.model_runner import ModelRunner
from rlt.runtime.plans import CodaRow, PreludeRow, SchedulerOutput, Stage
from rlt.runtime.types import Generation, SamplingParams, TokenRange
from rlt.runtime.worker import Worker

from .checkpoints import golden_worker
from .driver import Driver, Request

GREEDY = SamplingParams()


@pytest.fixture
def worker() -> Iterator[Worker]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield golden_worker(block_size=4, num_blocks=512)
    torch.set_num_threads(threads)


@pytest.fixture
def driver(worker: Worker) -> Driver:
    worker.parts.storage.kv.fill_(float("nan"))
    worker.parts.storage.hidden.fill_(float("nan"))
    return Driver(worker.run, worker.parts.storage.geometry, 512)


def started(driver: Driver, slot: int, prompt: list[int]) -> Request:
    """A request whose prompt ran and whose first output is embedded, ready for loop 1."""
    request = driver.start(slot, prompt, 4)
    driver.prefill(request, 64)
    driver.coda([request], GREEDY)
    driver.prelude([request])
    return request


def test_a_pass_over_prompt_and_decode_rows_calls_each_linear_layer_once(
    worker: Worker, driver: Driver
) -> None:
    decodes = [started(driver, slot, [3] * (slot + 2)) for slot in range(3)]
    for depth in range(2):
        driver.step(Stage.RECURRENT, loops=(driver.loop_row(decodes[2], depth),))
    prompts = [driver.start(slot, [7, 8, 9, 1, 2], 4) for slot in (3, 4)]
    driver.step(Stage.PREFILL, prefill=(driver.prefill_row(prompts[1], 0, 5, 0),))
    calls: Counter[Linear] = Counter()
    model = worker.parts.model
    assert isinstance(model, torch.nn.Module)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    hooks = [
        linear.register_forward_hook(lambda module, _, __: calls.update([module]))
        for linear in linears
    ]
    output = driver.step(
        Stage.PREFILL,
        prefill=(driver.prefill_row(prompts[0], 0, 3, 0), driver.prefill_row(prompts[1], 0, 5, 1)),
        loops=tuple(driver.loop_row(decodes[n], depth) for n, depth in ((0, 0), (1, 0), (2, 2))),
    )
    for hook in hooks:
        hook.remove()
    in_layers = [linear for linear in linears if linear is not getattr(model, "lm_head", None)]
    assert len(in_layers) == 8
    assert calls == Counter(in_layers)
    assert len(output.finished_ranges) == 2
    assert len(output.finished_loops) == 3


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_mixed_passes_give_the_same_states_as_separate_ones(layout: str) -> None:
    worker = golden_worker(block_size=4, num_blocks=512, layout=layout)
    worker.parts.storage.kv.fill_(float("nan"))
    worker.parts.storage.hidden.fill_(float("nan"))
    driver = Driver(worker.run, worker.parts.storage.geometry, 512)
    alone = started(driver, 0, [5, 6, 7, 8, 9])
    mixed = started(driver, 1, [5, 6, 7, 8, 9])
    prompts = [driver.start(slot, [11, 12, 13, 14, 15, 16], 2) for slot in (2, 3)]
    chunk = 3 if layout == "last_exited" else 1
    for start in range(0, 6, chunk):
        for depth in range(4):
            rows = [driver.prefill_row(prompt, start, chunk, depth) for prompt in prompts]
            driver.step(Stage.RECURRENT, loops=(driver.loop_row(alone, depth),))
            driver.step(Stage.PREFILL, prefill=rows[:1])
            output = driver.step(
                Stage.RECURRENT, prefill=rows[1:], loops=(driver.loop_row(mixed, depth),)
            )
            assert [f.range for f in output.finished_ranges] == [TokenRange(start, start + chunk)]
            assert [f.generation for f in output.finished_loops] == [mixed.generation]
        for request in (alone, mixed):
            request.tokens.append(42)
        driver.prelude([alone, mixed])
    hidden = worker.parts.storage.hidden
    torch.testing.assert_close(hidden[2], hidden[3], atol=1e-4, rtol=1e-4)
    for depth in range(4):
        driver.step(Stage.RECURRENT, loops=(driver.loop_row(alone, depth),))
        driver.step(Stage.RECURRENT, loops=(driver.loop_row(mixed, depth),))
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-4, rtol=1e-4)
    assert not hidden[:4].isnan().any()


def test_layout_shared_refuses_several_positions_in_one_prompt_row() -> None:
    worker = golden_worker(layout="shared", num_blocks=64)
    driver = Driver(worker.run, worker.parts.storage.geometry, 64)
    row = driver.prefill_row(driver.start(0, [1, 2, 3], 1), 0, 2, 0)
    plan = SchedulerOutput(sequence=1, stage=Stage.PREFILL, prefill=(row,))
    with pytest.raises(InvariantBroken, match="2 positions"):
        worker.runner.run(plan)


def test_layout_shared_writes_one_plane_whatever_the_depth() -> None:
    worker = golden_worker(layout="shared", block_size=4, num_blocks=64)
    kv = worker.parts.storage.kv
    kv.fill_(float("nan"))
    driver = Driver(worker.run, worker.parts.storage.geometry, 64)
    request = started(driver, 0, [5, 6, 7])
    driver.step(Stage.RECURRENT, loops=(driver.loop_row(request, 0),))
    first = kv[request.blocks[0][0]].clone()
    driver.step(Stage.RECURRENT, loops=(driver.loop_row(request, 1),))
    second = kv[request.blocks[0][0]]
    assert torch.equal(first[:, :, :3], second[:, :, :3])
    assert not torch.equal(first[:, :, 3], second[:, :, 3])
    others = [block for block in range(64) if block not in request.blocks[0]]
    assert len(request.blocks) == 1
    assert kv[others].isnan().all()


def test_finalize_runs_before_the_loops_that_read_it(worker: Worker, driver: Driver) -> None:
    requests = [started(driver, slot, [5, 6, 7]) for slot in (0, 1)]
    for request in requests:
        driver.step(Stage.RECURRENT, loops=(driver.loop_row(request, 0),))
    ends = [driver.finalize_row(request, 1) for request in requests]
    for request in requests:
        request.tokens.append(42)
    driver.prelude(requests)
    for depth in range(2):
        first, second = (driver.loop_row(request, depth) for request in requests)
        if depth == 0:
            driver.step(Stage.RECURRENT, finalize=(ends[0],))
            driver.step(Stage.RECURRENT, loops=(first,))
            driver.step(Stage.RECURRENT, finalize=(ends[1],), loops=(second,))
        else:
            driver.step(Stage.RECURRENT, loops=(first, second))
    hidden = worker.parts.storage.hidden
    assert not hidden[:2].isnan().any()  # depth 1 of the earlier token exists by finalize alone
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-5, rtol=1e-5)


def test_only_asked_for_scores_come_back_with_what_produced_them(driver: Driver) -> None:
    requests = [started(driver, slot, [slot + 1] * 3) for slot in range(3)]
    rows = [
        driver.loop_row(request, 0, want_score=slot != 1) for slot, request in enumerate(requests)
    ]
    output = driver.step(Stage.RECURRENT, loops=tuple(rows))
    assert [(s.generation, s.position, s.depth) for s in output.gate_scores] == [
        (1, 3, 0),
        (3, 3, 0),
    ]
    assert all(0 < score.score < 1 for score in output.gate_scores)
    assert [loop.generation for loop in output.finished_loops] == [1, 2, 3]


def test_a_finished_range_is_stamped_and_says_when_the_hidden_state_stands(
    worker: Worker, driver: Driver
) -> None:
    request = driver.start(5, list(range(10)), 1)
    driver.prefill(request, 6)
    ranges = [item for output in driver.outputs for item in output.finished_ranges]
    assert [(r.depth, r.range) for r in ranges] == [
        (depth, TokenRange(*span)) for span in ((0, 6), (6, 10)) for depth in range(4)
    ]
    assert [r.hidden_ready for r in ranges] == [False] * 7 + [True]
    assert all(earlier.at_s <= later.at_s for earlier, later in itertools.pairwise(ranges))
    assert not worker.parts.storage.hidden[5].isnan().any()
    assert worker.parts.storage.hidden[:5].isnan().all()


def test_a_chunks_state_is_dropped_after_its_last_loop_and_on_request(
    worker: Worker, driver: Driver
) -> None:
    request = driver.start(0, list(range(10)), 1)
    driver.prefill(request, 10)
    assert worker.runner.chunk_bytes == 0
    driver.step(Stage.PREFILL, prefill=(driver.prefill_row(request, 0, 10, 0),))
    assert worker.runner.chunk_bytes == 10 * 64 * 4
    worker.runner.forget(request.generation)
    assert worker.runner.chunk_bytes == 0


def test_a_later_loop_without_its_chunks_state_is_an_error(worker: Worker, driver: Driver) -> None:
    request = driver.start(0, list(range(10)), 1)
    plan = SchedulerOutput(
        sequence=1, stage=Stage.PREFILL, prefill=(driver.prefill_row(request, 0, 10, 2),)
    )
    with pytest.raises(InvariantBroken, match="generation 1"):
        worker.runner.run(plan)
    output = worker.run(plan)
    assert output.error is not None
    assert "InvariantBroken" in output.error
    assert worker.counters.failed_passes == 1


def test_writes_stay_within_the_blocks_of_a_row(worker: Worker, driver: Driver) -> None:
    request = started(driver, 0, [5, 6, 7])
    for depth in range(4):
        driver.step(Stage.RECURRENT, loops=(driver.loop_row(request, depth),))
    kv = worker.parts.storage.kv
    written = torch.zeros(kv.shape[0], 4, dtype=torch.bool)
    for plane in request.blocks:
        written[plane[0]] = True  # positions 0..3 of 4: the prompt and one token
    clean = kv.isnan().all(-1).all(-1).all(1).all(1)  # [block, offset]
    assert torch.equal(~clean, written)


def test_counters_tell_prompt_loops_from_decode_loops(worker: Worker, driver: Driver) -> None:
    request = started(driver, 0, [5, 6, 7, 8, 9])
    driver.step(Stage.RECURRENT, loops=(driver.loop_row(request, 0),))
    counters = worker.counters
    assert counters.passes == len(driver.outputs)
    assert (counters.prefill_tokens, counters.prefill_loop_tokens) == (5, 20)
    assert (counters.recurrent_row_loops, counters.coda_rows) == (1, 1)


def test_coda_reads_the_slot_it_is_given(worker: Worker, driver: Driver) -> None:
    requests = [started(driver, slot, [slot * 30 + 1, 2, 3]) for slot in range(3)]
    first = [request.tokens[0] for request in requests]
    hidden = worker.parts.storage.hidden
    for request in requests:
        driver.prefill(request, 64)
    hidden[70] = hidden[2]  # as a worker connector lands it in a receive slot
    rows = (CodaRow(Generation(9), 70, 0, GREEDY), CodaRow(Generation(1), 0, 0, GREEDY))
    output = driver.step(Stage.CODA, coda=rows)
    assert [token.token for token in output.tokens] == [first[2], first[0]]
    assert [token.generation for token in output.tokens] == [9, 1]


def test_prelude_embeds_into_its_slots(worker: Worker, driver: Driver) -> None:
    rows = tuple(PreludeRow(Generation(n), slot, n, 1) for n, slot in ((4, 9), (8, 2)))
    driver.step(Stage.PRELUDE, prelude=rows)
    with torch.inference_mode():
        want = worker.parts.model.embed(torch.tensor([4, 8]))
    assert torch.equal(worker.parts.storage.hidden[[9, 2]], want)


def test_bfloat16_follows_float32_closely() -> None:
    states = []
    for dtype in ("float32", "bfloat16"):
        worker = golden_worker(dtype=dtype, num_blocks=64)
        driver = Driver(worker.run, worker.parts.storage.geometry, 64)
        driver.prefill(driver.start(0, [5, 6, 7, 8, 9], 1), 3)
        states.append(worker.parts.storage.hidden[0].float())
    assert torch.nn.functional.cosine_similarity(states[0], states[1], dim=0) > 0.999


def test_no_pass_reaches_autograd(worker: Worker, driver: Driver) -> None:
    started(driver, 0, [5, 6, 7])
    assert not worker.parts.storage.hidden.requires_grad
    assert isinstance(worker.runner, ModelRunner)
