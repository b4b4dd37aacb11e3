"""The client's side of the protocol without any I/O: messages in, events out.

Owns which requests of one connection live and what each may still hear. After a cancel is answered
nothing of that request comes out. Both clients share it; pyzmq is not even imported here.
"""

from dataclasses import dataclass
from typing import assert_never

import msgspec

from ..connector.codec import MAX_REQUEST_BYTES, encode
from ..connector.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Alive,
    AskStatistics,
    CancelDone,
    CancelRequest,
    CoordinatorToClient,
    Deltas,
    DrainAnswer,
    DrainWorker,
    Generate,
    Rejected,
    ServiceInfo,
    Statistics,
)
from ..runtime.errors import (
    DuplicateRequest,
    InvalidRequest,
    ProtocolError,
    RltError,
    ServiceLost,
    ServiceUnreachable,
    error_from,
)
from ..runtime.interfaces import Delta, GenerateRequest
from ..runtime.types import FinishReason, RequestId


class Welcomed(msgspec.Struct, frozen=True):
    info: ServiceInfo


class Taken(msgspec.Struct, frozen=True):
    """The service has accepted the request."""

    request_id: RequestId


class Refused(msgspec.Struct, frozen=True):
    """The service has not taken the request: nothing of it will be heard."""

    request_id: RequestId
    error: RltError


class Heard(msgspec.Struct, frozen=True):
    """A piece of output; the last one has a finish_reason."""

    delta: Delta


class CancelAnswered(msgspec.Struct, frozen=True):
    request_id: RequestId


class Told(msgspec.Struct, frozen=True):
    """Statistics, in answer to ask number `ask`."""

    ask: int
    statistics: dict[str, object]


class Drained(msgspec.Struct, frozen=True):
    """The drain of a worker has begun, or why it has not."""

    answer: DrainAnswer


class Abandoned(msgspec.Struct, frozen=True):
    """The service may still go on with a request that has ended here: it is to be cancelled."""

    request_id: RequestId


Event = Welcomed | Taken | Refused | Heard | CancelAnswered | Told | Drained | Abandoned


@dataclass
class _Live:
    submission: int
    outputs: int = 0
    accepted: bool = False
    ended: bool = False  # its last delta is out; kept while a cancel is open
    cancelling: bool = False

    @property
    def answered(self) -> bool:
        """Accepted or rejected; what says so again, or otherwise, comes too late."""
        return self.accepted or self.ended


