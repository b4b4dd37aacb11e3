"""Submissions that are sent again: answered, never served twice, and nobody waits for ever."""

import pytest

from rlt.connector.messages import Accepted, CancelRequest, Deltas, Generate, Rejected
from rlt.coordinator.answers import REMEMBERED_ANSWERS
from rlt.coordinator.client_protocol import ClientCore, Event, Heard, Refused, Taken
from rlt.coordinator.effects import Deliver, Effect, SendClient
from rlt.runtime.errors import InvalidRequest
from rlt.runtime.interfaces import Delta, GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from .looking import assert_idle
from .world import World

CLIENT = b"c0"
OUTPUT = tuple(
    Delta(
        request_id=RequestId("r"),
        start_index=index,
        token_ids=(9,),
        finish_reason=FinishReason.LENGTH if index == 3 else None,
    )
    for index in range(4)
)


class Pair:
    """The real client core and the coordinator's state; the caller says what is lost between."""

    def __init__(self) -> None:
        self.world = World(max_queue=4 * REMEMBERED_ANSWERS)
        self.core = ClientCore()

    def submit(self, name: str, max_tokens: int = 4) -> Generate:
        generate = self.core.submit(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=(5, 6, 7),
                sampling=SamplingParams(max_tokens=max_tokens),
            )
        )
        self.world.clients[CLIENT].sent[generate.submission] = generate.request
        return generate

    def ask(self, message: Generate | CancelRequest) -> list[Effect]:
        effects = self.world.state.handle_client(CLIENT, message, self.world.now)
        self.world.perform(effects)
        return effects

    def hear(self, effects: list[Effect]) -> list[Event]:
        events: list[Event] = []
        for effect in effects:
            match effect:
                case SendClient(message=message):
                    events += self.core.receive(message)
                case Deliver(delta=delta):
                    events += self.core.receive(Deltas(deltas=(delta,)))
                case _:
                    pass
        return events

    def others(self) -> None:
        """So many that the answers to older ones are forgotten."""
        for number in range(REMEMBERED_ANSWERS + 1):
            self.hear(self.ask(self.submit(f"other-{number}")))

    @property
    def admitted(self) -> int:
        return self.world.state.counters["accepted"]


def test_a_live_request_is_accepted_again_although_its_answer_is_forgotten() -> None:
    pair = Pair()
    first = pair.submit("r")
    assert pair.hear(pair.ask(first)) == [Taken(RequestId("r"))]
    pair.others()
    admitted = pair.admitted
    assert pair.ask(first) == [SendClient(CLIENT, Accepted(submission=1))]
    assert pair.admitted == admitted


@pytest.mark.parametrize("older", [False, True])
def test_who_hears_only_the_second_answer_of_what_has_ended_waits_for_nothing(older: bool) -> None:
    pair = Pair()
    first = pair.submit("r")
    pair.ask(first)  # all that comes of it is lost with the connection
    assert_idle(pair.world)
    if older:
        pair.others()
    pair.core.connection_lost()
    admitted = pair.admitted
    taken, heard = pair.hear(pair.ask(first))
    assert taken == Taken(RequestId("r")) and isinstance(heard, Heard)
    assert heard.delta.finish_reason is FinishReason.ERROR
    assert (heard.delta.error_code, heard.delta.start_index) == ("service_lost", 0)
    assert "r" not in pair.core.active() and pair.admitted == admitted


@pytest.mark.parametrize("heard", [0, 1, 4])
def test_a_second_answer_that_comes_after_the_whole_output_is_passed_over(heard: int) -> None:
    """heard: outputs that had come before it was asked again; the others are on the way."""
    pair = Pair()
    first = pair.submit("r")
    slow: list[Effect] = [SendClient(CLIENT, Accepted(submission=first.submission))]
    slow += [Deliver(CLIENT, piece) for piece in OUTPUT]
    pair.ask(first)
    assert_idle(pair.world)
    if heard:
        pair.hear(slow[: 1 + heard])
        del slow[: 1 + heard]
    again = pair.ask(first)
    assert [type(effect) for effect in again] == [SendClient, Deliver]
    events = pair.hear(slow)
    assert pair.hear(again) == [] and not pair.core.waiting
    assert all(e.delta.error_code is None for e in events if isinstance(e, Heard))
    pair.submit("r")  # the ID is free, and what comes late does not end the next one
    assert pair.hear(again) == [] and pair.core.active() == ("r",)


def test_an_older_submission_asked_again_does_not_end_a_live_request_of_the_same_id() -> None:
    pair = Pair()
    first = pair.submit("r")
    pair.hear(pair.ask(first))
    pair.core.cancel(RequestId("r"))
    pair.hear(pair.ask(CancelRequest(request_id=RequestId("r"))))
    pair.hear(pair.ask(pair.submit("r")))
    assert pair.ask(first) == [SendClient(CLIENT, Accepted(submission=first.submission))]
    assert pair.core.active() == ("r",)


def test_a_refusal_that_is_asked_for_again_is_the_same() -> None:
    pair = Pair()
    bad = pair.submit("r", max_tokens=0)
    assert pair.ask(bad) == pair.ask(bad)
    assert isinstance(pair.world.clients[CLIENT].rejected[0], Rejected)


def test_a_request_id_that_is_too_long_is_neither_remembered_nor_sent_back_whole() -> None:
    pair = Pair()
    name = "r" * 100_000
    effects = pair.ask(pair.submit(name))
    [rejected] = pair.world.clients[CLIENT].rejected
    assert len(rejected.request_id) <= 256 and len(rejected.error) < 1000
    [refused] = pair.hear(effects)  # who sent it knows it all the same
    assert isinstance(refused, Refused) and refused.request_id == name
    assert isinstance(refused.error, InvalidRequest) and not pair.core.waiting
