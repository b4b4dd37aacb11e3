"""The protocol core of the client library: messages in, events out."""

import pytest

from rlt.connector.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CancelDone,
    Deltas,
    Rejected,
    ServiceInfo,
)
from rlt.coordinator.client_protocol import (
    Abandoned,
    CancelAnswered,
    ClientCore,
    Heard,
    Refused,
    Taken,
    Welcomed,
)
from rlt.runtime.errors import DuplicateRequest, InvalidRequest, Overloaded, ProtocolError
from rlt.runtime.interfaces import Delta, GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

R = RequestId("r")


def request(**fields: object) -> GenerateRequest:
    return GenerateRequest(request_id=R, **{"prompt_token_ids": (1,), **fields})  # type: ignore[arg-type]


def delta(start: int, reason: FinishReason | None = None) -> Delta:
    return Delta(request_id=R, start_index=start, token_ids=(7,), finish_reason=reason)


def accepted_core() -> ClientCore:
    core = ClientCore()
    generate = core.submit(request())
    assert core.receive(Accepted(submission=generate.submission)) == [Taken(R)]
    return core


def test_deltas_come_out_until_the_last_which_frees_the_id() -> None:
    core = accepted_core()
    last = delta(1, FinishReason.STOP)
    assert core.receive(Deltas(deltas=(delta(0), last))) == [Heard(delta(0)), Heard(last)]
    assert not core.waiting
    assert core.submit(request()).submission == 2


def test_a_live_id_cannot_be_submitted_again() -> None:
    core = accepted_core()
    with pytest.raises(DuplicateRequest):
        core.submit(request())


def test_a_cancelled_id_is_free_only_when_the_cancel_was_answered() -> None:
    core = accepted_core()
    assert core.cancel(R) is not None and core.cancel(R) is None
    last = delta(0, FinishReason.CANCELLED)
    assert core.receive(Deltas(deltas=(last,))) == [Heard(last)]
    with pytest.raises(DuplicateRequest):
        core.submit(request())
    assert core.receive(CancelDone(request_id=R)) == [CancelAnswered(R)]
    core.submit(request())


def test_an_earlier_lifes_output_is_not_taken_for_the_new_ones() -> None:
    core = accepted_core()
    core.lose_service("silent")
    core.submit(request())
    assert core.receive(Deltas(deltas=(delta(5),))) == []
    assert core.receive(CancelDone(request_id=R)) == []
    assert core.receive(Accepted(submission=2)) == [Taken(R)]
    assert core.receive(Deltas(deltas=(delta(0),))) == [Heard(delta(0))]


def test_a_rejection_raises_the_class_that_its_code_names() -> None:
    core = ClientCore()
    core.submit(request())
    message = Rejected(submission=1, request_id=R, code="overloaded", error="later")
    [event] = core.receive(message)
    assert isinstance(event, Refused) and isinstance(event.error, Overloaded)
    assert core.receive(message) == [] and not core.waiting


def test_a_rejection_after_the_request_was_accepted_changes_nothing() -> None:
    core = accepted_core()
    late = Rejected(submission=1, request_id=R, code="duplicate_request", error="live")
    assert core.receive(late) == [] and core.active() == (R,)
    last = delta(0, FinishReason.STOP)
    assert core.receive(Deltas(deltas=(last,))) == [Heard(last)]


def test_an_acceptance_after_the_request_was_rejected_changes_nothing() -> None:
    core = ClientCore()
    core.submit(request())
    core.cancel(R)
    late = Rejected(submission=1, request_id=R, code="overloaded", error="later")
    assert len(core.receive(late)) == 1
    assert core.receive(Accepted(submission=1)) == core.receive(late) == []
    assert core.receive(CancelDone(request_id=R)) == [CancelAnswered(R)]


def test_a_gap_in_the_output_ends_its_request_here_and_at_the_service() -> None:
    core = accepted_core()
    heard, abandoned = core.receive(Deltas(deltas=(delta(1),)))
    assert isinstance(heard, Heard) and heard.delta.error_code == "service_lost"
    assert abandoned == Abandoned(R) and not core.waiting
    assert core.receive(Deltas(deltas=(delta(2),))) == []


def test_a_broken_connection_ends_what_was_accepted_and_keeps_what_was_not() -> None:
    core = accepted_core()
    core.receive(Deltas(deltas=(delta(0),)))
    other = RequestId("other")
    generate = core.submit(GenerateRequest(request_id=other, prompt_token_ids=(1,)))
    core.cancel(R)
    heard, answered, abandoned = core.connection_lost()
    assert isinstance(heard, Heard) and heard.delta.error_code == "service_lost"
    assert (answered, abandoned) == (CancelAnswered(R), Abandoned(R))
    assert core.active() == (other,)
    assert core.receive(info("new")) == [Welcomed(info("new"))]
    assert core.receive(Accepted(submission=generate.submission)) == [Taken(other)]


def test_another_instance_of_the_service_ends_what_an_older_one_had_accepted() -> None:
    core = ClientCore()
    core.receive(info("old"))
    core.submit(request())
    core.receive(Accepted(submission=1))
    assert core.receive(info("old")) == [Welcomed(info("old"))]
    heard, abandoned, welcomed = core.receive(info("new"))
    assert isinstance(heard, Heard) and heard.delta.error_code == "service_lost"
    assert (abandoned, welcomed) == (Abandoned(R), Welcomed(info("new")))
    assert core.submit(request()).submission == 2


def info(instance: str) -> ServiceInfo:
    return ServiceInfo(protocol_version=PROTOCOL_VERSION, model="m", ready=True, instance=instance)


def test_losing_the_service_ends_every_live_request_by_name() -> None:
    core = accepted_core()
    core.receive(Deltas(deltas=(delta(0),)))
    core.cancel(R)
    heard, answered = core.lose_service("silent")
    assert isinstance(heard, Heard) and heard.delta.error_code == "service_unreachable"
    assert heard.delta.start_index == 1
    assert answered == CancelAnswered(R)
    assert not core.waiting and core.lose_service("again") == []


def test_another_protocol_version_is_named() -> None:
    info = ServiceInfo(protocol_version=PROTOCOL_VERSION + 1, model="m", ready=True)
    with pytest.raises(ProtocolError, match="same rlt version"):
        ClientCore().receive(info)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": ("a",)},
        {"prompt_token_ids": (2**80,)},
        {"sampling": SamplingParams(max_tokens="x")},  # type: ignore[arg-type]
        {"text": object(), "prompt_token_ids": None},
        {"prompt_token_ids": tuple(range(1 << 16, (1 << 16) + (1 << 24)))},
    ],
)
def test_what_the_service_could_not_decode_never_leaves(fields: dict[str, object]) -> None:
    core = ClientCore()
    with pytest.raises(InvalidRequest):
        core.submit(request(**fields))
    assert not core.waiting


def test_a_cancel_that_means_an_earlier_submission_is_nothing_to_do() -> None:
    core = ClientCore()
    first = core.submit(request()).submission
    core.receive(Rejected(submission=first, request_id=R, code="overloaded", error="full"))
    second = core.submit(request()).submission
    assert core.cancel(R, first) is None and not core.is_live(R, first)
    assert core.is_live(R, second) and core.cancel(R, second) is not None
