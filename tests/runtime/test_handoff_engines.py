"""Prefill and decode engines joined by a scripted connector: order, cancels anywhere, ends."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.runtime.config import SchedulerConfig
from rlt.runtime.errors import TooLong
from rlt.runtime.events import (
    Activated,
    PrefillFinished,
    Received,
    Refuse,
    Released,
    RequestFailed,
    Reservation,
    Wait,
)
from rlt.runtime.interfaces import (
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
    SendEnded,
)
from rlt.runtime.plans import Stage
from rlt.runtime.types import EngineRequest, Generation, KVLayout

from .helpers import alone, at_rest, engine_request, outcomes
from .oracle import oracle
from .scripted_handoff import Pair, Side
from .simulated_executor import SimulatedExecutor
from .strategies import requests, scheduling

G = Generation(1)


@pytest.fixture
def pair() -> Pair:
    return Pair(Side(SimulatedExecutor()), Side(SimulatedExecutor()))


def test_a_prompt_computed_on_p_continues_on_d_as_if_it_ran_alone(pair: Pair) -> None:
    request = engine_request(1, (1, 2, 3, 4, 5), max_tokens=6)
    pair.start(request)
    pair.settle()
    assert outcomes(pair.decode.events)[G].result == alone(request)
    kinds = [type(event) for event in pair.decode.events]
    assert kinds[:2] == [Received, Activated] and kinds[-1] is Released
    assert [type(event) for event in pair.prefill.events] == [PrefillFinished, Released]
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)


def test_d_computes_no_prompt_token_and_no_loop_before_the_first_output(pair: Pair) -> None:
    pair.start(engine_request(1, (1, 2, 3), max_tokens=1))
    pair.settle()
    assert [plan.stage for plan in pair.decode.executor.plans] == [Stage.CODA]
    activated = [event for event in pair.decode.events if isinstance(event, Activated)]
    assert activated == [Activated(G, 0, 0)]
    numbers = pair.decode.core.statistics()
    assert (numbers["prefill_tokens"], numbers["recurrent_loops"]) == (0, 0)


def test_a_depth_may_be_sent_while_the_next_loop_computes(pair: Pair) -> None:
    pair.prefill.executor.eager = False
    pair.start(engine_request(1))
    pair.prefill.step()
    pair.prefill.executor.finish_pass()
    queued_at_post: list[bool] = []
    executor = pair.prefill.executor
    pair.prefill.transfers.before_post = lambda: queued_at_post.append(executor.pass_queued)
    pair.prefill.step()
    assert [order.depth for order in pair.prefill.transfers.posted] == [0]
    assert queued_at_post == [True], "the next loop was not submitted before the WRITE"


def test_p_keeps_its_blocks_until_the_connector_says_that_sending_ended(pair: Pair) -> None:
    pair.start(engine_request(1))
    for _ in range(12):
        pair.prefill.step()
    assert pair.prefill.core.live() == {G: "sending"}
    assert pair.prefill.core.statistics()["leases_send"] == 1
    assert pair.prefill.step(SendEnded(G, None)) == [Released(G)]
    at_rest(pair.prefill.core)


def test_a_failed_send_fails_the_request_by_name_then_releases_it(pair: Pair) -> None:
    pair.start(engine_request(1))
    for _ in range(12):
        pair.prefill.step()
    failed, released = pair.prefill.step(SendEnded(G, "peer lost"))
    assert failed == RequestFailed(G, "transfer_failed", "peer lost")
    assert released == Released(G)


def test_a_failed_pass_on_p_keeps_the_blocks_until_the_writer_has_ended(pair: Pair) -> None:
    pair.start(engine_request(1))
    pair.prefill.step()
    pair.prefill.executor.fail_next_pass = "boom"
    assert [type(event) for event in pair.prefill.step()] == [RequestFailed]
    assert pair.prefill.core.live() == {G: "cancelling"}
    assert pair.prefill.step(SendEnded(G, "stopped")) == [Released(G)]
    at_rest(pair.prefill.core)


def test_reserve_gives_the_same_answer_again(pair: Pair) -> None:
    request = engine_request(1)
    first = pair.decode.core.reserve(request)
    assert isinstance(first, Reservation)
    assert pair.decode.core.reserve(request) == first
    assert pair.decode.core.statistics()["allocations"] == 1


def test_reserve_says_wait_when_full_and_refuses_what_can_never_fit(pair: Pair) -> None:
    core = pair.decode.core
    assert isinstance(core.reserve(engine_request(1, max_tokens=12)), Reservation)
    assert isinstance(core.reserve(engine_request(2, max_tokens=12)), Wait)  # blocks
    assert isinstance(core.reserve(engine_request(3, (1,), max_tokens=1)), Reservation)
    assert isinstance(core.reserve(engine_request(4, (1,), max_tokens=1)), Wait)  # slots
    never = core.reserve(engine_request(5, max_tokens=40))
    assert isinstance(never, Refuse) and never.code == "too_long"
    pair.decode.core.check()


def test_p_takes_blocks_for_the_prompt_alone(pair: Pair) -> None:
    with pytest.raises(TooLong):
        pair.prefill.core.add_prefill(engine_request(2, [1] * 29))
    pair.prefill.core.add_prefill(engine_request(1, (1, 2, 3), max_tokens=60))
    pair.prefill.core.add_prefill(engine_request(1, (1, 2, 3), max_tokens=60))
    pair.prefill.step()
    assert pair.prefill.core.statistics()["blocks_free"] == 40 - 2 * 4


def test_the_receive_slot_is_held_until_the_first_coda_is_retired(pair: Pair) -> None:
    pair.decode.executor.eager = False
    pair.start(engine_request(1))
    for _ in range(20):
        pair.prefill.step()
        pair.deliver()
    pair.decode.step()
    assert pair.decode.core.statistics()["receive_slots_free"] == 1
    assert pair.decode.core.statistics()["slots_free"] == 3
    pair.decode.executor.finish_pass()
    pair.decode.step()
    assert pair.decode.core.statistics()["receive_slots_free"] == 2


def test_received_requests_of_lower_priority_numbers_get_a_slot_first() -> None:
    pair = Pair(
        Side(SimulatedExecutor(num_blocks=200)),
        Side(SimulatedExecutor(num_blocks=200, num_slots=1, num_receive_slots=4)),
    )
    for generation, priority in ((1, 0), (2, 7), (3, -1), (4, 7)):
        request = engine_request(generation, priority=priority)
        assert isinstance(pair.start(request), Reservation)
    while len([event for event in pair.prefill.events if isinstance(event, Released)]) < 4:
        pair.prefill.step()
        pair.deliver()
    pair.settle()
    order = [event.generation for event in pair.decode.events if isinstance(event, Activated)]
    assert order == [3, 1, 2, 4]


def test_a_cancelled_receive_keeps_its_memory_until_the_writer_has_ended(pair: Pair) -> None:
    pair.decode.core.reserve(engine_request(1))
    pair.decode.core.cancel(G)
    assert pair.decode.step() == [] and pair.decode.core.live() == {G: "cancelling"}
    assert isinstance(pair.decode.core.reserve(engine_request(1)), Refuse)
    assert pair.decode.step(ReceiveEnded(G)) == [Released(G)]
    at_rest(pair.decode.core)


def test_a_cancelled_receive_ends_when_everything_has_arrived(pair: Pair) -> None:
    pair.decode.core.reserve(engine_request(1))
    pair.decode.core.cancel(G)
    assert pair.decode.step(ReceiveComplete(G)) == [Released(G)]
    at_rest(pair.decode.core)


def test_quarantined_memory_is_withdrawn_and_counted_until_its_quarantine_ends(pair: Pair) -> None:
    core = pair.decode.core
    core.reserve(engine_request(1))
    core.cancel(G)
    assert pair.decode.step(Quarantined(G)) == [Released(G, quarantined_blocks=12)]
    at_rest(core)
    numbers = core.statistics()
    assert numbers["blocks_quarantined"] == 12 and numbers["blocks_free"] == 28
    assert (numbers["slots_withdrawn"], numbers["receive_slots_free"]) == (1, 1)
    large = engine_request(2, max_tokens=14)
    assert isinstance(core.reserve(large), Wait), "it needs withdrawn blocks, which may come back"
    assert pair.decode.step(QuarantineEnded(G)) == []
    numbers = core.statistics()
    assert numbers["blocks_quarantined"] == 0 and numbers["blocks_free"] == 40
    assert (numbers["slots_withdrawn"], numbers["receive_slots_free"]) == (0, 2)
    assert isinstance(core.reserve(large), Reservation)
    assert pair.decode.step(QuarantineEnded(G)) == []
    assert core.statistics()["late_handoff_events"] == 1


def test_a_receive_that_ends_early_fails_the_request(pair: Pair) -> None:
    pair.decode.core.reserve(engine_request(1))
    failed, released = pair.decode.step(ReceiveEnded(G))
    assert isinstance(failed, RequestFailed) and failed.code == "transfer_failed"
    assert released == Released(G)


def test_late_and_repeated_handoff_events_change_nothing(pair: Pair) -> None:
    late = (ReceiveComplete(G), ReceiveEnded(G), SendEnded(G, "x"), Quarantined(G))
    assert pair.decode.step(*late, QuarantineEnded(G)) == []
    pair.decode.core.reserve(engine_request(1))
    assert pair.decode.step(SendEnded(G, "not ours"), QuarantineEnded(G)) == []
    assert pair.decode.core.statistics()["late_handoff_events"] == 7
    assert pair.decode.core.live() == {G: "receiving"}


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_a_cancel_at_any_time_gives_everything_back(pair: Pair, steps: int) -> None:
    pair.start(engine_request(1, (1, 2, 3, 4, 5, 6), max_tokens=5))
    for _ in range(steps):
        pair.prefill.step()
        pair.deliver()
        pair.decode.step()
    before = len(outcomes(pair.decode.events)[G].tokens) if pair.decode.events else 0
    pair.cancel(G)
    pair.stop_writer(G, proof=True)
    pair.settle()
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)
    assert len(outcomes(pair.decode.events)[G].tokens) == before
    for side in (pair.prefill, pair.decode):
        assert sum(event == Released(G) for event in side.events) == 1


ACTIONS = ["start", *"ppdd", "deliver", "deliver", "deliver", "cancel", "lose", "prove"]


@settings(max_examples=200, deadline=None)
@given(
    made=requests(most=6),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=150),
    on_p=scheduling(),
    on_d=scheduling(),
    layout=st.sampled_from(["last_exited", "shared"]),
    one_by_one=st.booleans(),
)
def test_whatever_the_order_every_request_ends_once_on_both_sides(
    made: list[EngineRequest],
    actions: list[tuple[str, int]],
    on_p: dict[str, Any],
    on_d: dict[str, Any],
    layout: KVLayout,
    one_by_one: bool,
) -> None:
    pair = Pair(
        Side(SimulatedExecutor(num_blocks=32, layout=layout), config=SchedulerConfig(**on_p)),
        Side(
            SimulatedExecutor(num_blocks=64, num_slots=2, num_receive_slots=3, layout=layout),
            config=SchedulerConfig(**on_d),
        ),
    )
    pair.prefill.executor.one_by_one = pair.decode.executor.one_by_one = one_by_one
    left, started, cancelled = list(made), set[Generation](), set[Generation]()

    def start() -> None:
        if left and isinstance(pair.start(left[0]), Reservation):
            started.add(left.pop(0).generation)

    for action, number in actions:
        generation = Generation(number)
        match action:
            case "start":
                start()
            case "p":
                pair.prefill.step()
            case "d":
                pair.decode.step()
            case "deliver":
                pair.deliver(number)
            case "cancel" | "lose" if generation in started - cancelled:
                cancelled.add(generation)
                pair.cancel(generation)
                pair.prefill.core.check()
                pair.decode.core.check()
                pair.stop_writer(generation, proof=action == "cancel")
            case "prove":
                pair.prove(generation)
            case _:
                pass
    pair.settle()
    at_rest(pair.decode.core)
    for request in made:
        pair.prove(request.generation)
    pair.decode.step()
    numbers = pair.decode.core.statistics()
    assert (numbers["blocks_quarantined"], numbers["slots_withdrawn"]) == (0, 0)
    assert (numbers["blocks_free"], numbers["receive_slots_free"]) == (64, 3)
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)
    decoded, computed = outcomes(pair.decode.events), outcomes(pair.prefill.events)
    for request in made:
        if request.generation in started:
            outcome, expected = decoded[request.generation], oracle(request, layout)
            assert outcome.released == computed[request.generation].released == 1
            assert outcome.tokens == expected[0][: len(outcome.tokens)]
            assert request.generation in cancelled or outcome.result == expected
