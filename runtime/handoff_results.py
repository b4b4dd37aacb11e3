"""What a handoff event changes: the half of update_from_output that hears the connector.

The Scheduler's helper, called by it alone, and the only code that moves a RECEIVING request on.
A lease that a peer's access stands for ends here and nowhere else. Events may come late, twice or
for generations long gone: those change nothing and are counted.
"""

from collections import deque
from typing import assert_never

from .errors import TransferFailed
from .events import Received
from .interfaces import (
    HandoffEvent,
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
    SendEnded,
)
from .kv_manager import KVManager, Lease
from .request import Phase, Request
from .request_book import RequestBook
from .types import TokenRange

_OfRequest = ReceiveComplete | ReceiveEnded | SendEnded | Quarantined


class HandoffResults:
    def __init__(self, *, book: RequestBook, kv: KVManager, received: deque[Request]) -> None:
        self._book = book
        self._kv = kv
        self._received = received  # the Scheduler's queue for an execution slot
        self._late = 0

    @property
    def late_events(self) -> int:
        return self._late

    def apply(self, event: HandoffEvent) -> None:
        if _ENDS[type(event)] not in self._kv.leases(event.generation):
            self._late += 1
        elif isinstance(event, QuarantineEnded):  # its request ended when it was withdrawn
            self._kv.end_quarantine(event.generation)
            self._book.end_withdrawn(event.generation)
        elif (request := self._book.get(event.generation)) is not None:
            self._move_on(request, event)

    def _move_on(self, request: Request, event: _OfRequest) -> None:
        match event:
            case ReceiveComplete():
                self._on_receive_complete(request)
            case ReceiveEnded():
                self._kv.end_lease(request.generation, Lease.RECEIVE)
                self._fail(request, "the sender stopped before everything had arrived")
            case SendEnded():
                self._kv.end_lease(request.generation, Lease.SEND)
                self._on_send_ended(request, event.error)
            case Quarantined():
                request.withdrawn = True
                self._kv.quarantine(request.generation)
                self._fail(request, "a peer may still write into its memory, which is withdrawn")
            case _:
                assert_never(event)
        self._book.settle(request)

    def _on_receive_complete(self, request: Request) -> None:
        self._kv.end_lease(request.generation, Lease.RECEIVE)
        if request.phase is not Phase.RECEIVING:
            return
        context = TokenRange(0, request.spec.context_tokens)
        self._kv.mark_prompt_valid(request.generation, context)
        self._kv.publish(request.generation, len(request.spec.prompt))
        self._book.move(request, Phase.RECEIVED)
        self._book.emit(Received(request.generation))
        self._received.append(request)

    def _on_send_ended(self, request: Request, error: str | None) -> None:
        if error is not None:
            self._fail(request, error)
        request.completed = request.phase is Phase.SENDING
        self._book.let_go(request)

    def _fail(self, request: Request, message: str) -> None:
        self._book.fail(request, TransferFailed.code, message)


_ENDS: dict[type[HandoffEvent], Lease] = {
    ReceiveComplete: Lease.RECEIVE,
    ReceiveEnded: Lease.RECEIVE,
    SendEnded: Lease.SEND,
    Quarantined: Lease.RECEIVE,
    QuarantineEnded: Lease.QUARANTINE,
}
