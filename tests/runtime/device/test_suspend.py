"""Suspend, restore, discard, truncate: exact, bounded, in the order of passes.

Twin engines from one checkpoint: one runs a request undisturbed, the other suspends and restores it
into other blocks and another slot, while poison stands everywhere else.
"""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import CapacityError, ProtocolError, WorkerError
from rlt.runtime.executor import ThreadExecutor
from rlt.runtime.plans import CodaRow, ModelRunnerOutput, PreludeRow, SchedulerOutput, Stage
from rlt.runtime.types import BlockTables, Generation, SamplingParams
from rlt.runtime.worker import Worker, load_worker

from .checkpoints import CKPT
from .driver import Driver, Request

GREEDY = SamplingParams()
BLOCKS = 256


class Engine:
    """An executor over a poisoned pool, and a driver of its passes."""

    def __init__(self, snapshot_bytes: int = 1 << 20, **options: object) -> None:
        config = EngineConfig(
            model=str(CKPT),
            num_blocks=BLOCKS,
            num_slots=4,
            num_receive_slots=1,
            block_size=4,
            threads=1,
            device="cpu",
            **options,  # type: ignore[arg-type]
        )
        self.worker: Worker = load_worker(config, SystemClock(), lambda _: None)
        self.executor = ThreadExecutor(
            self.worker, num_slots=4, num_receive_slots=1, snapshot_bytes=snapshot_bytes
        )
        self.executor.prepare()
        storage = self.worker.parts.storage
        storage.kv.fill_(float("nan"))
        storage.hidden.fill_(float("nan"))
        self.driver = Driver(self.run, storage.geometry, BLOCKS)

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.executor.submit(plan)
        assert self.executor.wait(10.0)
        [output] = self.executor.collect()
        return output

    def started(self, generation: int, prompt: Sequence[int], max_tokens: int = 8) -> Request:
        slot = self.executor.admit(Generation(generation))
        assert slot is not None
        request = self.driver.start(slot, prompt, max_tokens)
        request.generation = Generation(generation)
        self.driver.prefill(request, 3)
        self.coda(request)
        return request

    def coda(self, request: Request) -> None:
        row = CodaRow(request.generation, request.slot, len(request.tokens), GREEDY, request.slot)
        output = self.driver.step(Stage.CODA, coda=(row,))
        request.tokens.append(output.tokens[0].token)

    def decode(self, request: Request, count: int) -> None:
        """At full depth, each token taken from the device."""
        for _ in range(count):
            self.prelude(request)
            for depth in range(4):
                self.loop(request, depth)
            self.coda(request)

    def prelude(self, request: Request) -> None:
        row = PreludeRow(request.generation, request.slot, None, len(request.tokens))
        self.driver.step(Stage.PRELUDE, prelude=(row,))

    def loop(self, request: Request, depth: int) -> None:
        self.driver.step(Stage.RECURRENT, loops=(self.driver.loop_row(request, depth),))

    def other_tables(self, request: Request) -> BlockTables:
        """As many blocks as it has, elsewhere."""
        again = self.driver.start(0, request.prompt, 8)
        return tuple(again.blocks)

    def move(self, request: Request) -> None:
        """Suspend, poison all it held, restore elsewhere."""
        storage = self.worker.parts.storage
        tables = tuple(request.blocks)
        self.executor.suspend(request.generation, tables)
        self.executor.synchronize()
        storage.kv[[block for plane in tables for block in plane]] = float("nan")
        storage.hidden[request.slot] = float("nan")
        others = [Generation(90)]  # one of them takes the slot that became free
        while self.executor.admit(others[-1]) != request.slot:
            others.append(Generation(others[-1] + 1))
        moved_to = self.other_tables(request)
        slot = self.executor.restore(request.generation, moved_to)
        assert slot is not None
        assert slot != request.slot
        request.slot, request.blocks = slot, list(moved_to)
        for other in others:
            self.executor.complete(other)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.executor.shutdown()


