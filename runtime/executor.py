"""The one entry to the device side: slots, passes in, results out.

Owns the slots and the compute thread's life. Never decides what runs, and never computes on the
caller's thread: a call here returns at once, but for warm_up, synchronize and shutdown.
"""

import logging
from collections.abc import Callable

from .clock import SystemClock
from .compute_thread import ComputeThread
from .config import EngineConfig
from .errors import ProtocolError
from .interfaces import AdmissionLimits, Capabilities, Capacity, Clock
from .kv_storage import KVStorage
from .plans import ModelRunnerOutput, SchedulerOutput
from .slots import SlotPool
from .types import Generation
from .worker import WorkCounters, Worker, load_worker

logger = logging.getLogger(__name__)


class ThreadExecutor:
    """All methods but the event sink are for one caller thread."""

    def __init__(self, worker: Worker, *, num_slots: int, num_receive_slots: int) -> None:
        self._worker = worker
        self._num_slots = num_slots
        self._num_receive_slots = num_receive_slots
        self._slots = SlotPool(0, num_slots)
        self._receive_slots = SlotPool(num_slots, num_receive_slots)
        self._epoch = 0
        self._compute = ComputeThread(worker.run, worker.enter_thread)

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
        )

    def capacity(self) -> Capacity:
        return Capacity(self._epoch, self._slots.free, self._receive_slots.free)

    def counters(self) -> WorkCounters:
        return self._worker.counters

    def admit(self, generation: Generation) -> int | None:
        return self._slots.take(generation)

    def admit_receive(self, generation: Generation) -> int | None:
        return self._receive_slots.take(generation)

    def end_receive(self, generation: Generation) -> None:
        self._epoch += self._receive_slots.give_back(generation)

    def cancel_admission(self, generation: Generation) -> None:
        self._epoch += self._slots.give_back(generation)

    def release(self, generation: Generation) -> None:
        self._worker.runner.forget(generation)
        self.complete(generation)

    def complete(self, generation: Generation) -> None:
        freed = self._slots.give_back(generation) | self._receive_slots.give_back(generation)
        self._epoch += freed

    def export_hidden(self, generation: Generation) -> int:
        slot = self._slots.find(generation)
        if slot is None:
            raise ProtocolError(
                f"generation {generation} holds no execution slot; admit it before its hidden "
                "state is exported"
            )
        return slot

    def submit(self, plan: SchedulerOutput) -> None:
        self._compute.submit(plan)

    def collect(self) -> list[ModelRunnerOutput]:
        return self._compute.collect()

    def wait(self, timeout_s: float) -> bool:
        return self._compute.wait(timeout_s)

    def set_event_sink(self, sink: Callable[[], None] | None) -> None:
        self._compute.set_event_sink(sink)

    def memory_breakdown(self) -> dict[str, int]:
        return self._worker.memory_breakdown()

    def warm_up(self) -> None:
        """On the compute thread: what warms up there is partly per thread."""
        self._compute.call(self._worker.warm_up)

    def synchronize(self) -> None:
        self._compute.synchronize()

    def shutdown(self) -> None:
        self._compute.shutdown()


def build_executor(
    config: EngineConfig,
    clock: Clock | None = None,
    progress: Callable[[str], None] = logger.info,
) -> ThreadExecutor:
    """Load the checkpoint, allocate the pool and start the compute thread."""
    worker = load_worker(config, clock or SystemClock(), progress)
    return ThreadExecutor(
        worker, num_slots=config.num_slots, num_receive_slots=config.num_receive_slots
    )
