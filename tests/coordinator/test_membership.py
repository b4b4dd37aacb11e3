"""Workers come, beat and go: who is taken in, what heartbeats prove, who is replaced."""

from collections import deque
from typing import Any

import msgspec
import pytest

from rlt.connector.messages import (
    Cancel,
    GenerationReleased,
    Heartbeat,
    HeartbeatAnswer,
    LiveGeneration,
    PairClosed,
    PairReady,
    Peers,
    RegisterAgain,
    RegisterRefused,
    Welcome,
)
from rlt.coordinator.generations import COUNTER_BITS
from rlt.coordinator.settling import YOUNG_S
from rlt.runtime.types import Generation

from .looking import asks, assert_idle, outcome, rejections, step_until
from .workers import GEOMETRY, MODEL, ScriptedWorker
from .world import World


def test_a_worker_of_another_model_or_geometry_or_version_is_refused_by_name() -> None:
    world = World()
    others = [
        ScriptedWorker("m", "decode", model=msgspec.structs.replace(MODEL, fingerprint="other")),
        ScriptedWorker("g", "decode", geometry=msgspec.structs.replace(GEOMETRY, block_size=32)),
        ScriptedWorker("r", "router"),
    ]
    for worker in others:
        world.add(worker)
    world.deliver_all()
    reasons = [w.heard[0].reason for w in others if isinstance(w.heard[0], RegisterRefused)]
    assert ["checkpoint" in reasons[0], "geometry" in reasons[1], "role" in reasons[2]] == [
        True
    ] * 3
    old = ScriptedWorker("old", "decode")
    world.add(old)
    line = world.to_coordinator[old.incarnation]
    line[0] = msgspec.structs.replace(line[0], protocol_version=0)
    world.deliver_all()
    assert isinstance(old.heard[0], RegisterRefused) and "protocol" in old.heard[0].reason
    world.generate()
    world.deliver_all()
    assert not any(worker.live for worker in [*others, old])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool.geometry.block_size", 0),
        ("pool.geometry.num_layers", -1),
        ("pool.geometry.head_dim", 1 << 62),
        ("pool.num_blocks", 0),
        ("pool.num_blocks", 1 << 40),
        ("pool.kv_base", -5),
        ("limits.num_blocks", 1 << 40),
        ("limits.num_slots", 0),
        ("limits.num_receive_slots", -1),
        ("limits.max_positions", 0),
        ("pid", 0),
        ("pid", -1),
        ("pid", 1 << 31),
        ("pid", 1 << 40),
        ("highest_epoch", -1),
        ("highest_epoch", 1 << 23),
        ("highest_epoch", 1 << 62),
        ("live", ((1 << 64) - 1,)),
        ("model.num_loops", 3),
        ("model.vocab_size", 0),
        ("model.max_positions", -1),
        ("model.default_exit_threshold", float("nan")),
    ],
)
def test_a_worker_whose_figures_cannot_be_is_refused_even_as_the_first(
    field: str, value: object
) -> None:
    """The first worker fixes the model and the geometry, so nonsense would be everybody's."""
    world = World(0, 0)
    odd = world.add(ScriptedWorker("odd", "decode"))
    line = world.to_coordinator[odd.incarnation]
    line[0] = _with(line[0], field.split("."), value)
    world.deliver_all()
    assert isinstance(odd.heard[0], RegisterRefused)
    for worker in (ScriptedWorker("p", "prefill"), ScriptedWorker("d", "decode")):
        world.add(worker)
    world.deliver_all()
    world.generate(max_tokens=3)
    assert_idle(world)
    assert outcome(world) == "length"


def _with(record: Any, path: list[str], value: object) -> Any:
    """The record with the field at `path` replaced."""
    name, *deeper = path
    changed = _with(getattr(record, name), deeper, value) if deeper else value
    return msgspec.structs.replace(record, **{name: changed})