def twins(engines: list[Engine], **options: object) -> tuple[Engine, Engine]:
    engines += [Engine(**options), Engine(**options)]  # type: ignore[arg-type]
    return engines[0], engines[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_a_request_restored_elsewhere_goes_on_exactly_where_it_was(
    engines: list[Engine], layout: str, dtype: str
) -> None:
    still, moved = twins(engines, layout=layout, dtype=dtype)
    requests = [engine.started(1, [5, 6, 7, 8, 9]) for engine in (still, moved)]
    for count in (2, 0, 3):
        still.decode(requests[0], count)
        moved.decode(requests[1], count)
        moved.move(requests[1])
    still.decode(requests[0], 1)
    moved.decode(requests[1], 1)
    assert requests[0].tokens == requests[1].tokens
    states = [e.worker.parts.storage.hidden[r.slot] for e, r in zip(engines, requests, strict=True)]
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("loops_done", [0, 1, 3])
def test_a_token_suspended_between_its_loops_goes_on_with_the_next_one(
    engines: list[Engine], loops_done: int
) -> None:
    still, moved = twins(engines)
    requests = [engine.started(1, [5, 6, 7, 8, 9]) for engine in (still, moved)]
    for engine, request in zip(engines, requests, strict=True):
        engine.prelude(request)
        for depth in range(4):
            if depth == loops_done and engine is moved:
                engine.move(request)
            engine.loop(request, depth)
        engine.coda(request)
    assert requests[0].tokens == requests[1].tokens


def test_a_prompt_chunk_suspended_between_its_loops_goes_on_with_the_next_one(
    engines: list[Engine],
) -> None:
    still, moved = twins(engines)
    states = []
    for engine in (still, moved):
        slot = engine.executor.admit(Generation(1))
        assert slot is not None
        request = engine.driver.start(slot, list(range(2, 9)), 1)
        for depth in range(4):
            if depth == 2 and engine is moved:
                engine.move(request)
                assert engine.executor.memory_breakdown()["snapshots"] == 0
            engine.driver.step(
                Stage.PREFILL, prefill=(engine.driver.prefill_row(request, 0, 7, depth),)
            )
        states.append(engine.worker.parts.storage.hidden[request.slot])
        assert engine.worker.runner.chunk_bytes == 0
    assert torch.equal(states[0], states[1])


def test_blocks_and_slot_of_a_suspend_may_be_named_by_the_very_next_plan(
    engines: list[Engine],
) -> None:
    """Nothing waits: another request overwrites them next, then the first comes back."""
    engines.append(Engine())
    [engine] = engines
    first = engine.started(1, [5, 6, 7, 8, 9])
    engine.decode(first, 1)
    before = engine.worker.parts.storage.kv[list(first.blocks[2])].clone()
    hold, entered = threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        assert hold.wait(10.0)

    engine.executor._compute.post(held, "a hold")
    assert entered.wait(10.0)
    receipt = engine.executor.suspend(first.generation, tuple(first.blocks))
    assert engine.executor.capacity().unsettled == 1
    second = Request(Generation(2), first.slot, [3, 4, 5, 6, 7], first.blocks)
    assert engine.executor.admit(second.generation) == receipt.slot
    for depth in range(4):
        row = engine.driver.prefill_row(second, 0, 5, depth)
        engine.executor.submit(
            SchedulerOutput(sequence=1000 + depth, stage=Stage.PREFILL, prefill=(row,))
        )
    moved_to = engine.other_tables(first)
    assert engine.executor.restore(first.generation, moved_to) is not None
    assert engine.executor.capacity().unsettled == 2
    spare = tuple(engine.driver.start(0, [1], 1).blocks)
    engine.executor.truncate(second.generation, 0, spare)
    assert engine.executor.capacity().unsettled == 3
    hold.set()
    engine.executor.synchronize()
    assert engine.executor.capacity().unsettled == 0
    assert all(output.error is None for output in engine.executor.collect())
    after = engine.worker.parts.storage.kv[list(moved_to[2])]
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))


