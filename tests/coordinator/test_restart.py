"""A coordinator that was started again finds its workers, and tells them nothing half-true."""

import pytest

from rlt.connector.messages import Hello, Peers, RegisterAgain, RegisterRefused, Welcome
from rlt.coordinator.settling import RESETTLE_S

from .looking import asks, assert_idle, outcome
from .world import World


def beat(world: World, *names: str) -> None:
    for name in names:
        worker = world.named(name)
        again = worker.register() if worker.welcome is None else worker.heartbeat()
        world.to_coordinator[worker.incarnation].append(again)
    world.deliver_all()


def test_workers_register_again_and_serve_again() -> None:
    world = World(prefill=2, decode=2)
    world.generate("lost", max_tokens=9)
    world.deliver_all()
    first = world.named("d0").welcome_epoch
    instance = world.state.instance
    world.restart_coordinator()
    assert world.state.instance != instance
    world.beat()
    world.deliver_all()
    for worker in world.workers.values():
        assert RegisterAgain() in worker.heard
        assert worker.welcome_epoch > first and not worker.live
    assert world.state.statistics()["ready_pairs"] == 4  # before anybody was told of peers
    world.generate("new", max_tokens=9)
    assert_idle(world)
    assert outcome(world, "new") == "length"


@pytest.mark.parametrize("expected", [0, 2])
def test_nobody_is_told_of_peers_before_the_others_have_had_time_to_come(expected: int) -> None:
    world = World(prefill=2, decode=2, expected_prefill=expected, expected_decode=expected)
    world.restart_coordinator()
    told = {name: len(asks(world.named(name), Peers)) for name in ("p0", "p1", "d0", "d1")}
    beat(world, "p0", "d0", "d1")
    world.pass_time(RESETTLE_S / 2)
    beat(world, "p0", "d0", "d1")
    assert told == {name: len(asks(world.named(name), Peers)) for name in told}
    if expected:
        beat(world, "p1")  # the last one is here
    else:
        world.pass_time(RESETTLE_S)
        world.deliver_all()
    assert len(asks(world.named("d0"), Peers)) > told["d0"]
    peers = world.named("d0").peers
    assert peers is not None and len(peers.peers) == (2 if expected else 1)


def test_who_does_not_come_back_in_time_is_missed() -> None:
    world = World(prefill=2, decode=1)
    world.kill("p1-1", noticed=False)
    world.restart_coordinator()
    beat(world, "p0", "d0")
    world.pass_time(RESETTLE_S + 0.1)
    beat(world, "p0", "d0")
    peers = world.named("d0").peers
    assert peers is not None and [peer.worker for peer in peers.peers] == ["p0"]


def test_new_workers_are_told_at_once() -> None:
    world = World(prefill=1, decode=1, expected_prefill=2)
    assert world.named("p0").peers is not None and world.named("p0").peers.peers


def test_the_fear_of_a_worker_that_has_not_come_back_yet_does_not_kill_it() -> None:
    world = World(prefill=2, decode=1)
    world.supervised = True
    world.restart_coordinator()
    beat(world, "d0")
    decode = world.named("d0")
    decode.feared = ("p0-1",)
    world.beat()
    world.deliver_to_coordinator("d0-1")
    world.deliver_from_supervisor()
    assert not world.to_supervisor
    world.deliver_all()
    assert "p0-1" in world.workers
    world.pass_time(RESETTLE_S + 0.1)
    decode.feared = ("p0-1", "p-old")
    world.beat()
    world.deliver_all_but_expulsions()
    assert [expel.incarnation for expel in world.to_supervisor] == ["p-old"]


def test_an_expelled_incarnation_is_refused_and_not_asked_to_register_again() -> None:
    world = World(decode=2)
    decode = world.named("d0")
    world.named("d0").stopped = True
    world.perform(world.state.worker_unreachable("d0-1", world.now))
    world.pass_time(2.5)
    decode.stopped = False
    world.beat()
    world.deliver_all_but_expulsions()
    assert any(isinstance(message, RegisterRefused) for message in decode.heard)
    assert RegisterAgain() not in decode.heard


def test_generations_of_the_new_coordinator_are_above_those_of_the_old_one() -> None:
    world = World()
    world.generate(max_tokens=30)
    world.deliver_all()
    [old] = world.named("d0").live
    world.restart_coordinator()
    world.beat()
    world.deliver_all()
    world.generate("again")
    world.deliver_all()
    [new] = world.named("d0").live
    assert new > old
    assert len(asks(world.named("d0"), Welcome)) == 2


def test_clients_are_told_which_start_of_the_service_they_speak_to() -> None:
    world = World()
    world.from_client(Hello())
    world.restart_coordinator()
    world.from_client(Hello())
    first, second = world.clients[b"c0"].infos
    assert first.instance and second.instance and first.instance != second.instance
