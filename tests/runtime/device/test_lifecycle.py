"""The executor's life: half-made, prepared, shut down, in any order and any number of times."""

import threading
import time
from collections.abc import Iterator

import pytest

from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import WorkerError
from rlt.runtime.executor import ThreadExecutor, build_executor
from rlt.runtime.plans import PreludeRow, SchedulerOutput, Stage
from rlt.runtime.slots import CapacityEpoch
from rlt.runtime.types import Generation
from rlt.runtime.worker import Worker

from .checkpoints import CKPT, golden_worker

G = [Generation(number) for number in range(10)]


def plan(sequence: int) -> SchedulerOutput:
    row = PreludeRow(G[1], 0, 3, 1)
    return SchedulerOutput(sequence=sequence, stage=Stage.PRELUDE, prelude=(row,))


@pytest.fixture
def made() -> Iterator[ThreadExecutor]:
    worker = golden_worker(num_blocks=16, num_slots=2, num_receive_slots=1, threads=1)
    executor = ThreadExecutor(worker, num_slots=2, num_receive_slots=1, snapshot_bytes=1 << 20)
    yield executor
    executor.shutdown()


def compute_threads() -> int:
    return sum(thread.name == "rlt-compute" for thread in threading.enumerate())


def test_an_executor_that_was_never_prepared_has_no_thread_and_shuts_down(
    made: ThreadExecutor,
) -> None:
    assert compute_threads() == 0
    with pytest.raises(WorkerError, match="before prepare"):
        made.submit(plan(1))
    made.synchronize()
    made.shutdown()
    made.shutdown()
    assert made.wait(5.0) is False
    assert made.collect() == []
    with pytest.raises(WorkerError, match="shut down"):
        made.prepare()
    assert compute_threads() == 0


def test_prepare_twice_makes_one_thread(made: ThreadExecutor) -> None:
    made.prepare()
    made.prepare()
    assert compute_threads() == 1
    made.warm_up()
    made.warm_up()
    made.submit(plan(1))
    made.synchronize()
    made.synchronize()
    assert len(made.collect()) == 1


def test_a_thread_that_cannot_be_set_up_is_told_and_may_be_tried_again(
    made: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(worker: Worker) -> None:
        raise RuntimeError("no such core")

    monkeypatch.setattr(Worker, "enter_thread", fail)
    with pytest.raises(RuntimeError, match="no such core"):
        made.prepare()
    monkeypatch.undo()
    made.prepare()
    made.submit(plan(1))
    assert made.wait(10.0)


def test_building_that_fails_midway_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(worker: Worker) -> None:
        raise RuntimeError("no such core")

    monkeypatch.setattr(Worker, "enter_thread", fail)
    with pytest.raises(RuntimeError, match="no such core"):
        build_executor(
            EngineConfig(model=str(CKPT), num_blocks=8, device="cpu"), progress=lambda _: None
        )
    assert compute_threads() == 0


def test_a_caller_that_waits_for_a_pass_wakes_when_the_engine_shuts_down(
    made: ThreadExecutor,
) -> None:
    made.prepare()
    heard: list[bool] = []
    waiter = threading.Thread(target=lambda: heard.append(made.wait(30.0)))
    waiter.start()
    started_s = time.monotonic()
    made.shutdown()
    waiter.join()
    assert heard == [False]
    assert time.monotonic() - started_s < 10


def test_shutdown_with_passes_and_suspends_waiting_answers_every_pass(
    made: ThreadExecutor,
) -> None:
    made.prepare()
    entered, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert let_go.wait(10.0)

    made._compute.post(hold, "a hold")
    assert entered.wait(10.0)
    made.admit(G[1])
    made.submit(plan(1))
    made.suspend(G[1], ((0,), (1,), (2,), (3,)))
    made.submit(plan(2))
    stopper = threading.Thread(target=made.shutdown)
    stopper.start()
    with pytest.raises(WorkerError, match="after shutdown"):
        while True:
            made.submit(plan(3))
    let_go.set()
    stopper.join()
    outputs = made.collect()
    assert [output.sequence for output in outputs[:2]] == [1, 2]
    assert all("did not run" in str(output.error) for output in outputs)
    made.discard(G[1])
    assert made.memory_breakdown()["snapshots"] == 0


@pytest.mark.parametrize("end", ["complete", "cancel_admission", "release", "discard"])
def test_a_thread_blocked_on_capacity_sleeps_until_some_is_released(
    made: ThreadExecutor, end: str
) -> None:
    made.prepare()
    made.admit(G[1])
    if end == "discard":
        made.suspend(G[1], ((0,), (1,), (2,), (3,)))
    epoch = made.capacity().epoch
    assert made.wait_capacity(epoch, 0.01) is False
    heard: list[bool] = []
    waiter = threading.Thread(target=lambda: heard.append(made.wait_capacity(epoch, 30.0)))
    waiter.start()
    made.discard(G[5])
    made.complete(G[6])  # nothing is released by these two
    getattr(made, end)(G[1])
    waiter.join()
    assert heard == [True]
    assert made.wait_capacity(epoch, 0.0) is True


def test_a_closed_epoch_wakes_everybody() -> None:
    epoch = CapacityEpoch()
    heard: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: heard.append(epoch.wait_beyond(0, 30.0))) for _ in range(3)
    ]
    for waiter in waiters:
        waiter.start()
    epoch.close()
    for waiter in waiters:
        waiter.join()
    assert heard == [False] * 3
