"""What the state machine wants done: frozen effects, and their merging into few frames.

Owns the order of what goes to each client: later messages never overtake earlier ones. Knows
nothing of sockets. What a client does not take waits here; the state decides when to give up.
"""

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from ..connector.channel import SendResult
from ..connector.messages import (
    Confirm,
    ConfirmRow,
    CoordinatorToClient,
    CoordinatorToSupervisor,
    CoordinatorToWorker,
    Deltas,
)
from ..runtime.interfaces import Delta
from ..runtime.types import Generation

DELTAS_PER_FRAME = 1024
ToWorkerSocket = CoordinatorToWorker | CoordinatorToSupervisor


class SendClient(msgspec.Struct, frozen=True):
    client: bytes
    message: CoordinatorToClient


class SendWorker(msgspec.Struct, frozen=True):
    """incarnation: of a worker, or a supervisor's identity."""

    incarnation: str
    message: ToWorkerSocket


class Deliver(msgspec.Struct, frozen=True):
    """Output of one request; all of a client's go in one frame per drain."""

    client: bytes
    delta: Delta


class ConfirmOutput(msgspec.Struct, frozen=True):
    """Outputs 0..outputs-1 have arrived; all of a worker's go in one frame per drain."""

    incarnation: str
    generation: Generation
    outputs: int


Effect = SendClient | SendWorker | Deliver | ConfirmOutput


class Outbox:
    """Merges effects until flush(), which hands over one frame per peer where it can."""

    def __init__(
        self,
        send_client: Callable[[bytes, CoordinatorToClient], SendResult],
        send_worker: Callable[[str, ToWorkerSocket], SendResult],
    ) -> None:
        self._send_client = send_client
        self._send_worker = send_worker
        self._clients: dict[bytes, deque[CoordinatorToClient | list[Delta]]] = {}
        self._workers: list[SendWorker] = []
        self._confirms: dict[str, dict[Generation, int]] = {}

    def add(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(client=client, delta=delta):
                    line = self._clients.setdefault(client, deque())
                    last = line[-1] if line else None
                    if isinstance(last, list) and len(last) < DELTAS_PER_FRAME:
                        last.append(delta)
                    else:
                        line.append([delta])
                case SendClient(client=client, message=message):
                    self._clients.setdefault(client, deque()).append(message)
                case SendWorker():
                    self._workers.append(effect)
                case ConfirmOutput(incarnation=incarnation, generation=generation, outputs=count):
                    self._confirms.setdefault(incarnation, {})[generation] = count

    def flush(self) -> tuple[list[bytes], list[str]]:
        """Send what can be sent. Returns the clients and the workers found to be gone."""
        gone_workers = self._flush_workers()
        gone_clients = [client for client in list(self._clients) if not self._flush_client(client)]
        return gone_clients, gone_workers

    def _flush_workers(self) -> list[str]:
        # A frame that a full worker does not take is lost here: every ask is repeated.
        sends, self._workers = self._workers, []
        for incarnation, rows in self._confirms.items():
            confirm = Confirm(rows=tuple(ConfirmRow(*row) for row in rows.items()))
            sends.append(SendWorker(incarnation, confirm))
        self._confirms = {}
        return [
            send.incarnation
            for send in sends
            if self._send_worker(send.incarnation, send.message) is SendResult.GONE
        ]

    def _flush_client(self, client: bytes) -> bool:
        line = self._clients[client]
        while line:
            first = line[0]
            message = Deltas(deltas=tuple(first)) if isinstance(first, list) else first
            result = self._send_client(client, message)
            if result is SendResult.FULL:
                return True
            if result is SendResult.GONE:
                del self._clients[client]
                return False
            line.popleft()
        del self._clients[client]
        return True

    def backlog(self, client: bytes) -> int:
        """Messages and deltas that the client has not taken yet."""
        return sum(
            len(item) if isinstance(item, list) else 1 for item in self._clients.get(client, ())
        )

    def drop(self, client: bytes) -> None:
        self._clients.pop(client, None)

    def blocked_clients(self) -> list[bytes]:
        return list(self._clients)
