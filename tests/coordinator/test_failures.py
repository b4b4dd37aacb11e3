"""Workers that die or fall silent: who notices, and how their requests go on."""

import pytest

from rlt.connector.messages import GenerationFailed

from .looking import assert_idle, outcome, step_until
from .workers import ScriptedWorker
from .world import World

# Prefill workers that die


@pytest.mark.parametrize("phase", ["reserving", "reserved"])
def test_a_prefill_worker_that_dies_before_it_was_asked_is_replaced_at_once(phase: str) -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    step_until(world, phase)
    world.kill("p0-1")
    assert world.state.counters["retries.worker_lost"] == 1
    assert_idle(world)
    assert outcome(world) == "length"


@pytest.mark.parametrize("dull", [False, True])
@pytest.mark.parametrize("phase", ["computing", "sending"])
def test_when_a_prefill_worker_dies_the_decode_worker_says_what_it_holds(
    phase: str, dull: bool
) -> None:
    """dull: it only lists the generation as receiving, with peers that lack the dead one."""
    world = World(prefill=2, decode=2)
    world.named("d0").dull = dull
    world.generate(max_tokens=9)
    step_until(world, phase)
    world.kill("p0-1")
    assert not world.state.counters["retries"]
    if dull:
        world.beat()
        stale = world.to_coordinator["d0-1"].pop()
        assert stale.peers_version < world.state._registry.version  # type: ignore[union-attr]
        world.to_coordinator["d0-1"].append(stale)
        world.deliver_to_coordinator("d0-1")
        assert not world.state.counters["retries"]  # it has not heard yet that P is gone
    world.deliver_all()
    assert bool(world.state.counters["retries"]) is not dull
    world.beat()
    world.deliver_all()
    assert world.state.counters["retries"] == 1
    assert_idle(world)
    assert outcome(world) == "length"


@pytest.mark.parametrize("word", ["received", "heartbeat", "output"])
def test_a_prompt_that_arrived_before_its_prefill_worker_died_goes_on(word: str) -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    step_until(world, "received")
    world.kill("p0-1")  # nothing that P or D have said since has arrived
    line = world.to_coordinator["d0-1"]
    if word != "received":
        line.clear()
    if word == "output":
        world.decode()
        line.clear()
        world.decode()
    else:
        world.beat()
    world.deliver_all()
    assert_idle(world)
    assert outcome(world) == "length" and not world.state.counters["retries"]


def test_both_workers_of_a_request_may_die() -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    step_until(world, "sending")
    world.kill("p0-1")
    world.kill("d0-1")
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_cancel_while_the_fate_is_unknown_ends_the_request() -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    step_until(world, "sending")
    world.kill("p0-1")
    world.cancel()
    assert outcome(world) == "cancelled"
    assert_idle(world)


def test_a_prefill_workers_lost_failure_is_noticed_all_the_same() -> None:
    world = World(prefill=2)
    world.generate(max_tokens=10)
    step_until(world, "sending")
    world.deliver_all()
    prefill = world.named("p0")
    _, released = prefill.fail(next(iter(prefill.live)), "transfer_failed")
    world.to_coordinator[prefill.incarnation].append(released)
    assert_idle(world)
    assert outcome(world) == "length" and world.state.counters["retries.transfer_failed"] == 1
    assert world.time_s < 110.0


def test_a_prefill_worker_is_not_needed_once_the_prompt_is_received() -> None:
    world = World()
    world.generate(max_tokens=10)
    step_until(world, "received")
    world.deliver_to_coordinator("d0-1")  # RequestReceived, while P's release is on its way
    world.kill("p0-1")
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_prefill_workers_failure_does_not_matter_once_the_prompt_is_received() -> None:
    world = World()
    world.generate(max_tokens=10)
    step_until(world, "received")
    world.deliver_to_coordinator("d0-1")
    generation = next(iter(world.named("d0").live))
    failed = GenerationFailed(generation=generation, code="transfer_failed", error="no ack")
    world.to_coordinator["p0-1"].appendleft(failed)
    assert_idle(world)
    assert outcome(world) == "length"


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_dead_workers_requests_go_on_elsewhere_and_nobody_else_is_touched(
    victim: str, noticed: bool
) -> None:
    world = World(prefill=2, decode=2)
    for number in range(8):
        world.generate(f"r{number}", max_tokens=40)
    world.deliver_all()
    world.kill(world.named(victim).incarnation, noticed=noticed)
    if not noticed:
        for _ in range(12):
            world.beat()
            world.deliver_all()
            world.pass_time(1.0)
    assert_idle(world)
    assert [outcome(world, f"r{number}") for number in range(8)] == ["length"] * 8
    assert (
        world.state.counters["retries.worker_lost"]
        + world.state.counters["retries.transfer_failed"]
        == 4
    )
    survivor = world.named("d0" if victim == "p0" else "p0")
    assert survivor.peers is not None
    assert victim not in {peer.worker for peer in survivor.peers.peers}