@pytest.mark.parametrize("blocks", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_worker_that_counts_no_number_of_blocks_gets_nothing_and_the_others_go_on(
    blocks: float,
) -> None:
    world = World(prefill=1, decode=2)
    odd, good = world.named("d0"), world.named("d1")
    beat = msgspec.structs.replace(odd.heartbeat(), statistics={"blocks_quarantined": blocks})
    world.perform(world.state.handle_worker(odd.incarnation, beat, world.now))
    for number in range(4):
        world.generate(f"r{number}")
    world.deliver_all()
    assert not odd.live and len(good.live) == 4


def test_a_layout_with_one_plane_takes_requests_as_long_as_its_whole_pool() -> None:
    shared = msgspec.structs.replace(GEOMETRY, layout="shared")
    world = World(0, 0)
    for name, role in (("p", "prefill"), ("d", "decode")):
        world.add(ScriptedWorker(name, role, geometry=shared, num_blocks=8))
    world.deliver_all()
    world.generate("fits", max_tokens=8 * 16 - 2)  # 8 blocks of 16 positions
    world.generate("does not", max_tokens=8 * 16 - 1)
    assert rejections(world) == ["too_long"]


def test_every_pair_says_whether_it_can_serve_before_the_service_is_complete() -> None:
    """Else the first requests would all go to the pair that happened to be first."""
    world = World(prefill=2, decode=2)
    assert world.state.undecided_pairs == 0
    late = ScriptedWorker("d2", "decode")
    world.state.handle_worker(late.incarnation, late.register(), world.now)
    assert world.state.ready and world.state.undecided_pairs == 2
    for prefill in ("p0", "p1"):
        word = PairReady(decode=late.incarnation)
        world.state.handle_worker(world.named(prefill).incarnation, word, world.now)
    assert world.state.undecided_pairs == 0


def test_what_was_lost_about_a_pair_comes_with_the_next_heartbeat() -> None:
    """PairReady and PairClosed are said once, and a connection may break meanwhile."""
    world = World()
    p, d = world.named("p0"), world.named("d0").incarnation
    p.pairs.clear()
    world.perform(world.state.handle_worker(p.incarnation, p.heartbeat(), world.now))
    assert not world.state.ready
    p.pairs.add(d)
    world.perform(world.state.handle_worker(p.incarnation, p.heartbeat(), world.now))
    assert world.state.ready
    beat = msgspec.structs.replace(p.heartbeat(), pairs=("nobody", d, p.incarnation))
    world.perform(world.state.handle_worker(p.incarnation, beat, world.now))
    assert world.state.statistics()["ready_pairs"] == 1, "a pair needs two workers that are here"
    beat = msgspec.structs.replace(world.named("d0").heartbeat(), pairs=())
    world.perform(world.state.handle_worker(d, beat, world.now))
    assert world.state.ready, "a decode worker's word on pairs is none"


def test_only_when_every_pair_is_refused_will_the_service_never_serve() -> None:
    world = World(prefill=1, decode=2)
    prefill = world.named("p0").incarnation

    def refuse(decode: str) -> None:
        word = PairClosed(decode=decode, reason="no path between them", refused=True)
        world.perform(world.state.handle_worker(prefill, word, world.now))

    refuse(world.named("d0").incarnation)
    refuse("d-nowhere")
    assert world.state.unpairable is None and world.state.ready
    refuse(world.named("d1").incarnation)
    assert world.state.unpairable == "no path between them" and not world.state.ready
    world.kill(world.named("d0").incarnation)
    assert world.state.unpairable is not None
    world.add(ScriptedWorker("d2", "decode"))
    world.deliver_all()
    assert world.state.unpairable is None and world.state.ready


def test_the_same_model_under_another_path_is_accepted() -> None:
    world = World()
    other = world.add(
        ScriptedWorker("d9", "decode", model=msgspec.structs.replace(MODEL, name="/elsewhere"))
    )
    world.deliver_all()
    assert isinstance(other.heard[0], Welcome)


def test_an_expelled_incarnation_never_comes_back_but_a_new_one_does() -> None:
    world = World()
    old = world.named("d0")
    world.kill(old.incarnation)
    world.perform(world.state.handle_worker(old.incarnation, old.register(), world.now))
    assert world.state.workers("decode") == ()
    world.add(ScriptedWorker("d0", "decode", life=2))
    world.generate()
    assert_idle(world)
    assert outcome(world) == "length"


@pytest.mark.parametrize("how", ["silent", "reaped"])
def test_a_new_incarnation_of_a_name_replaces_an_old_one_that_is_no_more(how: str) -> None:
    world = World()
    world.supervised = True
    world.generate(max_tokens=50)
    world.deliver_all()
    old = world.named("d0")
    old.stopped = True
    new = world.add(ScriptedWorker("d0", "decode", life=2))
    world.deliver_to_coordinator("d0-2")
    assert new.heard == [] and not world.to_worker["d0-2"]  # it has to ask again
    if how == "silent":
        world.pass_time(1.5)
    else:
        world.kill(old.incarnation)
    world.beat()
    world.deliver_all()
    assert world.state.counters["retries.worker_lost"] == 1
    assert [w.incarnation for w in world.state.workers("decode")] == ["d0-2"]
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_worker_that_comes_back_takes_its_share_and_does_not_catch_up() -> None:
    """Else every request of a quiet service would go to the worker that was started again."""
    world = World(prefill=2, decode=2)
    for number in range(20):
        world.generate(f"before {number}")
        world.run_until_idle()
    world.kill("d1-1")
    back = world.add(ScriptedWorker("d1", "decode", life=2))
    world.deliver_all()
    world.beat()
    world.deliver_all()
    for number in range(20):
        world.generate(f"after {number}")
        world.run_until_idle()
    assert 8 <= len(back.closed) <= 12


def test_a_name_that_belongs_to_a_worker_which_lives_is_refused_after_a_while() -> None:
    world = World(heartbeat_timeout_s=5.0)
    world.generate(max_tokens=3)
    twin = world.add(ScriptedWorker("d0", "decode", life=2))
    for _ in range(14):
        assert not twin.heard
        world.beat()
        world.deliver_all()
        world.pass_time(0.4)
    [answer] = twin.heard
    assert isinstance(answer, RegisterRefused) and "d0" in answer.reason
    assert [w.incarnation for w in world.state.workers("decode")] == ["d0-1"]


def test_the_same_register_is_always_answered_with_the_same_epoch() -> None:
    """A worker drops everything at a Welcome with another one."""
    world = World()
    world.pass_time(YOUNG_S)
    decode = world.named("d0")
    epoch = decode.welcome_epoch
    world.add(ScriptedWorker("p1", "prefill", highest_epoch=epoch + 5))
    world.generate()
    world.deliver_all()
    world.to_coordinator["d0-1"].append(decode.register())
    world.deliver_all()
    assert decode.welcome_epoch == epoch and decode.live
    assert_idle(world)
    assert outcome(world) == "length"


@pytest.mark.parametrize("above", [0, 1, 1000])
def test_generations_rise_above_every_epoch_that_a_worker_has_seen(above: int) -> None:
    world = World(prefill=0)
    world.pass_time(YOUNG_S)
    seen = world.state._generations.epoch + above
    world.add(ScriptedWorker("p", "prefill", highest_epoch=seen))
    world.deliver_all()
    world.generate()
    world.deliver_all()
    [generation] = world.named("d0").live
    assert generation >> COUNTER_BITS > seen
    assert generation < 1 << 63


def test_an_unknown_generation_in_a_heartbeat_is_cancelled() -> None:
    world = World()
    decode = world.named("d0")
    stray = Generation(5)
    beat = Heartbeat(
        peers_version=decode.peers.version if decode.peers else 0,
        live=(LiveGeneration(stray, "receiving"),),
        statistics={},
    )
    world.perform(world.state.handle_worker(decode.incarnation, beat, world.now))
    world.deliver_all()
    assert asks(decode, Cancel) == [Cancel(generation=stray)]
    [answer] = asks(decode, HeartbeatAnswer)
    assert isinstance(answer, HeartbeatAnswer) and answer.oldest_live > stray


def test_a_generation_missing_from_a_heartbeat_counts_as_released() -> None:
    world = World()
    world.generate(max_tokens=10)
    step_until(world, "received")
    line = world.to_coordinator[world.named("p0").incarnation]
    kept = [message for message in line if not isinstance(message, GenerationReleased)]
    line.clear()
    line.extend(kept)
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_leg_whose_every_word_was_lost_is_still_seen_to_have_let_go() -> None:
    world = World()
    world.generate(max_tokens=1)
    while not world.state.counters["ended.length"]:
        world.work()
        for incarnation in ("p0-1", "d0-1"):
            while world.to_worker[incarnation]:
                world.deliver_to_worker(incarnation)
        world.to_coordinator["p0-1"].clear()
        while world.to_coordinator["d0-1"]:
            world.deliver_to_coordinator("d0-1")
    assert world.state.statistics()["live_attempts"] == 1
    world.beat()
    world.deliver_all()
    assert world.state.idle


def test_a_stale_peers_version_is_answered_with_the_current_peers() -> None:
    world = World()
    decode = world.named("d0")
    heard = len(asks(decode, Peers))
    beat = Heartbeat(peers_version=0, live=(), statistics={})
    world.perform(world.state.handle_worker(decode.incarnation, beat, world.now))
    world.deliver_all()
    assert len(asks(decode, Peers)) == heard + 1


def test_a_heartbeat_of_an_unknown_incarnation_is_answered_with_register_again() -> None:
    world = World()
    stranger = ScriptedWorker("s", "decode")
    world.to_worker[stranger.incarnation] = world.to_worker["d0-1"].__class__()
    beat = stranger.heartbeat()
    world.perform(world.state.handle_worker(stranger.incarnation, beat, world.now))
    [answer] = world.to_worker[stranger.incarnation]
    assert answer == RegisterAgain()


@pytest.mark.parametrize("refused", [False, True])
def test_what_a_prefill_worker_says_of_a_pair_before_the_other_is_here_again_is_kept(
    refused: bool,
) -> None:
    world = World(decode=0)
    word = PairClosed(decode="d0-1", reason="no path", refused=True)
    said = word if refused else PairReady(decode="d0-1")
    world.perform(world.state.handle_worker("p0-1", said, world.now))
    register = ScriptedWorker("d0", "decode").register()
    world.to_worker["d0-1"] = deque()
    world.perform(world.state.handle_worker("d0-1", register, world.now))
    assert world.state.undecided_pairs == 0
    assert (world.state.ready, world.state.unpairable) == (
        (False, "no path") if refused else (True, None)
    )
