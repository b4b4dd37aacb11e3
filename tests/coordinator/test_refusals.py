"""What the coordinator refuses, and what it does when workers refuse or put off."""

from rlt.connector.messages import (
    Generate,
    PairReady,
    Peers,
    Refused,
    Reserve,
)

from .looking import asks, assert_idle, outcome, rejections
from .workers import ScriptedWorker
from .world import World


def test_what_no_pool_can_ever_hold_is_refused_at_once() -> None:
    world = World()
    world.add(ScriptedWorker("small", "decode", num_blocks=8))
    world.deliver_all()
    world.generate("fits", max_tokens=100)
    world.kill(world.named("d0").incarnation)
    world.generate("too long", max_tokens=100)
    assert rejections(world) == ["too_long"]


def test_a_prompt_too_long_for_every_prefill_pool_is_refused_at_once() -> None:
    world = World(prefill=0)
    world.add(ScriptedWorker("p", "prefill", num_blocks=8))
    world.deliver_all()
    world.generate(prompt=(1,) * 33, max_tokens=1)
    assert rejections(world) == ["too_long"]


def test_a_full_line_is_overloaded() -> None:
    world = World(prefill=0, decode=0, max_queue=2)
    for number in range(3):
        world.generate(f"r{number}")
    assert rejections(world) == ["overloaded"]


def test_a_duplicate_live_id_is_refused_and_the_first_goes_on() -> None:
    world = World()
    world.generate("r")
    world.generate("r")
    assert rejections(world) == ["duplicate_request"]
    world.generate("r", client=b"c1")  # IDs are the connection's own
    assert_idle(world)
    assert outcome(world, "r") == outcome(world, "r", b"c1") == "length"
    world.generate("r")
    assert_idle(world)


def test_a_submission_that_comes_twice_is_answered_twice_and_served_once() -> None:
    world = World()
    submission = world.generate("r")
    world.generate("", prompt=())
    request = world.clients[b"c0"].sent[submission]
    world.from_client(Generate(submission=submission, request=request))
    assert_idle(world)
    world.from_client(Generate(submission=submission, request=request))
    assert world.state.idle
    assert world.state.counters["accepted"] == 1
    assert rejections(world) == ["invalid_request"]


def test_one_workers_refusal_sends_the_request_to_another() -> None:
    world = World(decode=2)
    world.named("d0").num_blocks = 0  # smaller than it said when it registered
    for number in range(4):
        world.generate(f"r{number}")
    assert_idle(world)
    assert [outcome(world, f"r{number}") for number in range(4)] == ["length"] * 4


def test_a_reservation_that_the_prefill_worker_cannot_use_is_the_decode_workers_fault() -> None:
    world = World(prefill=1, decode=2)
    world.generate(max_tokens=3)
    first = next(worker for worker in world.workers.values() if worker.role == "decode")
    bad = world.named("d0") if asks(world.named("d0"), Reserve) else first
    world.deliver_to_worker(bad.incarnation)
    world.deliver_to_coordinator(bad.incarnation)
    [generation] = bad.live
    word = Refused(generation=generation, code="protocol", reason="block 99 is outside the pool")
    world.perform(world.state.handle_worker(world.named("p0").incarnation, word, world.now))
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_refusal_by_every_worker_reaches_the_client() -> None:
    world = World()
    generous = world.named("d0")
    generous.num_blocks = 4  # smaller than it said when it registered
    world.generate(max_tokens=100)
    assert_idle(world)
    assert outcome(world) == "too_long"


def test_must_wait_is_asked_again_as_soon_as_that_worker_lets_something_go() -> None:
    world = World()
    world.generate("a", prompt=(1,), max_tokens=1)
    world.deliver_all()
    world.named("d0").num_blocks = 4  # room for one request only: fuller than the credits say
    world.generate("b", prompt=(1,), max_tokens=1)
    world.deliver_all()
    reserves = len(asks(world.named("d0"), Reserve))
    while world.life("a").last is None:
        world.work()
        world.deliver_all()
    world.deliver_all()
    assert len(asks(world.named("d0"), Reserve)) == reserves + 1  # without any time passing
    assert_idle(world)
    assert outcome(world, "b") == "length"


def test_a_worker_that_makes_a_request_wait_for_long_loses_it_to_another() -> None:
    world = World(decode=2, heartbeat_timeout_s=100.0)
    world.named("d0").num_blocks = 0  # nothing of that shows in the credits
    world.named("d0").refuses_never = True
    world.generate("a", max_tokens=3)
    world.deliver_all()
    assert [a.must_wait for a in world.state._attempts.at("d0-1")] == [True]
    for _ in range(12):
        world.pass_time(1.0)
        world.deliver_all()
    assert not world.state._attempts.at("d0-1") and world.named("d1").live
    assert world.state.counters["reservations_moved"] == 1
    assert_idle(world)
    assert outcome(world, "a") == "length" and not world.state.counters["retries"]


def test_a_closed_pair_is_not_asked_again_until_it_is_ready_again() -> None:
    world = World()
    prefill = world.named("p0")
    world.generate()
    world.deliver_to_worker("d0-1")
    world.deliver_to_coordinator("d0-1")
    generation = next(iter(world.named("d0").live))
    world.to_worker["p0-1"].clear()
    no = Refused(generation=generation, code="pair_closed", reason="cut")
    world.perform(world.state.handle_worker("p0-1", no, world.now))
    world.deliver_all()
    assert not prefill.live and len(asks(world.named("d0"), Reserve)) == 1
    world.perform(world.state.handle_worker("p0-1", PairReady(decode="d0-1"), world.now))
    assert_idle(world)
    assert outcome(world) == "length"


def test_who_holds_numbers_for_closed_that_were_never_given_gets_higher_ones() -> None:
    """As after a damaged HeartbeatAnswer: else that worker would refuse all requests for ever."""
    world = World()
    world.generate()
    [first] = asks(world.named("d0"), Reserve) or [world.to_worker["d0-1"][-1]]
    world.to_worker["d0-1"].clear()
    no = Refused(generation=first.generation, code="closed", reason="it ended here")
    world.perform(world.state.handle_worker("d0-1", no, world.now))
    world.deliver_to_worker("d0-1")
    again = asks(world.named("d0"), Reserve)[-1]
    assert again.generation >> 40 == (first.generation >> 40) + 1
    world.deliver_all()
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_decode_worker_that_does_not_know_the_prefill_worker_yet_is_told_of_it() -> None:
    world = World()
    world.generate()
    [generation] = [a.generation for a in world.state._attempts.at("d0-1")]
    world.to_worker["d0-1"].clear()
    no = Refused(generation=generation, code="pair_closed", reason="who is p0-1?")
    world.perform(world.state.handle_worker("d0-1", no, world.now))
    told = [type(message) for message in world.to_worker["d0-1"]]
    assert told == [Peers, Reserve]
    assert_idle(world)
    assert outcome(world) == "length"
