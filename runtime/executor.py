"""The one entry to the device side: slots, passes in, results out.

Owns the slots and the compute thread's life. Never decides what runs, and never computes on the
caller's thread: a call here returns at once, but for prepare, warm_up, synchronize and shutdown.
"""

import logging
from collections.abc import Callable

from .canary import Canary
from .clock import SystemClock
from .compute_thread import ComputeThread
from .config import EngineConfig
from .errors import ProtocolError, WorkerError
from .interfaces import (
    AdmissionLimits,
    BlockWatch,
    Capabilities,
    Capacity,
    Clock,
    SuspendReceipt,
)
from .kv_storage import KVStorage
from .plans import ModelRunnerOutput, SchedulerOutput
from .slots import CapacityEpoch, SlotPool
from .snapshots import Snapshots
from .types import BlockTables, Generation
from .worker import WorkCounters, Worker, load_worker

logger = logging.getLogger(__name__)


class ThreadExecutor:
    """All methods but wait_capacity are for one caller thread. Nothing runs before prepare()."""

    def __init__(
        self,
        worker: Worker,
        *,
        num_slots: int,
        num_receive_slots: int,
        snapshot_bytes: int = 0,
        canary: bool = False,
    ) -> None:
        self._worker = worker
        self._num_slots = num_slots
        self._num_receive_slots = num_receive_slots
        self._slots = SlotPool(0, num_slots)
        self._receive_slots = SlotPool(num_slots, num_receive_slots)
        self._epoch = CapacityEpoch()
        self._snapshots = Snapshots(worker.parts.storage, snapshot_bytes)
        self._memory_jobs = 0  # saves, loads and truncates posted
        self._compute = ComputeThread(worker.run)
        self._canary = Canary(worker.parts.storage.kv, self._compute) if canary else None
        self._prepared = False

    @property
    def storage(self) -> KVStorage:
        """The memory that a worker-side connector registers."""
        return self._worker.parts.storage

    def capabilities(self) -> Capabilities:
        parts = self._worker.parts
        return Capabilities(
            geometry=parts.storage.geometry, model=parts.description, device=parts.device
        )

    def admission_limits(self) -> AdmissionLimits:
        parts = self._worker.parts
        return AdmissionLimits(
            num_blocks=parts.storage.plan.num_blocks,
            num_slots=self._num_slots,
            num_receive_slots=self._num_receive_slots,
            max_positions=parts.description.max_positions,
            snapshot_bytes=self._snapshots.bound_bytes,
        )

    def capacity(self) -> Capacity:
        return Capacity(
            self._epoch.value,
            self._slots.free,
            self._receive_slots.free,
            self._memory_jobs - self._worker.settled,
        )

    def wait_capacity(self, epoch: int, timeout_s: float) -> bool:
        """Block until capacity was released after `epoch`; False on timeout or shutdown. For any
        thread."""
        return self._epoch.wait_beyond(epoch, timeout_s)

    def block_watch(self) -> BlockWatch | None:
        return self._canary

    def counters(self) -> WorkCounters:
        return self._worker.counters

    def admit(self, generation: Generation) -> int | None:
        return self._slots.take(generation)

    def admit_receive(self, generation: Generation) -> int | None:
        return self._receive_slots.take(generation)

    def end_receive(self, generation: Generation) -> None:
        self._released(self._receive_slots.give_back(generation))

    def cancel_admission(self, generation: Generation) -> None:
        self._released(self._slots.give_back(generation))

    def release(self, generation: Generation) -> None:
        self._forget(generation)
        self.complete(generation)

    def complete(self, generation: Generation) -> None:
        slot, receive_slot = (
            pool.give_back(generation) for pool in (self._slots, self._receive_slots)
        )
        self._released(self._snapshots.drop(generation) or slot or receive_slot)

    def export_hidden(self, generation: Generation) -> int:
        return self._slot_of(generation, "its hidden state is exported")

    def submit(self, plan: SchedulerOutput) -> None:
        self._compute.submit(plan)

    def suspend(self, generation: Generation, tables: BlockTables) -> SuspendReceipt:
        slot = self._slot_of(generation, "it is suspended")
        chunk_bytes = self._worker.runner.chunk_bytes_of(generation)
        snapshot = self._snapshots.open(generation, tables, chunk_bytes)
        try:
            self._compute.post(lambda: self._worker.save(generation, slot, snapshot), "a suspend")
        except WorkerError:
            self._snapshots.drop(generation)
            raise
        self._memory_jobs += 1
        self._released(self._slots.give_back(generation))
        return SuspendReceipt(generation, slot, len(snapshot.blocks), snapshot.num_bytes)

    def restore(self, generation: Generation, tables: BlockTables) -> int | None:
        snapshot = self._snapshots.fitting(generation, tables)
        slot = self._slots.take(generation)
        if slot is None:
            return None
        try:
            self._compute.post(
                lambda: self._worker.load(generation, slot, snapshot, tables), "a restore"
            )
        except WorkerError:
            self._slots.give_back(generation)
            raise
        self._memory_jobs += 1
        self._released(self._snapshots.drop(generation))
        return slot

    def discard(self, generation: Generation) -> None:
        self._released(self._snapshots.drop(generation))

    def truncate(self, generation: Generation, tokens: int, tables: BlockTables) -> None:
        """The dropped positions hold NaN afterwards, as far as these tables reach."""
        self._compute.post(lambda: self._worker.truncate(generation, tokens, tables), "a truncate")
        self._memory_jobs += 1

    def collect(self) -> list[ModelRunnerOutput]:
        return self._compute.collect()

    def wait(self, timeout_s: float) -> bool:
        return self._compute.wait(timeout_s)

    def set_event_sink(self, sink: Callable[[], None] | None) -> None:
        self._compute.set_event_sink(sink)

    def memory_breakdown(self) -> dict[str, int]:
        return self._worker.memory_breakdown() | {"snapshots": self._snapshots.num_bytes}

    def prepare(self) -> None:
        """Start the compute thread. Idempotent; after a failure it may be tried again."""
        self._compute.start()
        if not self._prepared:
            self._compute.call(self._worker.enter_thread)
            self._prepared = True

    def warm_up(self) -> None:
        """On the compute thread: what warms up there is partly per thread."""
        self._compute.call(self._worker.warm_up)

    def synchronize(self) -> None:
        self._compute.synchronize()

    def shutdown(self) -> None:
        self._epoch.close()
        self._compute.shutdown()

    def _slot_of(self, generation: Generation, before: str) -> int:
        slot = self._slots.find(generation)
        if slot is None:
            raise ProtocolError(
                f"generation {generation} holds no execution slot; admit it before {before}"
            )
        return slot

    def _released(self, anything: bool) -> None:
        if anything:
            self._epoch.move()

    def _forget(self, generation: Generation) -> None:
        """After what is submitted: a restore may be on its way."""
        try:
            self._compute.post(lambda: self._worker.forget(generation), "a release")
        except WorkerError:
            self._worker.forget(generation)  # the thread takes no more work, so nothing follows


def build_executor(
    config: EngineConfig,
    clock: Clock | None = None,
    progress: Callable[[str], None] = logger.info,
) -> ThreadExecutor:
    """Load the checkpoint, allocate the pool and start the compute thread."""
    worker = load_worker(config, clock or SystemClock(), progress)
    executor = ThreadExecutor(
        worker,
        num_slots=config.num_slots,
        num_receive_slots=config.num_receive_slots,
        snapshot_bytes=config.snapshot_bytes,
        canary=config.canary,
    )
    try:
        executor.prepare()
    except BaseException:
        executor.shutdown()
        raise
    return executor
