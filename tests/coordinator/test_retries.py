"""Attempts that fail: they are tried again with another pair, going on from what was delivered."""

import pytest

from rlt.connector.messages import Cancel, Reserve

from .looking import asks, assert_idle, outcome, step_until
from .workers import ScriptedWorker, expected_tokens
from .world import World


@pytest.mark.parametrize("code", ["transfer_failed", "pass_failed", "worker_lost", "pair_closed"])
@pytest.mark.parametrize("role", ["p0", "d0"])
def test_an_attempt_that_fails_is_tried_again_with_a_pair_that_has_not_failed(
    role: str, code: str
) -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    step_until(world, "computing")
    worker = world.named(role)
    [generation] = worker.live
    world.to_coordinator[worker.incarnation].extend(worker.fail(generation, code))
    assert_idle(world)
    assert outcome(world) == "length"
    assert world.state.counters[f"retries.{code}"] == 1 and not world.state.counters["replays"]
    other = world.named("d0" if role == "p0" else "p0")
    assert len(asks(other, Cancel)) == 1
    [first], [second] = asks(world.named("d0"), Reserve), asks(world.named("d1"), Reserve)
    assert isinstance(first, Reserve) and isinstance(second, Reserve)
    assert (first.prefill, second.prefill) == ("p0-1", "p1-1")
    assert second.generation > first.generation
    last = world.life().last
    assert last is not None and "retried" in [stamp.event for stamp in last.timeline]


@pytest.mark.parametrize("delivered", [1, 2, 3, 8])
def test_what_was_delivered_is_replayed_elsewhere_without_gap_or_repetition(delivered: int) -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    while len(world.life().tokens) < delivered:
        world.work()
        world.deliver_all()
    world.kill("d0-1")
    assert_idle(world)
    assert outcome(world) == "length"  # the client checks every token
    [again] = asks(world.named("d1"), Reserve)
    assert isinstance(again, Reserve)
    whole = expected_tokens((5, 6, 7), 9)
    assert again.request.delivered == whole[:delivered]
    assert again.request.sampling.seed == 7
    assert world.state.counters["replays"] == 1


def test_output_that_was_lost_with_its_worker_is_computed_again() -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    while len(world.life().tokens) < 3:
        world.work()
        world.deliver_all()
    world.work()  # a fourth one never arrives
    world.kill("d0-1")
    assert_idle(world)
    assert outcome(world) == "length"


def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    world = World(max_attempts=3)
    world.generate(max_tokens=9)
    for code in ("transfer_failed", "worker_lost", "pass_failed"):
        assert world.life().last is None
        _fail_at(world, "p0", code)
    assert outcome(world) == "pass_failed"
    assert world.state.counters["retries"] == 2
    assert_idle(world)


def _fail_at(world: World, name: str, code: str) -> None:
    worker = world.named(name)
    while not worker.live:
        world.work()
        world.beat()
        world.deliver_all()
        world.pass_time(0.1)
    for generation in list(worker.live):
        world.to_coordinator[worker.incarnation].extend(worker.fail(generation, code))
    world.deliver_all()


def test_attempts_are_counted_anew_after_each_delivered_token() -> None:
    world = World(max_attempts=2)
    world.generate(max_tokens=9)
    for count in range(1, 9):
        while len(world.life().tokens) < count:
            world.work()
            world.beat()
            world.deliver_all()
        _fail_at(world, "d0", "pass_failed")
    assert_idle(world)
    assert outcome(world) == "length"
    assert world.state.counters["replays"] == 8


def test_with_one_attempt_nothing_is_retried() -> None:
    world = World(max_attempts=1)
    world.generate(max_tokens=9)
    _fail_at(world, "d0", "transfer_failed")
    assert outcome(world) == "transfer_failed"
    assert_idle(world)


@pytest.mark.parametrize("code", ["protocol", "replay_mismatch", "invalid_request"])
def test_an_error_that_another_pair_would_not_mend_ends_the_request(code: str) -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    _fail_at(world, "d0", code)
    assert outcome(world) == code
    assert_idle(world)


def test_a_context_that_no_prefill_pool_can_hold_ends_with_the_first_error() -> None:
    world = World(prefill=0)
    world.add(ScriptedWorker("p", "prefill", num_blocks=8))  # two columns of 16 positions
    world.deliver_all()
    world.generate(prompt=(1,) * 30, max_tokens=20)
    world.generate("short", prompt=(1,) * 28, max_tokens=5)
    while len(world.life().tokens) < 4:  # with the fourth, 33 positions are to be computed again
        world.work()
        world.deliver_all()
    _fail_at(world, "d0", "pass_failed")
    last = world.life().last
    assert last is not None and last.error_code == "pass_failed"
    assert "cannot go on elsewhere" in (last.error or "")
    assert_idle(world)
    assert outcome(world, "short") == "length"


def test_a_retry_goes_before_those_that_came_after_it() -> None:
    world = World(decode=0)
    world.add(ScriptedWorker("d", "decode", num_blocks=8))  # room for two at a time
    world.deliver_all()
    for number in range(5):
        world.generate(f"r{number}", prompt=(1,), max_tokens=3)
    world.deliver_all()
    _fail_at(world, "d", "pass_failed")
    assert len(asks(world.named("d"), Reserve)) == 4
    running = [a.request.asked.request_id for a in world.state._attempts.all() if a.live]
    assert sorted(running) == ["r0", "r1"]
    assert_idle(world)


def test_a_retry_waits_for_a_worker_until_its_deadline() -> None:
    world = World()
    world.generate(max_tokens=9, deadline_s=30.0)
    world.deliver_all()
    world.kill("d0-1")
    world.deliver_all()
    assert world.life().last is None
    world.pass_time(31.0)
    assert outcome(world) == "no_decode_worker"
    assert_idle(world)