def test_a_closed_connection_that_is_not_opened_again_means_a_dead_worker() -> None:
    world = World(max_attempts=1)
    world.generate(max_tokens=40)
    world.deliver_all()
    decode = world.named("d0").incarnation
    world.perform(world.state.worker_unreachable(decode, world.now))
    world.pass_time(1.0)
    assert world.state._registry.get(decode) is not None
    world.kill(decode, noticed=False)
    world.pass_time(1.5)
    assert outcome(world) == "worker_lost"


def test_a_coordinator_that_stood_still_does_not_blame_its_workers() -> None:
    world = World()
    world.generate(max_tokens=40)
    world.deliver_all()
    world.pass_time(60.0)  # as after SIGSTOP and SIGCONT: their heartbeats are not read yet
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_connection_that_was_closed_while_the_coordinator_stood_still_may_be_open_again() -> None:
    world = World()
    world.perform(world.state.worker_unreachable("p0-1", world.now))
    world.pass_time(20.0)
    assert len(world.state.workers("prefill")) == 1
    world.perform(world.state.worker_unreachable("p0-1", world.now))
    world.pass_time(2.5)
    assert not world.state.workers("prefill")


def test_without_workers_requests_wait_and_start_when_a_pair_comes() -> None:
    world = World(prefill=0, decode=0)
    world.generate("r")
    world.generate("bad", prompt=(512,))
    world.add(ScriptedWorker("p", "prefill"))
    world.deliver_all()
    assert outcome(world, "bad") == "invalid_request"
    world.add(ScriptedWorker("d", "decode"))
    assert_idle(world)
    assert outcome(world, "r") == "length"


@pytest.mark.parametrize(
    ("prefill", "decode", "code"),
    [(0, 1, "no_prefill_worker"), (1, 0, "no_decode_worker"), (0, 0, "no_prefill_worker")],
)
def test_the_missing_kind_of_worker_is_named(prefill: int, decode: int, code: str) -> None:
    world = World(prefill=prefill, decode=decode, heartbeat_timeout_s=1000.0)
    world.generate("r", deadline_s=20.0)
    world.pass_time(19.0)
    assert world.life().last is None
    world.pass_time(2.0)
    assert outcome(world) == code


def test_pair_wait_ends_requests_before_their_deadline() -> None:
    world = World(prefill=0, decode=1, pair_wait_s=3.0, heartbeat_timeout_s=1000.0)
    world.generate("r")
    world.pass_time(2.0)
    assert world.life().last is None
    world.pass_time(2.0)
    assert outcome(world) == "no_prefill_worker"


def test_who_needs_more_than_quarantine_has_left_holds_nobody_up() -> None:
    world = World(decode=0, max_bypasses=2)
    decode = world.add(ScriptedWorker("d0", "decode", num_blocks=32))
    decode.quarantined = 20
    world.deliver_all()
    world.beat()
    world.deliver_all()
    world.generate("large", prompt=(1,) * 60, max_tokens=5, deadline_s=60.0)
    for number in range(6):
        world.generate(f"small{number}", max_tokens=3)
    for _ in range(30):
        world.work()
        world.beat()
        world.deliver_all()
        world.pass_time(0.3)
    assert [outcome(world, f"small{number}") for number in range(6)] == ["length"] * 6
    assert world.life("large").last is None and not decode.live
    decode.quarantined = 0
    world.beat()
    world.deliver_all()
    assert_idle(world)
    assert outcome(world, "large") == "length"


def test_the_last_output_of_a_worker_that_let_go_is_asked_for_until_it_is_here() -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=5)
    step_until(world, "active")
    decode = world.named("d0")
    [generation] = decode.live
    first, second = decode.decode_step(generation), decode.decode_step(generation, 2)
    world.deliver_all()
    line = world.to_coordinator["d0-1"]
    line.extend([second[-1], first[0]])  # let go; what it said before comes late, the last is lost
    while line:
        world.deliver_to_coordinator("d0-1")
    world.kill("d0-1")
    assert_idle(world)
    assert outcome(world) == "length"


def test_who_waits_at_a_worker_for_the_end_of_a_quarantine_comes_back_into_the_line() -> None:
    world = World(decode=0)
    decode = world.add(ScriptedWorker("d0", "decode", num_blocks=32))
    world.deliver_all()
    decode.num_blocks, decode.refuses_never, decode.quarantined = 12, True, 20  # C does not know
    world.generate(prompt=(1,) * 60, max_tokens=5, deadline_s=300.0)
    for _ in range(30):
        world.beat()
        world.deliver_all()
        world.pass_time(0.5)
    assert not world.state._attempts.at("d0-1") and world.state.statistics()["queue_length"] == 1
    decode.num_blocks, decode.quarantined = 32, 0
    world.beat()
    world.deliver_all()
    assert_idle(world)
    assert outcome(world) == "length"