class ClientCore:
    def __init__(self) -> None:
        self._live: dict[RequestId, _Live] = {}
        self._by_submission: dict[int, RequestId] = {}
        self._submissions = 0
        self._asks = 0
        self._instance = ""  # of the service, as it said last

    def submit(self, request: GenerateRequest) -> Generate:
        """Raises at once what the service would never understand."""
        if request.request_id in self._live:
            raise DuplicateRequest(
                f"request {request.request_id} is still live: cancel it or choose another ID"
            )
        generate = Generate(submission=self._submissions + 1, request=request)
        _check_types(generate)
        self._submissions += 1
        self._live[request.request_id] = _Live(self._submissions)
        self._by_submission[self._submissions] = request.request_id
        return generate

    def is_live(self, request_id: RequestId, submission: int | None = None) -> bool:
        """An ID may be used again once its request has ended; the submission says which is meant,
        None any."""
        live = self._live.get(request_id)
        return live is not None and submission in (None, live.submission)

    def cancel(self, request_id: RequestId, submission: int | None = None) -> CancelRequest | None:
        """None if there is nothing to cancel, or it has been asked already."""
        live = self._live.get(request_id)
        if live is None or live.cancelling or not self.is_live(request_id, submission):
            return None
        live.cancelling = True
        return CancelRequest(request_id=request_id)

    def ask_statistics(self) -> AskStatistics:
        self._asks += 1
        return AskStatistics(ask=self._asks)

    def ask_drain(self, worker: str, *, restart: bool) -> DrainWorker:
        self._asks += 1
        return DrainWorker(worker=worker, restart=restart, ask=self._asks)

    def active(self) -> tuple[RequestId, ...]:
        return tuple(name for name, live in self._live.items() if not live.ended)

    def receive(self, message: CoordinatorToClient) -> list[Event]:
        match message:
            case ServiceInfo():
                if message.protocol_version != PROTOCOL_VERSION:
                    raise ProtocolError(
                        f"the service speaks protocol {message.protocol_version}, this client "
                        f"{PROTOCOL_VERSION}: install the same rlt version"
                    )
                return [*self._other_instance(message.instance), Welcomed(message)]
            case Accepted(submission=submission):
                return self._accepted(submission)
            case Rejected():
                return self._rejected(message)
            case Deltas(deltas=deltas):
                return [event for delta in deltas for event in self._delta(delta)]
            case CancelDone(request_id=request_id):
                return self._cancel_done(request_id)
            case Statistics():
                values: dict[str, object] = {**message.values}
                values["workers"] = [msgspec.structs.asdict(w) for w in message.workers]
                return [Told(message.ask, values)]
            case DrainAnswer():
                return [Drained(message)]
            case Alive():
                return []
            case _:
                assert_never(message)

    def connection_lost(self) -> list[Event]:
        """What was on the way is lost, so whatever the service had accepted ends here. What it has
        not answered yet is asked again by the next connection."""
        return self._lose_accepted("the connection to the service is lost: ask again")

    def _other_instance(self, instance: str) -> list[Event]:
        """Another start of the service knows nothing of what an older one had accepted."""
        known, self._instance = self._instance, instance
        if known in ("", instance):
            return []
        return self._lose_accepted("the service was started again: ask again")

    def _lose_accepted(self, reason: str) -> list[Event]:
        events: list[Event] = []
        for name in [name for name, live in self._live.items() if live.accepted]:
            events += [*self._lose(name, ServiceLost(reason)), Abandoned(name)]
        return events

    def lose_service(self, reason: str) -> list[Event]:
        """Nobody answers any more: every live request ends here."""
        error = ServiceUnreachable(reason)
        return [event for name in list(self._live) for event in self._lose(name, error)]

    def _lose(self, name: RequestId, error: RltError) -> list[Event]:
        live, events = self._live[name], list[Event]()
        if not live.accepted:
            events.append(Refused(name, error))
        elif not live.ended:
            last = Delta(
                request_id=name,
                start_index=live.outputs,
                finish_reason=FinishReason.ERROR,
                error_code=error.code,
                error=str(error),
            )
            events.append(Heard(last))
        if live.cancelling:
            events.append(CancelAnswered(name))
        self._forget(name)
        return events

    @property
    def waiting(self) -> bool:
        """Whether the service owes an answer or output."""
        return bool(self._live)

    def _accepted(self, submission: int) -> list[Event]:
        name = self._by_submission.get(submission)
        if name is None or self._live[name].answered:
            return []
        self._live[name].accepted = True
        return [Taken(name)]

    def _rejected(self, message: Rejected) -> list[Event]:
        name = self._by_submission.get(message.submission)
        if name is None or self._live[name].answered:
            return []
        live = self._live[name]
        live.ended = True
        if not live.cancelling:
            self._forget(name)
        return [Refused(name, error_from(message.code, message.error))]

    def _delta(self, delta: Delta) -> list[Event]:
        live = self._live.get(delta.request_id)
        if live is None or live.ended or not live.accepted:  # an earlier life's echo
            return []
        if delta.start_index != live.outputs:
            name, due = delta.request_id, live.outputs
            error = ServiceLost(f"output {delta.start_index} came where {due} was due: ask again")
            return [*self._lose(name, error), Abandoned(name)]
        live.outputs += len(delta.token_ids)
        if delta.finish_reason is not None:
            live.ended = True
            if not live.cancelling:
                self._forget(delta.request_id)
        return [Heard(delta)]

    def _cancel_done(self, request_id: RequestId) -> list[Event]:
        live = self._live.get(request_id)
        if live is None or not live.cancelling:
            return []
        self._forget(request_id)
        return [CancelAnswered(request_id)]

    def _forget(self, request_id: RequestId) -> None:
        live = self._live.pop(request_id)
        del self._by_submission[live.submission]


def _check_types(generate: Generate) -> None:
    """The service drops what it cannot decode, so nothing of that kind may leave."""
    try:
        frame = encode(generate)
        msgspec.msgpack.decode(frame, type=Generate)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request is malformed: {error}") from error
    if len(frame) > MAX_REQUEST_BYTES:
        raise InvalidRequest(
            f"the request takes {len(frame)} bytes; at most {MAX_REQUEST_BYTES} can be sent"
        )
