"""The executor: slots, one result per pass in order, events, errors that stay in their pass."""

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import ProtocolError, WorkerError
from rlt.runtime.executor import ThreadExecutor, build_executor
from rlt.runtime.interfaces import Executor
from rlt.runtime.model_runner import ModelRunner
from rlt.runtime.plans import (
    CodaRow,
    ModelRunnerOutput,
    PrefillRow,
    PreludeRow,
    SchedulerOutput,
    Stage,
)
from rlt.runtime.types import Generation, SamplingParams, TokenRange
from rlt.runtime.worker import Worker

from .checkpoints import CKPT

G = [Generation(number) for number in range(10)]


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    config = EngineConfig(
        model=str(CKPT), num_blocks=64, num_slots=2, num_receive_slots=1, threads=1, device="cpu"
    )
    made = build_executor(config, progress=lambda _: None)
    yield made
    made.shutdown()


def prelude(sequence: int, token: int = 3) -> SchedulerOutput:
    return SchedulerOutput(
        sequence=sequence, stage=Stage.PRELUDE, prelude=(PreludeRow(G[1], 0, token, 1),)
    )


def chunk(sequence: int, generation: Generation, depth: int = 0) -> SchedulerOutput:
    row = PrefillRow(
        generation, 0, depth, TokenRange(0, 3), (1, 2, 3) if depth == 0 else (), (0,), False, False
    )
    return SchedulerOutput(sequence=sequence, stage=Stage.PREFILL, prefill=(row,))


def finished(executor: ThreadExecutor, count: int) -> list[ModelRunnerOutput]:
    outputs: list[ModelRunnerOutput] = []
    while len(outputs) < count:
        assert executor.wait(10.0)
        outputs += executor.collect()
    return outputs


