"""Draining: a worker gets nothing new, ends in order, and no request fails for it."""

import pytest

from rlt.connector.config import EXIT_RESTART
from rlt.connector.messages import DrainAnswer, DrainWorker, Reserve, Shutdown, WorkerStatistics
from rlt.coordinator.draining import MAX_ANSWERS

from .looking import asks, assert_idle, outcome, step_until
from .workers import ScriptedWorker
from .world import World


def drain(world: World, name: str, *, restart: bool = False, ask: int = 0) -> DrainAnswer:
    world.from_client(DrainWorker(worker=name, restart=restart, ask=ask))
    return world.clients[b"c0"].drained[-1]


def statistics(world: World) -> tuple[WorkerStatistics, ...]:
    return world.state._registry.statistics(lambda _: {})


def live_with(world: World, *needed: str) -> None:
    while not all(world.named(name).live for name in needed):
        world.work()
        world.deliver_all()


def run(world: World, seconds: float) -> None:
    end_s = world.time_s + seconds
    while world.time_s < end_s:
        world.work()
        world.beat()
        world.deliver_all()
        world.pass_time(0.25)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_drained_worker_finishes_what_it_has_and_is_told_to_end(name: str, restart: bool) -> None:
    world = World(prefill=2, decode=2)
    for number in range(4):
        world.generate(f"r{number}", max_tokens=9)
    step_until(world, "sending")
    old = world.named(name)
    assert old.live
    assert drain(world, name, restart=restart) == DrainAnswer(worker=name, incarnation=f"{name}-1")
    world.generate("later", max_tokens=3)
    world.deliver_all()
    assert old.shutdown is None
    reserves = len(asks(world.named("d0"), Reserve))
    assert_idle(world)
    run(world, 2.0)
    assert old.shutdown == Shutdown(restart=restart)
    assert old.incarnation in world.reaped
    assert [outcome(world, f"r{number}") for number in range(4)] == ["length"] * 4
    assert outcome(world, "later") == "length"
    assert not world.state.counters["retries"] and not world.state.counters["expelled"]
    if name == "d0" and not restart:
        assert reserves == len(asks(old, Reserve))
    here = [w.incarnation for w in world.state.workers("prefill" if name == "p0" else "decode")]
    assert len(here) == 1 + restart and old.incarnation not in here


def test_a_worker_that_wants_to_end_is_drained_and_started_again() -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=9)
    live_with(world, "d0")
    world.named("d0").draining = True
    old = world.named("d0")
    world.beat()
    world.deliver_all()
    assert old.shutdown is None
    run(world, 5.0)
    assert outcome(world) == "length"
    assert old.shutdown == Shutdown(restart=True)
    assert len(world.state.workers("decode")) == 2


def test_an_idle_worker_ends_at_once_and_at_every_heartbeat_until_it_does() -> None:
    world = World(decode=2)
    drain(world, "d0")
    assert world.to_worker["d0-1"].pop() == Shutdown()
    world.beat()
    world.deliver_all()
    assert "d0-1" in world.reaped
    assert drain(world, "d0").error is not None


def test_whoever_waits_for_a_place_at_a_draining_worker_goes_elsewhere() -> None:
    world = World(decode=2)
    for name in ("d0", "d1"):
        world.named(name).num_blocks = 4
    for number in range(4):
        world.generate(f"r{number}", prompt=(1,), max_tokens=2)
    world.deliver_all()
    waiting = [a for a in world.state._attempts.at("d0-1") if a.must_wait]
    assert len(waiting) == 1
    drain(world, "d0")
    assert not waiting[0].live
    assert_idle(world)
    assert [outcome(world, f"r{number}") for number in range(4)] == ["length"] * 4
    assert world.state.counters["retries"] == 1


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_what_is_not_done_in_time_moves_to_other_workers(name: str) -> None:
    world = World(prefill=2, decode=2, drain_s=5.0)
    world.generate(max_tokens=60)
    step_until(world, "sending" if name == "p0" else "active")
    drain(world, name)
    world.pass_time(4.0)
    assert not world.state.counters["retries"]
    world.pass_time(1.5)
    assert world.state.counters["retries.worker_draining"] == 1
    assert_idle(world)
    assert outcome(world) == "length"
    run(world, 1.0)
    assert f"{name}-1" in world.reaped


def test_a_move_is_no_failure() -> None:
    world = World(decode=2, drain_s=0.0, max_attempts=1)
    world.generate(max_tokens=60)
    step_until(world, "active")
    drain(world, "d0")
    world.pass_time(0.1)
    assert_idle(world)
    assert outcome(world) == "length"


def test_what_could_go_on_nowhere_else_ends_where_it_is() -> None:
    world = World(prefill=0, drain_s=1.0)
    world.add(ScriptedWorker("p", "prefill", num_blocks=8))  # two columns of 16 positions
    world.deliver_all()
    world.generate(prompt=(1,) * 30, max_tokens=20)
    while len(world.life().tokens) < 5:
        world.work()
        world.deliver_all()
    drain(world, "d0", restart=True)
    world.pass_time(2.0)
    assert not world.state.counters["retries"]
    assert_idle(world)
    assert outcome(world) == "length"
    run(world, 1.0)
    assert "d0-1" in world.reaped


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_what_the_last_worker_of_its_role_has_may_finish_if_no_other_will_come(name: str) -> None:
    world = World(drain_s=1.0)
    world.generate(max_tokens=60)
    step_until(world, "sending" if name == "p0" else "active")
    drain(world, name)
    world.pass_time(2.0)
    assert not world.state.counters["retries"]
    assert_idle(world)
    assert outcome(world) == "length"
    run(world, 1.0)
    assert f"{name}-1" in world.reaped


