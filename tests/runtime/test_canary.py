"""The canary: a write into a free block is seen, an ordinary engine's own writes are none."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlt.runtime.canary import WORD, Canary
from rlt.runtime.clock import SystemClock
from rlt.runtime.compute_thread import ComputeThread
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.executor import ThreadExecutor, build_executor
from rlt.runtime.kv_manager import KVManager, Lease
from rlt.runtime.plans import ModelRunnerOutput, SchedulerOutput
from rlt.runtime.types import Generation, KVGeometry

from .helpers import engine_request

GOLDEN = Path(__file__).parent.parent / "golden" / "ckpt"
G = Generation(1)
GEOMETRY = KVGeometry(
    num_layers=2,
    num_depths=2,
    num_kv_heads=1,
    head_dim=4,
    hidden_size=8,
    block_size=4,
    dtype="bfloat16",
)
BLOCKS = 12


def never(plan: SchedulerOutput) -> ModelRunnerOutput:
    raise AssertionError(f"no pass is meant to run: {plan}")


class Watched:
    """A KV manager over real memory with a canary in it."""

    def __init__(self) -> None:
        self.kv = torch.zeros(BLOCKS, 2, 2, 4, 1, 4, dtype=torch.bfloat16)
        self.compute = ComputeThread(never)
        self.compute.start()
        self.canary = Canary(self.kv, self.compute)
        self.manager = KVManager(num_blocks=BLOCKS, geometry=GEOMETRY, watch=self.canary)

    def grant(self, tokens: int = 4) -> list[int]:
        allocation = self.manager.allocate(G, tokens, (Lease.OWNER,))
        assert allocation is not None
        return [block for row in allocation.tables for block in row]

    def free(self) -> None:
        self.manager.end_lease(G, Lease.OWNER)

    def words(self, blocks: list[int]) -> torch.Tensor:
        return self.kv.view(torch.int16)[blocks]


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.compute.shutdown()


def test_free_memory_carries_the_pattern_at_first_and_again_when_it_was_given_back(
    watched: Watched,
) -> None:
    assert bool((watched.kv.view(torch.int16) == WORD).all())
    blocks = watched.grant()
    watched.kv[blocks] = 1.0
    watched.free()
    watched.compute.synchronize()
    assert bool((watched.words(blocks) == WORD).all())


def test_a_write_into_a_free_block_is_seen_when_the_block_is_granted(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    block = watched.grant()[1]
    watched.free()
    watched.compute.synchronize()
    watched.kv[block, 1, 0, 2] = 1.0
    with caplog.at_level(logging.ERROR):
        while block not in watched.grant(24):
            watched.free()
    assert watched.canary.hits == 1
    assert f"block {block} was written while it was free" in caplog.text


def test_a_write_into_a_free_block_is_seen_by_the_sweep_and_told_once(watched: Watched) -> None:
    watched.canary.sweep()
    assert watched.canary.hits == 0
    watched.kv[7, 0, 0, 0, 0, 0] = 0.0
    for _ in range(3):
        watched.canary.sweep()
    assert watched.canary.hits == 1
    watched.kv[7, 1, 1, 3, 0, 3] = 0.0
    watched.canary.sweep()
    assert watched.canary.hits == 2


def test_a_bounded_sweep_comes_round_to_every_free_block(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlt.runtime.canary.SWEEP_BYTES", 5 * watched.kv[0].nbytes)
    canary = Canary(watched.kv, watched.compute)
    watched.kv[BLOCKS - 1] = 0.0
    canary.sweep()
    canary.sweep()
    assert canary.hits == 0
    canary.sweep()
    assert canary.hits == 1


def test_a_granted_block_may_be_written_and_a_quarantined_one_too(watched: Watched) -> None:
    allocation = watched.manager.allocate(G, 4, (Lease.OWNER, Lease.RECEIVE))
    assert allocation is not None
    watched.manager.quarantine(G)
    watched.free()
    for row in allocation.tables:
        watched.kv[list(row)] = 1.0
    watched.canary.sweep()
    assert watched.canary.hits == 0
    watched.manager.end_quarantine(G)
    watched.compute.synchronize()
    blocks = [block for row in allocation.tables for block in row]
    assert bool((watched.words(blocks) == WORD).all()), "free again, and filled"


def test_a_grant_waits_for_the_fill_of_what_was_just_freed(watched: Watched) -> None:
    blocks = watched.grant(24)
    watched.kv[blocks] = 1.0
    release = threading.Event()
    watched.compute.post(lambda: _wait(release), "a slow job")
    watched.free()
    assert not bool((watched.words(blocks) == WORD).any()), "filled before what was submitted"
    release.set()
    assert sorted(watched.grant(24)) == sorted(blocks)
    watched.kv[blocks] = 2.0
    watched.compute.synchronize()
    assert bool((watched.kv[blocks] == 2.0).all()), "a fill met the next owner's bytes"
    assert watched.canary.hits == 0


def _wait(event: threading.Event) -> None:
    assert event.wait(20.0)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def executor(request: pytest.FixtureRequest) -> Iterator[ThreadExecutor]:
    config = EngineConfig(
        model=str(GOLDEN), num_blocks=64, num_slots=4, threads=1, dtype=request.param, canary=True
    )
    executor = build_executor(config)
    yield executor
    executor.shutdown()


def test_an_engine_that_preempts_and_evicts_raises_no_alarm_and_tells_a_real_one(
    executor: ThreadExecutor,
) -> None:
    config = SchedulerConfig(
        chunk_tokens=16, admission="incremental", prefix_cache=True, max_in_flight=2
    )
    core = EngineCore(executor, config, clock=SystemClock())
    for number in range(1, 9):
        prompt = range(3 + number, 43 + number)
        core.add_local(engine_request(number, prompt, max_tokens=60, max_loops=4))
    while not core.idle():
        core.step()
        executor.wait(0.01)
    numbers = core.statistics()
    assert numbers["preemptions"] > 0 and numbers["prefix_evictions"] > 0
    assert numbers["canary_hits"] == 0
    executor.synchronize()
    executor.storage.kv[:, 0, 0, 0] = 0.0
    numbers = core.statistics()
    assert numbers["canary_hits"] == numbers["blocks_free"] - numbers["blocks_cached"]
    executor.storage.kv.view(torch.int16).fill_(WORD)
    core.statistics()


def test_without_the_option_there_is_no_watch_and_no_figure() -> None:
    executor = build_executor(EngineConfig(model=str(GOLDEN), num_blocks=64, threads=1))
    try:
        assert executor.block_watch() is None
        core = EngineCore(executor, SchedulerConfig(chunk_tokens=16), clock=SystemClock())
        assert "canary_hits" not in core.statistics()
    finally:
        executor.shutdown()
