"""Who is gone is killed and reaped, and only who is reaped counts as dead."""

import msgspec
import pytest

from rlt.connector.messages import (
    Expel,
    Heartbeat,
    HeartbeatAnswer,
    RegisterRefused,
    Supervise,
    Supervised,
    WorkerExited,
)
from rlt.coordinator import supervisors
from rlt.coordinator.effects import SendWorker
from rlt.coordinator.supervisors import Supervisors

from .looking import asks, assert_idle, outcome
from .workers import ScriptedWorker
from .world import SUPERVISOR, World


def silence(world: World, name: str) -> None:
    """The worker stands still, and the others go on, until it counts as gone."""
    world.named(name).stopped = True
    for _ in range(12):
        world.beat()
        world.deliver_all()
        world.pass_time(1.0)


def test_a_worker_that_stands_still_is_killed_and_its_requests_go_on_elsewhere() -> None:
    world = World(prefill=2, decode=2)
    world.supervised = True
    world.beat()
    world.generate(max_tokens=9)
    world.deliver_all()
    silence(world, "d0")
    world.deliver_all()
    assert "d0-1" in world.reaped and "d0-1" not in world.workers
    assert world.state.statistics()["expels_open"] == 0
    assert world.state.counters["expelled"] == 1
    assert_idle(world)
    assert outcome(world) == "length"


def test_every_word_of_a_supervisor_is_answered() -> None:
    world = World()
    world.supervised = True
    for beats in (1, 2, 3):
        world.beat()
        world.deliver_all()
        assert world.supervise_answers == beats


def test_an_expulsion_is_repeated_until_the_process_is_reaped() -> None:
    world = World(prefill=2, decode=2)
    world.supervised = True
    world.beat()
    world.deliver_all()
    world.perform(world.state.worker_unreachable("d0-1", world.now))
    world.named("d0").stopped = True
    world.pass_time(2.5)
    for _ in range(3):
        assert world.to_supervisor.popleft() == Expel(incarnation="d0-1")
        world.beat()
        world.deliver_all_but_expulsions()
        world.pass_time(4.0)
    world.deliver_to_supervisor()
    world.from_supervisor.clear()  # its word is lost
    world.beat()
    world.pass_time(4.1)
    world.deliver_all()
    assert world.state.statistics()["expels_open"] == 0


def test_only_the_supervisor_that_has_it_is_asked_or_all_if_none_does() -> None:
    world = World(decode=2)
    for number in (1, 2):
        children = (Supervised(f"d{number}", f"d{number}-1", 5),)
        word = Supervise(children=children if number == 1 else ())
        world.perform(world.state.handle_worker(f"supervisor-{number}", word, world.now))
    for name, asked in (("d1-1", ["supervisor-1"]), ("d0-1", ["supervisor-1", "supervisor-2"])):
        world.perform(world.state.worker_unreachable(name, world.now))
        world.workers[name].stopped = True
        world.time_s += 2.5
        effects = world.state.tick(world.now)
        assert asked == [
            effect.incarnation
            for effect in effects
            if isinstance(effect, SendWorker) and effect.message == Expel(incarnation=name)
        ]


def test_who_counts_as_gone_and_is_still_listed_as_a_child_is_expelled_again() -> None:
    world = World()
    world.supervised = True
    world.perform(world.state.worker_unreachable("d0-1", world.now))
    world.named("d0").stopped = True
    world.pass_time(2.5)  # no supervisor has been heard of yet
    assert not world.to_supervisor
    world.state._supervisors._expels.answered("d0-1")  # as if it had been given up
    world.beat()
    world.deliver_all()
    assert "d0-1" in world.reaped
    assert world.state.statistics()["expels_open"] == 0


def test_a_heartbeat_hears_which_of_the_feared_are_dead_and_the_others_are_killed() -> None:
    world = World(prefill=2)
    world.supervised = True
    world.beat()
    world.deliver_all()
    world.kill("p0-1")
    decode = world.named("d0")
    version = decode.peers.version if decode.peers else 0
    beat = Heartbeat(
        peers_version=version,
        live=(),
        statistics={},
        quarantined_from=("p0-1", "p1-1", "p-of-old"),
    )
    world.perform(world.state.handle_worker("d0-1", beat, world.now))
    [expel] = world.to_supervisor
    assert expel.incarnation == "p-of-old"  # neither dead, nor one that serves
    world.deliver_all()
    answer = asks(decode, HeartbeatAnswer)[-1]
    assert isinstance(answer, HeartbeatAnswer) and answer.dead == ("p0-1",)
    gone = WorkerExited(worker="p", incarnation="p-of-old", pid=1, status=-9)
    world.perform(world.state.handle_worker(SUPERVISOR, gone, world.now))
    world.perform(world.state.handle_worker("d0-1", beat, world.now))
    world.deliver_all()
    answer = asks(decode, HeartbeatAnswer)[-1]
    assert isinstance(answer, HeartbeatAnswer) and answer.dead == ("p0-1", "p-of-old")


def test_late_words_of_a_reaped_incarnation_do_not_bring_it_back() -> None:
    world = World()
    late = ScriptedWorker("d1", "decode")
    word = WorkerExited(worker="d1", incarnation=late.incarnation, pid=late.pid, status=1)
    world.perform(world.state.handle_worker(SUPERVISOR, word, world.now))
    world.add(late)
    world.deliver_all()
    assert isinstance(late.heard[0], RegisterRefused)


def test_a_worker_that_speaks_as_a_supervisor_is_not_heard() -> None:
    world = World(decode=2)
    word = WorkerExited(worker="d1", incarnation="d1-1", pid=1, status=0)
    world.perform(world.state.handle_worker("d0-1", word, world.now))
    assert len(world.state.workers("decode")) == 2
    assert world.state.counters["wrong_role_messages"] == 1


@pytest.mark.parametrize("how", ["silent", "closed"])
def test_a_supervisor_that_is_not_heard_of_any_more_is_forgotten(how: str) -> None:
    world = World(heartbeat_timeout_s=100.0)
    word = Supervise(children=())
    world.perform(world.state.handle_worker(SUPERVISOR, word, world.now))
    assert world.state.statistics()["supervisors"] == 1
    if how == "silent":
        world.pass_time(supervisors.SILENT_S + 1.0)
    else:
        world.perform(world.state.worker_unreachable(SUPERVISOR, world.now))
    assert world.state.statistics()["supervisors"] == 0


def test_what_supervisors_say_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_SUPERVISORS", "MAX_CHILDREN", "MAX_DEAD", "MAX_EXPELS"):
        monkeypatch.setattr(supervisors, name, 8)
    world = World(0, 0)
    books = Supervisors(lambda _: None, world.state.counters)
    for number in range(20):
        children = tuple(Supervised("d", f"d-{number}-{child}", 1) for child in range(20))
        books.heard(f"s{number}", Supervise(children=children), 0.0)
        exited = WorkerExited(worker="d", incarnation=f"old-{number}", pid=1, status=0)
        books.exited(exited)
        books.expel(f"stray-{number}", 0.0)
    assert len(books) == 8 and books.open_expels == 8
    assert len(books._dead) == 8 and books.is_dead("old-19") and not books.is_dead("old-0")
    assert max(len(s.children) for s in books._known.values()) == 8
    assert msgspec.json.encode(dict(world.state.counters))
