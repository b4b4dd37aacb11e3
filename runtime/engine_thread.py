"""The thread on which an engine that lives in its caller's process is driven.

Owns the thread, its wake-up and the commands left for it. Knows nothing of requests: it runs
commands, then the tick that it was given, and sleeps until something wakes it.
Nothing polls: commands, finished passes (through `wake`) and the tick's own deadline wake it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    def __init__(
        self, tick: Callable[[], float | None], on_failure: Callable[[Exception], None]
    ) -> None:
        """tick: returns after how many seconds it wants to run again at the latest."""
        self._tick = tick
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._commands: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        self._ended = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rlt-engine")

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def post(self, command: Callable[[], object]) -> None:
        """Run it on the thread, in order; forgotten once the thread has ended."""
        self._put(command, None)

    def ask(self, question: Callable[[], T]) -> T:
        """Run it on the thread, or here once the thread has ended, and wait for the answer."""
        answer: Future[T] = Future()
        if self._put(question, answer):
            return answer.result()
        self._thread.join()
        return question()

    def stop(self) -> None:
        """End the thread after its present tick. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _put(self, command: Callable[[], object], answer: Future[Any] | None) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._commands.append((command, answer))
        self._wake.set()
        return True

    def _run(self) -> None:
        timeout_s: float | None = None
        try:
            while not self._stopping:
                self._wake.wait(timeout_s)
                self._wake.clear()
                for command, answer in self._take():
                    _execute(command, answer)
                timeout_s = self._tick()
        except Exception as error:
            logger.exception("the engine's thread failed")
            self._on_failure(error)
        finally:
            with self._lock:
                self._ended = True
            for command, answer in self._take():
                if answer is not None:
                    _execute(command, answer)

    def _take(self) -> list[tuple[Callable[[], Any], Future[Any] | None]]:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        return commands


def _execute(command: Callable[[], Any], answer: Future[Any] | None) -> None:
    """A question's fault is its asker's; a command's fault is the engine's."""
    if answer is None:
        command()
        return
    try:
        answer.set_result(command())
    except Exception as error:
        answer.set_exception(error)