class Held:
    """Holds the compute thread inside a pass until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        run = ModelRunner.run

        def held_run(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
            self.entered.set()
            assert self.let_go.wait(10.0)
            return run(runner, plan)

        monkeypatch.setattr(ModelRunner, "run", held_run)


def test_it_is_an_executor_of_the_runtimes_protocol(executor: ThreadExecutor) -> None:
    as_protocol: Executor = executor
    limits = as_protocol.admission_limits()
    assert (limits.num_blocks, limits.num_slots, limits.num_receive_slots) == (64, 2, 1)
    assert limits.max_positions == 512
    capabilities = as_protocol.capabilities()
    assert capabilities.geometry.block_bytes == executor.storage.kv[0].nbytes
    assert capabilities.device == "cpu"
    assert capabilities.model.num_loops == capabilities.geometry.num_depths == 4


def test_slots_are_given_once_and_come_back(executor: ThreadExecutor) -> None:
    assert [executor.admit(G[1]), executor.admit(G[1]), executor.admit(G[2])] == [0, 0, 1]
    assert executor.admit(G[3]) is None
    assert executor.admit_receive(G[1]) == 2
    assert executor.admit_receive(G[2]) is None
    assert (executor.capacity().free_slots, executor.capacity().free_receive_slots) == (0, 0)
    executor.complete(G[1])
    assert executor.admit(G[3]) == 0
    assert executor.admit_receive(G[2]) == 2


@pytest.mark.parametrize("end", ["complete", "release", "cancel_admission", "end_receive"])
def test_the_epoch_moves_exactly_when_capacity_is_released(
    executor: ThreadExecutor, end: str
) -> None:
    executor.admit(G[1])
    executor.admit_receive(G[1])
    before = executor.capacity().epoch
    getattr(executor, end)(G[1])
    assert executor.capacity().epoch == before + 1
    getattr(executor, end)(G[1])
    getattr(executor, end)(G[7])
    assert executor.capacity().epoch == before + 1


def test_the_exported_hidden_row_is_the_execution_slot(executor: ThreadExecutor) -> None:
    executor.admit(G[1])
    slot = executor.admit(G[2])
    assert executor.export_hidden(G[2]) == slot
    with pytest.raises(ProtocolError, match="generation 5"):
        executor.export_hidden(G[5])


def test_every_pass_comes_back_once_in_order_from_the_compute_thread(
    executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    executor.set_event_sink(lambda: names.append(threading.current_thread().name))
    for sequence in range(1, 21):
        executor.submit(prelude(sequence))
    assert [output.sequence for output in finished(executor, 20)] == list(range(1, 21))
    assert executor.collect() == []
    executor.synchronize()
    executor.shutdown()
    assert set(names) == {"rlt-compute"}
    assert len(names) >= 20


def test_submit_and_collect_return_at_once_while_a_pass_computes(
    executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    executor.submit(prelude(1))
    assert held.entered.wait(10.0)
    executor.submit(prelude(2))
    assert executor.collect() == []
    assert executor.wait(0.01) is False
    assert executor.admit(G[1]) == 0
    held.let_go.set()
    assert [output.sequence for output in finished(executor, 2)] == [1, 2]


def test_a_pass_that_fails_names_its_error_and_the_next_one_runs(
    executor: ThreadExecutor,
) -> None:
    executor.submit(prelude(1, token=100_000))
    executor.submit(prelude(2))
    bad, good = finished(executor, 2)
    assert bad.error is not None
    assert "IndexError" in bad.error
    assert "pass 1 (prelude)" in bad.error
    assert good.error is None
    assert executor.counters().passes == 1
    assert executor.counters().failed_passes == 1


def test_a_sink_that_raises_does_not_stop_computing(executor: ThreadExecutor) -> None:
    def sink() -> None:
        raise ValueError("a fault of the listener")

    executor.set_event_sink(sink)
    executor.submit(prelude(1))
    executor.submit(prelude(2))
    assert len(finished(executor, 2)) == 2


def test_synchronize_waits_for_everything_submitted(executor: ThreadExecutor) -> None:
    for sequence in range(1, 6):
        executor.submit(prelude(sequence))
    executor.synchronize()
    assert len(executor.collect()) == 5


def test_release_drops_a_prompts_chunk_state(executor: ThreadExecutor) -> None:
    executor.admit(G[4])
    executor.submit(chunk(1, G[4]))
    executor.synchronize()
    assert executor.memory_breakdown()["prompt_chunks"] == 3 * 64 * 4
    executor.release(G[4])
    executor.synchronize()
    assert executor.memory_breakdown()["prompt_chunks"] == 0
    executor.submit(chunk(2, G[4], depth=1))
    assert finished(executor, 2)[1].error is not None


def test_shutdown_finishes_the_running_pass_and_fails_the_waiting_ones(
    executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    executor.submit(prelude(1))
    assert held.entered.wait(10.0)
    executor.submit(prelude(2))
    stopper = threading.Thread(target=executor.shutdown)
    stopper.start()
    while True:
        try:
            executor.submit(prelude(3))
        except WorkerError as error:
            assert "after shutdown" in str(error)
            break
    held.let_go.set()
    stopper.join()
    first, *rest = executor.collect()
    assert first.error is None
    assert rest
    assert all("did not run" in str(output.error) for output in rest)
    executor.shutdown()
    executor.shutdown()
    assert not any(thread.name == "rlt-compute" for thread in threading.enumerate())


def test_warm_up_touches_neither_pool_nor_counters(executor: ThreadExecutor) -> None:
    executor.storage.kv.fill_(7.0)
    executor.storage.hidden.fill_(7.0)
    executor.warm_up()
    assert bool((executor.storage.kv == 7.0).all())
    assert bool((executor.storage.hidden == 7.0).all())
    assert executor.counters().passes == 0


def test_warm_up_runs_on_the_compute_thread_and_its_failure_reaches_the_caller(
    executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(worker: Worker) -> None:
        raise RuntimeError(threading.current_thread().name)

    monkeypatch.setattr(Worker, "warm_up", fail)
    with pytest.raises(RuntimeError, match="rlt-compute"):
        executor.warm_up()
    executor.submit(prelude(1))
    assert finished(executor, 1)[0].error is None
    executor.shutdown()
    with pytest.raises(WorkerError, match="after shutdown"):
        executor.warm_up()


def test_memory_is_told_by_purpose(executor: ThreadExecutor) -> None:
    memory = executor.memory_breakdown()
    assert memory["kv"] == 64 * executor.capabilities().geometry.block_bytes
    assert memory["hidden"] == 3 * 64 * 4
    weights = load_file(CKPT / "model.safetensors")
    assert memory["weights"] == sum(tensor.nbytes for tensor in weights.values())


def test_results_carry_log_probabilities_and_compute_time(executor: ThreadExecutor) -> None:
    executor.storage.hidden.normal_()
    row = CodaRow(G[1], 0, 0, SamplingParams(logprobs=2))
    executor.submit(SchedulerOutput(sequence=1, stage=Stage.CODA, coda=(row,)))
    [output] = finished(executor, 1)
    [token] = output.tokens
    assert token.logprobs is not None
    assert token.logprobs.top[0][0] == token.token
    assert output.compute_s > 0


def test_the_compute_thread_takes_its_thread_count_from_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(
        torch, "set_num_threads", lambda n: asked.append((n, threading.current_thread().name))
    )
    config = EngineConfig(model=str(CKPT), num_blocks=8, threads=2, device="cpu")
    build_executor(config, progress=lambda _: None).shutdown()
    assert asked == [(2, "rlt-compute")]


def test_load_reports_progress() -> None:
    lines: list[str] = []
    started_s = time.monotonic()
    config = EngineConfig(model=str(CKPT), num_blocks=8, device="cpu")
    build_executor(config, progress=lines.append).shutdown()
    assert any("loading weights" in line for line in lines)
    assert any("8 KV blocks" in line for line in lines)
    assert time.monotonic() - started_s < 30


def test_passes_submitted_behind_a_failed_one_leave_its_requests_out_and_serve_the_others(
    executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    bad = PreludeRow(G[1], 0, 100_000, 1)
    good = PreludeRow(G[2], 1, 3, 1)
    executor.submit(SchedulerOutput(sequence=1, stage=Stage.PRELUDE, prelude=(bad,)))
    both = SchedulerOutput(
        sequence=2, stage=Stage.PRELUDE, prelude=(PreludeRow(G[1], 0, 3, 1), good)
    )
    executor.submit(both)
    held.let_go.set()
    first, second = finished(executor, 2)
    assert "IndexError" in str(first.error)
    assert second.error is None
    [failure] = second.failed
    assert failure.generation == G[1]
    assert "pass 1 (prelude): IndexError" in failure.reason
    executor.release(G[1])
    executor.submit(msgspec.structs.replace(both, sequence=3))
    assert finished(executor, 1)[0].failed == ()