def test_the_receipt_tells_what_was_freed_and_kept_and_each_block_counts_once(
    engines: list[Engine],
) -> None:
    engines.append(Engine())
    [engine] = engines
    request = engine.started(1, [5, 6, 7, 8, 9])
    epoch = engine.executor.capacity().epoch
    twice = tuple(plane + plane[:1] for plane in request.blocks)
    receipt = engine.executor.suspend(request.generation, twice)
    blocks = sum(len(plane) for plane in request.blocks)
    geometry = engine.worker.parts.storage.geometry
    assert (receipt.generation, receipt.slot, receipt.num_blocks) == (1, 0, blocks)
    assert receipt.snapshot_bytes == blocks * geometry.block_bytes + geometry.hidden_bytes + 8
    assert engine.executor.memory_breakdown()["snapshots"] == receipt.snapshot_bytes
    assert engine.executor.capacity().epoch == epoch + 1
    assert engine.executor.capacity().free_slots == 4
    engine.executor.discard(request.generation)
    engine.executor.discard(request.generation)
    assert engine.executor.memory_breakdown()["snapshots"] == 0
    assert engine.executor.capacity().epoch == epoch + 2
    with pytest.raises(ProtocolError, match="not suspended"):
        engine.executor.restore(request.generation, tuple(request.blocks))


def test_beyond_the_bound_a_suspend_is_refused_and_changes_nothing(engines: list[Engine]) -> None:
    still, moved = twins(engines, snapshot_bytes=1000)
    requests = [engine.started(1, [5, 6, 7, 8, 9]) for engine in (still, moved)]
    before = moved.executor.capacity()
    with pytest.raises(CapacityError, match="--snapshot-bytes"):
        moved.executor.suspend(requests[1].generation, tuple(requests[1].blocks))
    assert moved.executor.capacity() == before
    assert moved.executor.memory_breakdown()["snapshots"] == 0
    still.decode(requests[0], 2)
    moved.decode(requests[1], 2)
    assert requests[0].tokens == requests[1].tokens


def test_a_restore_waits_for_a_slot_and_for_room_in_its_tables(engines: list[Engine]) -> None:
    engines.append(Engine())
    [engine] = engines
    request = engine.started(1, [5, 6, 7, 8, 9])
    tables = tuple(request.blocks)
    engine.executor.suspend(request.generation, tables)
    for other in range(2, 6):
        engine.executor.admit(Generation(other))
    assert engine.executor.restore(request.generation, tables) is None
    engine.executor.complete(Generation(4))
    with pytest.raises(ProtocolError, match="have no room"):
        engine.executor.restore(request.generation, tuple(plane[:1] for plane in tables))
    assert engine.executor.restore(request.generation, tables) == 2


def test_a_suspend_needs_a_slot_and_happens_once(engines: list[Engine]) -> None:
    engines.append(Engine())
    [engine] = engines
    with pytest.raises(ProtocolError, match="generation 7 holds no execution slot"):
        engine.executor.suspend(Generation(7), ((0,),) * 4)
    request = engine.started(1, [5, 6, 7])
    engine.executor.suspend(request.generation, tuple(request.blocks))
    engine.executor.admit(request.generation)
    with pytest.raises(ProtocolError, match="suspended already"):
        engine.executor.suspend(request.generation, tuple(request.blocks))


