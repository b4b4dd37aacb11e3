"""A worker's line to the coordinator: registers, beats, and notices when nobody answers.

Owns the DEALER socket, the heartbeat timer, and with which word the worker ends. Knows nothing of
requests: the role's engine hears every other message and says what is live.
"""

import asyncio
import logging
from typing import Protocol, assert_never

import msgspec

from ..runtime.errors import ServiceError, ServiceUnreachable, WorkerError
from ..runtime.types import Generation
from .channel import DealerChannel
from .config import EXIT_RESTART
from .messages import (
    Cancel,
    Confirm,
    CoordinatorToWorker,
    Drain,
    DrainTo,
    Heartbeat,
    HeartbeatAnswer,
    LiveGeneration,
    Peers,
    Prefill,
    Register,
    RegisterAgain,
    RegisterRefused,
    Resend,
    Reserve,
    Shutdown,
    Welcome,
    WorkerToCoordinator,
)

logger = logging.getLogger(__name__)

REGISTER_S = 0.5  # an unanswered Register is sent again after this
SILENT_BEATS = 3  # so many heartbeats unanswered: whoever drains need not wait for the coordinator
EPOCH_SHIFT = 40  # a generation's low bits count; the high ones are the epoch that gave it

ForEngine = Peers | HeartbeatAnswer | Reserve | Prefill | Cancel | Confirm | Resend


class LinkedEngine(Protocol):
    """What the link asks of the role's engine, and tells it."""

    def handle(self, message: ForEngine) -> None: ...
    def live(self) -> tuple[LiveGeneration, ...]: ...
    def statistics(self) -> dict[str, float]: ...
    def quarantined_from(self) -> tuple[str, ...]:
        """Incarnations whose writes it still fears."""
        ...

    def open_pairs(self) -> tuple[str, ...] | None:
        """Decode incarnations that this prefill worker can send to; None at a decode worker."""
        ...

    def forget_all(self) -> None:
        """The coordinator is another one: every generation that this worker has is nobody's."""
        ...


class CoordinatorLink:
    def __init__(self, registration: Register, engine: LinkedEngine, *, silence_s: float) -> None:
        """silence_s: how long the coordinator may be silent before the worker gives up."""
        self._loop = asyncio.get_running_loop()
        self._registration = registration
        self._engine = engine
        self._silence_s = silence_s
        self._heard_s = self._loop.time()
        self._heartbeat_s: float | None = None  # None until welcomed
        self._epoch: int | None = None  # of the coordinator that welcomed it last
        self._highest_epoch = 0
        self._peers_version = 0
        self._timer: asyncio.TimerHandle | None = None
        self.draining = False
        self._drain: DrainTo | None = None  # what the coordinator drains it to
        self.ended: asyncio.Future[int] = self._loop.create_future()  # the exit code, or an error
        self._channel: DealerChannel[CoordinatorToWorker, WorkerToCoordinator] = DealerChannel(
            CoordinatorToWorker, self._handle, identity=registration.incarnation.encode()
        )

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel.connect(endpoint)
        self._beat()

    def send(self, message: WorkerToCoordinator) -> None:
        self._channel.send(message)

    def drain(self) -> None:
        """The worker wants to end, once nothing needs it: say so at once, and ever again."""
        if not self.draining:
            self.draining = True
            logger.info("draining")
            self._beat()

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

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
        if self.draining and self._need_not_wait(silent_s):
            self.end(EXIT_RESTART)  # whether it stays down is not its own choice
        elif silent_s > self._silence_s:
            self._fail(
                ServiceUnreachable(
                    f"no answer from the coordinator at {self._endpoint} for {silent_s:.0f} s"
                )
            )
        else:
            self._say()
            self._beat_after(self._heartbeat_s or REGISTER_S)

    def _need_not_wait(self, silent_s: float) -> bool:
        """Nobody will tell it to end, or nobody has to."""
        if self._epoch is None or silent_s > self._silence_s:
            return True
        patience_s = SILENT_BEATS * (self._heartbeat_s or REGISTER_S)
        return silent_s > patience_s and not self._engine.live()

    def _say(self) -> None:
        if self._heartbeat_s is None:
            self.send(
                msgspec.structs.replace(
                    self._registration,
                    highest_epoch=self._highest_epoch,
                    live=tuple(row.generation for row in self._engine.live()),
                    drain=self._drain,
                )
            )
            return
        self.send(
            Heartbeat(
                peers_version=self._peers_version,
                live=self._engine.live(),
                statistics=self._engine.statistics(),
                draining=self.draining,
                quarantined_from=self._engine.quarantined_from(),
                pairs=self._engine.open_pairs(),
            )
        )

    def _beat_after(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._beat)

    def _handle(self, message: CoordinatorToWorker) -> None:
        self._heard_s = self._loop.time()
        match message:
            case Welcome():
                self._welcome(message)
            case RegisterAgain():
                if self._heartbeat_s is not None:  # else it is asked already
                    self._heartbeat_s = None
                    self._beat()
            case RegisterRefused():
                why = f"the coordinator refused this worker: {message.reason}"
                self._fail(ServiceError(why) if self._epoch is None else WorkerError(why))
            case Drain():
                self._drain = message.to
            case Shutdown():
                self.end(EXIT_RESTART if message.restart else 0)
            case Peers():
                self._peers_version = message.version
                self._engine.handle(message)
            case Reserve() | Prefill() | Cancel() | Resend():
                self._note_epoch(message.generation)
                self._engine.handle(message)
            case HeartbeatAnswer():
                self._engine.handle(self._checked(message))
            case Confirm():
                self._engine.handle(message)
            case _:
                assert_never(message)

    def _welcome(self, message: Welcome) -> None:
        known, self._epoch = self._epoch, message.epoch
        if known != message.epoch:
            logger.info("registered with the coordinator (epoch %d)", message.epoch)
            self._highest_epoch = max(self._highest_epoch, message.epoch)
            self._peers_version = 0
            if known is not None:
                self._engine.forget_all()
        welcomed_anew, self._heartbeat_s = self._heartbeat_s is None, message.heartbeat_s
        if welcomed_anew and self.draining:
            self._beat()
        else:
            self._beat_after(message.heartbeat_s)

    def _checked(self, answer: HeartbeatAnswer) -> HeartbeatAnswer:
        """Of an epoch that this worker has not heard of, no number is closed yet."""
        if answer.oldest_live >> EPOCH_SHIFT <= self._highest_epoch:
            return answer
        return msgspec.structs.replace(answer, oldest_live=Generation(0))

    def _note_epoch(self, generation: Generation) -> None:
        """A coordinator's epoch may rise after its Welcome."""
        self._highest_epoch = max(self._highest_epoch, generation >> EPOCH_SHIFT)

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
