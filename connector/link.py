"""A worker's line to the coordinator: registers, beats, and notices when nobody answers.

Owns the DEALER socket and the heartbeat timer. Knows nothing of requests: the role's engine hears
every other message and says what is live.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import assert_never

from ..runtime.errors import ServiceUnreachable, WorkerError
from .channel import DealerChannel
from .messages import (
    Cancel,
    Confirm,
    CoordinatorToWorker,
    Heartbeat,
    HeartbeatAnswer,
    LiveGeneration,
    Peers,
    Prefill,
    Register,
    RegisterRefused,
    Resend,
    Reserve,
    Shutdown,
    Welcome,
    WorkerToCoordinator,
)

logger = logging.getLogger(__name__)

REGISTER_S = 0.5  # an unanswered Register is sent again after this

ForEngine = Peers | HeartbeatAnswer | Reserve | Prefill | Cancel | Confirm | Resend


class CoordinatorLink:
    def __init__(
        self,
        registration: Register,
        *,
        on_message: Callable[[ForEngine], None],
        live: Callable[[], tuple[LiveGeneration, ...]],
        statistics: Callable[[], dict[str, float]],
        silence_s: float,
    ) -> None:
        """silence_s: how long the coordinator may be silent before the worker gives up."""
        self._loop = asyncio.get_running_loop()
        self._registration = registration
        self._on_message = on_message
        self._live = live
        self._statistics = statistics
        self._silence_s = silence_s
        self._heard_s = self._loop.time()
        self._heartbeat_s: float | None = None  # None until welcomed
        self._peers_version = 0
        self._timer: asyncio.TimerHandle | None = None
        self.stopped: asyncio.Future[None] = self._loop.create_future()
        self._channel: DealerChannel[CoordinatorToWorker, WorkerToCoordinator] = DealerChannel(
            CoordinatorToWorker, self._handle, identity=registration.incarnation.encode()
        )

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel.connect(endpoint)
        self._beat()

    def send(self, message: WorkerToCoordinator) -> None:
        self._channel.send(message)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._channel.close()

    @property
    def malformed(self) -> int:
        return self._channel.malformed

    def _beat(self) -> None:
        """Register until welcomed, then send heartbeats; both are repeated by this one timer."""
        silent_s = self._loop.time() - self._heard_s
        if silent_s > self._silence_s:
            self._stop(
                ServiceUnreachable(
                    f"no answer from the coordinator at {self._endpoint} for {silent_s:.0f} s"
                )
            )
            return
        if self._heartbeat_s is None:
            self.send(self._registration)
        else:
            self.send(
                Heartbeat(
                    peers_version=self._peers_version,
                    live=self._live(),
                    statistics=self._statistics(),
                )
            )
        self._timer = self._loop.call_later(self._heartbeat_s or REGISTER_S, self._beat)

    def _handle(self, message: CoordinatorToWorker) -> None:
        self._heard_s = self._loop.time()
        match message:
            case Welcome():
                self._welcome(message)
            case RegisterRefused():
                self._stop(WorkerError(f"the coordinator refused this worker: {message.reason}"))
            case Shutdown():
                self._stop(None)
            case Peers():
                self._peers_version = message.version
                self._on_message(message)
            case HeartbeatAnswer() | Reserve() | Prefill() | Cancel() | Confirm() | Resend():
                self._on_message(message)
            case _:
                assert_never(message)

    def _welcome(self, message: Welcome) -> None:
        if self._heartbeat_s is None:
            logger.info("registered with the coordinator (epoch %d)", message.epoch)
        self._heartbeat_s = message.heartbeat_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(message.heartbeat_s, self._beat)

    def _stop(self, error: Exception | None) -> None:
        if self.stopped.done():
            return
        if error is None:
            self.stopped.set_result(None)
        else:
            self.stopped.set_exception(error)