def test_while_every_pair_drains_requests_wait_for_the_next_worker() -> None:
    world = World(drain_s=0.5)
    world.generate("running", max_tokens=60, deadline_s=100.0)
    step_until(world, "active")
    drain(world, "d0", restart=True)
    world.generate("new", max_tokens=3, deadline_s=100.0)
    world.generate("late", max_tokens=3, deadline_s=1.0)
    assert not world.state.ready and world.state.not_ready == (
        "no_decode_worker",
        "every decode worker is being drained",
    )
    world.named("d0").stopped = True
    world.pass_time(1.5)
    assert outcome(world, "late") == "no_decode_worker"
    world.named("d0").stopped = False
    assert_idle(world)
    assert outcome(world, "running") == outcome(world, "new") == "length"
    assert world.named("d0").life > 1


def test_a_draining_worker_may_make_new_ones_wait() -> None:
    world = World(decode=2)
    world.named("d0").draining = True  # C does not know yet
    world.generate(max_tokens=3)
    world.deliver_all()
    [attempt] = world.state._attempts.at("d0-1")
    assert attempt.must_wait and not world.named("d0").live
    world.beat()
    world.deliver_all()
    assert not world.state._attempts.at("d0-1")
    assert_idle(world)
    assert outcome(world) == "length"


def start_again(world: World, name: str, life: int) -> ScriptedWorker:
    """It has registered, and heard nothing yet."""
    worker = world.add(ScriptedWorker(name, "decode", life=life))
    world.deliver_to_coordinator(worker.incarnation)
    return worker


def test_an_ask_that_is_sent_again_does_not_meet_the_workers_next_life() -> None:
    world = World(decode=2)
    first = drain(world, "d0", restart=True, ask=1)
    assert first == DrainAnswer(worker="d0", incarnation="d0-1", ask=1)
    run(world, 2.0)
    new = world.named("d0").incarnation
    assert new != "d0-1"
    assert drain(world, "d0", restart=True, ask=1) == first
    run(world, 2.0)
    assert world.named("d0").incarnation == new
    assert drain(world, "d0", restart=True, ask=2).incarnation == new


def test_what_is_remembered_of_asks_is_bounded() -> None:
    world = World(decode=2)
    for ask in range(1, MAX_ANSWERS + 3):
        drain(world, "nobody", ask=ask)
    assert len(world.state._draining._answers) == MAX_ANSWERS


def test_who_dies_in_the_midst_of_a_drain_for_good_goes_on_with_it_in_its_next_life() -> None:
    world = World(decode=2)
    world.generate(max_tokens=30)
    live_with(world, "d0")
    drain(world, "d0")
    for life in (2, 3):
        world.kill(world.named("d0").incarnation)
        reborn = start_again(world, "d0", life)
        assert "d0" in {w.worker for w in statistics(world) if w.draining}
    world.deliver_all()
    assert reborn.shutdown == Shutdown() and reborn.incarnation in world.reaped
    meant = start_again(world, "d0", 4)  # it has ended: who starts another one means it
    run(world, 1.0)
    assert meant.shutdown is None and not any(w.draining for w in statistics(world))
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_drain_for_good_that_became_a_restart_is_forgotten() -> None:
    world = World(decode=2)
    world.generate(max_tokens=30)
    live_with(world, "d0")
    drain(world, "d0")
    drain(world, "d0", restart=True)
    world.kill("d0-1")
    start_again(world, "d0", 2)
    assert not any(w.draining for w in statistics(world))


def test_a_restart_that_became_a_drain_for_good_holds_if_the_worker_ends_by_the_restart() -> None:
    world = World(decode=2)
    drain(world, "d0", restart=True)  # idle: it is told at once
    drain(world, "d0")
    run(world, 2.0)
    assert [w.worker for w in statistics(world)] == ["p0", "d1"]
    assert world.reaped["d0-1"].status == EXIT_RESTART, "it had heard of the restart first"


@pytest.mark.parametrize("restart", [False, True])
def test_a_coordinator_that_takes_anothers_place_goes_on_with_its_drains(restart: bool) -> None:
    world = World(prefill=2, decode=2)
    world.generate(max_tokens=30)
    live_with(world, "d0")
    drain(world, "p0", restart=restart)
    drain(world, "d0", restart=not restart)
    drain(world, "d0", restart=restart)  # the last word holds
    old = world.named("d0")
    world.deliver_all()
    assert old.shutdown is None
    world.restart_coordinator()
    run(world, 10.0)
    assert old.shutdown == Shutdown(restart=restart)
    assert sorted(w.worker for w in statistics(world)) == (
        ["d0", "d1", "p0", "p1"] if restart else ["d1", "p1"]
    )
    assert not any(w.draining for w in statistics(world))
    world.generate("later")
    assert_idle(world)
    assert outcome(world, "later") == "length"


def test_an_unknown_worker_cannot_be_drained() -> None:
    answer = drain(World(), "d7")
    assert answer.error is not None and "d0, p0" in answer.error


def test_statistics_tell_who_drains() -> None:
    world = World(decode=2)
    world.generate(max_tokens=30)
    live_with(world, "d0")
    drain(world, "d0")
    workers = statistics(world)
    assert {w.worker: w.draining for w in workers} == {"p0": False, "d0": True, "d1": False}
    assert {w.worker: w.pairs for w in workers} == {
        "p0": ("d0", "d1"),
        "d0": ("p0",),
        "d1": ("p0",),
    }
