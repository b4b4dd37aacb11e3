"""One thread that runs passes in submission order, and the queues between it and its caller.

Owns both queues and the thread. Knows nothing of slots or models. Every pass submitted comes back
exactly once: with its result, or with the reason why it did not run.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from .errors import WorkerError
from .plans import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0


class _Call:
    """A function to run between passes, and where its caller waits."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.done: Future[None] = Future()


class ComputeThread:
    """run: executes one pass and never raises. Made without a thread: start() makes it."""

    def __init__(self, run: Callable[[SchedulerOutput], ModelRunnerOutput]) -> None:
        self._run = run
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[SchedulerOutput | _Call] = deque()
        self._finished: deque[ModelRunnerOutput] = deque()
        self._busy = False
        self._stopping = False  # takes no more work
        self._ended = False  # nothing more will come out
        self._sink: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Idempotent."""
        with self._changed:
            if self._stopping:
                raise WorkerError("the compute thread was shut down; start a new engine")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rlt-compute", daemon=False)
                self._thread.start()

    def submit(self, plan: SchedulerOutput) -> None:
        self._put(plan, f"pass {plan.sequence}")

    def post(self, function: Callable[[], None], what: str) -> None:
        """Run `function`, which handles its own errors, on the thread in the order of passes."""
        self._put(_Call(function), what)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread, after everything submitted, and wait for it."""
        call = _Call(function)
        self._put(call, "a call")
        call.done.result()

    def collect(self) -> list[ModelRunnerOutput]:
        with self._changed:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished) or self._ended, timeout_s)
            return bool(self._finished)

    def set_event_sink(self, sink: Callable[[], None] | None) -> None:
        self._sink = sink

    def synchronize(self) -> None:
        """Block until everything submitted has run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._waiting)

    def shutdown(self) -> None:
        """Finish the running pass, hand the waiting ones back as failed, join. Idempotent."""
        with self._changed:
            self._stopping = True
            thread = self._thread
            self._ended = self._ended or thread is None
            self._changed.notify_all()
        if thread is None:
            return
        thread.join(JOIN_TIMEOUT_S)
        if thread.is_alive():
            raise WorkerError(
                f"the compute thread did not finish its pass in {JOIN_TIMEOUT_S:.0f} s; kill the "
                "worker process"
            )

    def _put(self, job: SchedulerOutput | _Call, what: str) -> None:
        with self._changed:
            if self._stopping:
                raise WorkerError(f"{what} was submitted after shutdown; start a new engine")
            if self._thread is None:
                raise WorkerError(f"{what} was submitted before prepare(); call that first")
            self._waiting.append(job)
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._do(job)
        finally:
            self._fail_waiting()

    def _next_job(self) -> SchedulerOutput | _Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._waiting))
            if self._stopping:
                return None
            self._busy = True
            return self._waiting.popleft()

    def _do(self, job: SchedulerOutput | _Call) -> None:
        output: ModelRunnerOutput | None = None
        if isinstance(job, _Call):
            _run_call(job)
        else:
            output = self._run(job)
        with self._changed:
            if output is not None:
                self._finished.append(output)
            self._busy = False
            self._changed.notify_all()
        self._tell_sink()

    def _fail_waiting(self) -> None:
        with self._changed:
            self._stopping = self._ended = True
            self._busy = False
            for job in self._waiting:
                if isinstance(job, _Call):
                    job.done.set_exception(WorkerError("the engine shut down before this call"))
                    continue
                error = f"pass {job.sequence} ({job.stage}) did not run: the engine shut down"
                self._finished.append(
                    ModelRunnerOutput(sequence=job.sequence, stage=job.stage, error=error)
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


def _run_call(call: _Call) -> None:
    try:
        call.function()
    except Exception as error:
        call.done.set_exception(error)
    else:
        call.done.set_result(None)
