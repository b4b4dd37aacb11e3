"""The one entry to the device side: queues passes for a compute thread and hands results back.

Owns slots, the thread and the queues between it and the engine. Never decides what runs. Passes
run one at a time in submission order, and each one submitted comes back exactly once.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from .clock import SystemClock
from .config import EngineConfig
from .errors import ProtocolError, WorkerError
from .interfaces import AdmissionLimits, Capabilities, Capacity, Clock
from .kv_storage import KVStorage
from .plans import ModelRunnerOutput, SchedulerOutput
from .slots import SlotPool
from .types import Generation
from .worker import WorkCounters, Worker, load_worker

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0


class ThreadExecutor:
    """All methods but the event sink are for one caller thread."""

    def __init__(self, worker: Worker, *, num_slots: int, num_receive_slots: int) -> None:
        self._worker = worker
        self._num_slots = num_slots
        self._num_receive_slots = num_receive_slots
        self._slots = SlotPool(0, num_slots)
        self._receive_slots = SlotPool(num_slots, num_receive_slots)
        self._epoch = 0
        self._changed = threading.Condition()  # guards the four below
        self._waiting: deque[SchedulerOutput] = deque()
        self._finished: deque[ModelRunnerOutput] = deque()
        self._running = False
        self._stopping = False
        self._sink: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._compute, name="rlt-compute", daemon=False)
        self._thread.start()

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
        with self._changed:
            if self._stopping:
                raise WorkerError(
                    f"pass {plan.sequence} was submitted after shutdown; start a new engine"
                )
            self._waiting.append(plan)
            self._changed.notify_all()

    def collect(self) -> list[ModelRunnerOutput]:
        with self._changed:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._finished), timeout_s)

    def set_event_sink(self, sink: Callable[[], None] | None) -> None:
        self._sink = sink

    def memory_breakdown(self) -> dict[str, int]:
        return self._worker.memory_breakdown()

    def warm_up(self) -> None:
        self.synchronize()
        self._worker.warm_up()

    def synchronize(self) -> None:
        """Block until every submitted pass has run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._waiting)

    def shutdown(self) -> None:
        """Finish the running pass, hand the waiting ones back as failed, join. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise WorkerError(
                f"the compute thread did not finish its pass in {JOIN_TIMEOUT_S:.0f} s; kill the "
                "worker process"
            )

    def _compute(self) -> None:
        self._worker.enter_thread()
        while (plan := self._next_plan()) is not None:
            output = self._worker.run(plan)
            with self._changed:
                self._finished.append(output)
                self._running = False
                self._changed.notify_all()
            self._tell_sink()
        self._fail_waiting()

    def _next_plan(self) -> SchedulerOutput | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._waiting))
            if self._stopping:
                return None
            self._running = True
            return self._waiting.popleft()

    def _fail_waiting(self) -> None:
        with self._changed:
            for plan in self._waiting:
                error = f"pass {plan.sequence} ({plan.stage}) did not run: the engine shut down"
                self._finished.append(
                    ModelRunnerOutput(sequence=plan.sequence, stage=plan.stage, error=error)
                )
            self._waiting.clear()
            self._changed.notify_all()
        self._tell_sink()

    def _tell_sink(self) -> None:
        sink = self._sink
        if sink is None:
            return
        try:
            sink()
        except Exception:
            logger.exception("the event sink failed; results can still be collected")


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