@pytest.mark.parametrize("broken", ["save_blocks", "load_blocks", "poison"])
def test_a_failure_between_passes_fails_that_requests_next_pass_by_name_and_no_other(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    engines.append(Engine())
    [engine] = engines
    first, second = (engine.started(n, [5, 6, 7, n]) for n in (1, 2))

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(f"rlt.runtime.worker.{broken}", fail)
    if broken == "poison":
        engine.executor.truncate(first.generation, 2, tuple(first.blocks))
    else:
        engine.executor.suspend(first.generation, tuple(first.blocks))
        assert engine.executor.restore(first.generation, tuple(first.blocks)) is not None
    engine.executor.synchronize()
    monkeypatch.undo()
    rows = tuple(
        CodaRow(request.generation, request.slot, 1, GREEDY) for request in (first, second)
    )
    output = engine.driver.step(Stage.CODA, coda=rows)
    [failure] = output.failed
    assert failure.generation == first.generation
    assert "MemoryError: no memory" in failure.reason
    assert [token.generation for token in output.tokens] == [second.generation]
    engine.executor.release(first.generation)
    engine.executor.synchronize()
    assert engine.driver.step(Stage.CODA, coda=rows[1:]).failed == ()


def test_a_release_right_after_a_restore_leaves_nothing(engines: list[Engine]) -> None:
    engines.append(Engine())
    [engine] = engines
    engine.executor.admit(Generation(1))
    request = engine.driver.start(0, list(range(2, 9)), 1)
    engine.driver.step(Stage.PREFILL, prefill=(engine.driver.prefill_row(request, 0, 7, 0),))
    engine.executor.suspend(request.generation, tuple(request.blocks))
    engine.executor.restore(request.generation, tuple(request.blocks))
    engine.executor.release(request.generation)
    engine.executor.synchronize()
    memory = engine.executor.memory_breakdown()
    assert (memory["snapshots"], memory["prompt_chunks"]) == (0, 0)
    assert engine.executor.capacity().free_slots == 4


@pytest.mark.parametrize("tokens", [0, 3, 4, 6, 8])
def test_truncated_positions_hold_no_number_and_the_others_are_untouched(
    engines: list[Engine], tokens: int
) -> None:
    engines.append(Engine())
    [engine] = engines
    request = engine.started(1, list(range(2, 12)))
    kv = engine.worker.parts.storage.kv
    before = kv.clone()
    engine.executor.truncate(request.generation, tokens, tuple(request.blocks))
    engine.executor.synchronize()
    for plane in request.blocks:
        for position in range(10):
            block, offset = plane[position // 4], position % 4
            held, was = kv[block, :, :, offset], before[block, :, :, offset]
            assert held.isnan().all() if position >= tokens else torch.equal(held, was)
    named = {block for plane in request.blocks for block in plane}
    others = [block for block in range(BLOCKS) if block not in named]
    assert torch.equal(kv[others].view(torch.int32), before[others].view(torch.int32))


def test_what_is_written_again_after_a_truncate_equals_a_fresh_run(engines: list[Engine]) -> None:
    fresh, cut = twins(engines)
    requests = [engine.started(1, [5, 6, 7, 8, 9]) for engine in (fresh, cut)]
    fresh.decode(requests[0], 5)
    cut.decode(requests[1], 4)
    cut.executor.truncate(Generation(1), 6, tuple(requests[1].blocks))
    del requests[1].tokens[2:]
    row = PreludeRow(Generation(1), requests[1].slot, requests[1].tokens[-1], 2)
    cut.driver.step(Stage.PRELUDE, prelude=(row,))
    for depth in range(4):
        cut.loop(requests[1], depth)
    cut.coda(requests[1])
    cut.decode(requests[1], 3)
    assert requests[0].tokens == requests[1].tokens


def test_after_shutdown_nothing_is_half_done(engines: list[Engine]) -> None:
    engines.append(Engine())
    [engine] = engines
    first, second = (engine.started(n, [5, 6, 7]) for n in (1, 2))
    engine.executor.suspend(second.generation, tuple(second.blocks))
    engine.executor.shutdown()
    before, held = engine.executor.capacity(), engine.executor.memory_breakdown()["snapshots"]
    with pytest.raises(WorkerError, match="a suspend was submitted after shutdown"):
        engine.executor.suspend(first.generation, tuple(first.blocks))
    with pytest.raises(WorkerError, match="a restore was submitted after shutdown"):
        engine.executor.restore(second.generation, tuple(second.blocks))
    with pytest.raises(WorkerError, match="a truncate was submitted after shutdown"):
        engine.executor.truncate(first.generation, 0, tuple(first.blocks))
    assert engine.executor.capacity() == before
    assert engine.executor.memory_breakdown()["snapshots"] == held
    engine.executor.release(first.generation)
    engine.executor.discard(second.generation)
    assert engine.executor.capacity().free_slots == 4
