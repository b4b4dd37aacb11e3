"""The outbox: few frames, and for each client everything in order."""

from rlt.connector.channel import SendResult
from rlt.connector.messages import (
    CancelDone,
    Confirm,
    ConfirmRow,
    CoordinatorToClient,
    CoordinatorToWorker,
    Deltas,
    Welcome,
)
from rlt.coordinator.effects import ConfirmOutput, Deliver, Outbox, SendClient, SendWorker
from rlt.runtime.interfaces import Delta
from rlt.runtime.types import Generation, RequestId

A, B = b"a", b"b"


def delta(start: int) -> Delta:
    return Delta(request_id=RequestId("r"), start_index=start, token_ids=(start,))


class Wire:
    def __init__(self) -> None:
        self.clients: list[tuple[bytes, CoordinatorToClient]] = []
        self.workers: list[tuple[str, CoordinatorToWorker]] = []
        self.answer: dict[bytes | str, SendResult] = {}
        self.outbox = Outbox(self._client, self._worker)

    def _client(self, client: bytes, message: CoordinatorToClient) -> SendResult:
        answer = self.answer.get(client, SendResult.SENT)
        if answer is SendResult.SENT:
            self.clients.append((client, message))
        return answer

    def _worker(self, incarnation: str, message: CoordinatorToWorker) -> SendResult:
        answer = self.answer.get(incarnation, SendResult.SENT)
        if answer is SendResult.SENT:
            self.workers.append((incarnation, message))
        return answer


def test_one_frame_per_client_and_one_confirm_per_worker() -> None:
    wire = Wire()
    for start in range(3):
        wire.outbox.add([Deliver(A, delta(start)), Deliver(B, delta(start))])
        wire.outbox.add([ConfirmOutput("d", Generation(1), start + 1)])
    wire.outbox.add([ConfirmOutput("d", Generation(2), 1)])
    assert wire.outbox.flush() == ([], [])
    deltas = Deltas(deltas=(delta(0), delta(1), delta(2)))
    assert wire.clients == [(A, deltas), (B, deltas)]
    rows = (ConfirmRow(Generation(1), 3), ConfirmRow(Generation(2), 1))
    assert wire.workers == [("d", Confirm(rows=rows))]
    assert wire.outbox.flush() == ([], []) and len(wire.clients) == 2


def test_nothing_overtakes_a_clients_output() -> None:
    wire = Wire()
    done = CancelDone(request_id=RequestId("r"))
    wire.outbox.add([Deliver(A, delta(0)), SendClient(A, done), Deliver(A, delta(0))])
    wire.outbox.flush()
    one = Deltas(deltas=(delta(0),))
    assert [message for _, message in wire.clients] == [one, done, one]


def test_what_a_full_client_does_not_take_waits_in_order_and_holds_up_nobody() -> None:
    wire = Wire()
    wire.answer[A] = SendResult.FULL
    for start in range(5):
        wire.outbox.add([Deliver(A, delta(start)), Deliver(B, delta(start))])
        wire.outbox.flush()
    assert len(wire.clients) == 5 and {client for client, _ in wire.clients} == {B}
    assert wire.outbox.blocked_clients() == [A] and wire.outbox.backlog(A) == 5
    del wire.answer[A]
    wire.outbox.flush()
    assert wire.clients[-1] == (A, Deltas(deltas=tuple(map(delta, range(5)))))
    assert wire.outbox.blocked_clients() == []


def test_peers_that_are_gone_are_named_and_their_backlog_is_dropped() -> None:
    wire = Wire()
    wire.answer.update({A: SendResult.GONE, "d": SendResult.GONE})
    wire.outbox.add([Deliver(A, delta(0)), SendWorker("d", Welcome(epoch=1, heartbeat_s=1.0))])
    assert wire.outbox.flush() == ([A], ["d"])
    assert wire.outbox.backlog(A) == 0 and wire.outbox.flush() == ([], [])
