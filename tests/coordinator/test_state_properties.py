"""Random interleavings, losses, doublings, cancels, failures, deaths, stops, drains and restarts,
checked after every event.

World complains about wrong tokens, output after a cancel was answered, output out of order, or a
second ending; in the end every request has ended once, by itself or with a named error, no credit
is out and nobody is left to be killed.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt.connector.messages import DrainWorker, PairClosed

from .workers import ScriptedWorker
from .world import SUPERVISOR, World

EXAMPLES = int(os.environ.get("RLT_EXAMPLES", "60"))

names = st.sampled_from(["a", "b", "c"])
clients = st.sampled_from([b"c0", b"c1"])
picks = st.integers(0, 7)

actions = st.one_of(
    st.tuples(
        st.just("generate"), names, clients, st.integers(1, 60), st.sampled_from([None, 0.5, 30.0])
    ),
    st.tuples(st.just("cancel"), names, clients),
    st.tuples(st.just("deliver"), picks, st.sampled_from(["once", "twice", "lost"])),
    st.tuples(st.just("deliver many"), picks, st.integers(1, 6)),
    st.tuples(st.just("compute")),
    st.tuples(st.just("transfer")),
    st.tuples(st.just("decode")),
    st.tuples(st.just("beat")),
    st.tuples(st.just("time"), st.sampled_from([0.05, 0.3, 1.0])),
    st.tuples(st.just("fail"), picks),
    st.tuples(st.just("kill"), picks, st.booleans()),
    st.tuples(st.just("join"), st.sampled_from(["prefill", "decode"]), st.sampled_from([64, 4096])),
    st.tuples(st.just("full"), picks),
    st.tuples(st.just("stop"), picks),
    st.tuples(st.just("wake"), picks),
    st.tuples(st.just("drain"), picks, st.booleans()),
    st.tuples(st.just("wants to end"), picks),
    st.tuples(st.just("close pair"), picks, picks),
    st.tuples(st.just("restart coordinator")),
)
ERRORS = {
    "deadline_exceeded",
    "no_prefill_worker",
    "no_decode_worker",
    "worker_lost",
    "transfer_failed",
    "too_long",
    "closed",
    "pair_closed",
}


def _lines(world: World) -> list[tuple[str, bool]]:
    lines = [(name, True) for name, line in world.to_worker.items() if line]
    lines += [(name, False) for name, line in world.to_coordinator.items() if line]
    lines += [(SUPERVISOR, True)] * bool(world.to_supervisor)
    return lines + [(SUPERVISOR, False)] * bool(world.from_supervisor)


def _deliver(world: World, pick: int, how: str) -> None:
    lines = _lines(world)
    if not lines:
        return
    name, down = lines[pick % len(lines)]
    if name == SUPERVISOR:
        _deliver_supervision(world, down, how)
    elif how == "lost":
        (world.to_worker if down else world.to_coordinator)[name].popleft()
    elif down:
        world.deliver_to_worker(name, twice=how == "twice")
    else:
        world.deliver_to_coordinator(name, twice=how == "twice")


def _deliver_supervision(world: World, down: bool, how: str) -> None:
    if how == "lost":
        (world.to_supervisor if down else world.from_supervisor).popleft()
    elif down:
        world.deliver_to_supervisor(twice=how == "twice")
    else:
        world.deliver_from_supervisor(twice=how == "twice")


def _pick(world: World, pick: int) -> ScriptedWorker | None:
    names = sorted(world.workers)
    return world.workers[names[pick % len(names)]] if names else None


def _act(world: World, action: tuple[object, ...], lives: list[int]) -> None:
    match action:
        case ("generate", str(name), bytes(client), int(size), deadline_s):
            prompt = tuple(range(1, size + 1))
            assert deadline_s is None or isinstance(deadline_s, float)
            world.generate(name, prompt, size % 7 + 1, client, deadline_s)
        case ("cancel", str(name), bytes(client)):
            world.cancel(name, client)
        case ("deliver", int(pick), str(how)):
            _deliver(world, pick, how)
        case ("deliver many", int(pick), int(count)):
            for offset in range(count):
                _deliver(world, pick + offset, "once")
        case ("compute",):
            world.compute()
        case ("transfer",):
            world.transfer()
        case ("decode",):
            world.decode()
        case ("beat",):
            world.beat()
        case ("time", float(seconds)):
            world.pass_time(seconds)
        case ("fail", int(pick)):
            held = [(w, g) for w in world.workers.values() for g in w.live]
            if held:
                worker, generation = held[pick % len(held)]
                messages = worker.fail(generation, "transfer_failed")
                world.to_coordinator[worker.incarnation].extend(messages)
        case ("kill", int(pick), bool(noticed)):
            if (worker := _pick(world, pick)) is not None:
                world.kill(worker.incarnation, noticed=noticed)
        case ("join", str(role), int(blocks)):
            lives[0] += 1
            if len(world.workers) < 6:
                name = f"{role[0]}{lives[0] % 3}"
                dull = lives[0] % 2 == 0
                worker = ScriptedWorker(name, role, blocks, life=10 + lives[0], dull=dull)
                world.add(worker)
        case ("full", int(pick)):
            if (worker := _pick(world, pick)) is not None:
                worker.num_blocks = max(4, worker.num_blocks // 2)
        case ("stop" | "wake" as what, int(pick)):
            if (worker := _pick(world, pick)) is not None:
                worker.stopped = what == "stop"
        case ("drain", int(pick), bool(restart)):
            if (worker := _pick(world, pick)) is not None:
                world.from_client(DrainWorker(worker=worker.name, restart=restart))
        case ("wants to end", int(pick)):
            if (worker := _pick(world, pick)) is not None:
                worker.draining = True
        case ("close pair", int(pick), int(other)):
            pairs = sorted((w.incarnation, d) for w in world.workers.values() for d in w.pairs)
            if pairs:
                prefill, decode = pairs[(pick + other) % len(pairs)]
                world.workers[prefill].pairs.discard(decode)
                world.workers[prefill].peers = None  # it is opened again with the next peers
                word = PairClosed(decode=decode, reason="cut")
                world.to_coordinator[prefill].append(word)
        case ("restart coordinator",):
            world.restart_coordinator()
        case _:
            raise AssertionError(action)


def _come_to_an_end(world: World) -> None:
    """No more trouble: with one healthy pair, everything that still waits must come to its end."""
    for name in ("p", "d"):
        role = "prefill" if name == "p" else "decode"
        world.add(ScriptedWorker(f"{name}-sound", role, life=1000))
    world.supervised = True
    for worker in world.workers.values():
        worker.stopped = False
    for incarnation, worker in list(world.workers.items()):
        replaced = [w for w in world.workers.values() if w.name == worker.name]
        if worker is not replaced[-1]:  # its name was taken: a supervisor would kill it
            world.kill(incarnation, noticed=False)
    world.run_until_idle()


def _check_end(world: World) -> None:
    _come_to_an_end(world)
    assert world.state.statistics()["credits_outstanding"] == 0
    for client in world.clients.values():
        ends = [life.last for life in client.lives]
        assert all(last is not None and last.error_code in {None, *ERRORS} for last in ends), ends
        answered = len(client.accepted) + len({r.submission for r in client.rejected})
        assert answered == len(client.sent)
    for _ in range(40):
        world.beat()
        world.pass_time(0.5)
        world.deliver_all()
    assert world.state.statistics()["expels_open"] == 0
    for worker in world.workers.values():
        assert not worker.live, f"{worker.name} still holds {worker.live}"


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(actions, min_size=5, max_size=120))
def test_every_request_ends_once_and_everything_comes_back(
    script: list[tuple[object, ...]],
) -> None:
    world = World(prefill=2, decode=2, heartbeat_timeout_s=5.0, drain_s=3.0)
    lives = [0]
    for action in script:
        _act(world, action, lives)
    _check_end(world)


def _draw(rng: random.Random) -> tuple[object, ...]:
    client = rng.choice([b"c0", b"c1"])
    name, pick = rng.choice("abcdefgh"), rng.randint(0, 7)
    choices: list[tuple[int, tuple[object, ...]]] = [
        (12, ("generate", name, client, rng.randint(1, 60), rng.choice([None, None, 0.5, 30.0]))),
        (5, ("cancel", name, client)),
        (33, ("deliver many", pick, rng.randint(1, 6))),
        (6, ("deliver", pick, rng.choice(["once", "twice", "lost"]))),
        (8, ("compute",)),
        (8, ("transfer",)),
        (12, ("decode",)),
        (4, ("beat",)),
        (7, ("time", rng.choice([0.05, 0.3, 1.0]))),
        (2, ("fail", pick)),
        (1, ("kill", pick, rng.random() < 0.5)),
        (1, ("join", rng.choice(["prefill", "decode"]), rng.choice([64, 4096]))),
        (1, ("full", pick)),
        (1, ("stop", pick)),
        (2, ("wake", pick)),
        (1, ("drain", pick, rng.random() < 0.7)),
        (1, ("wants to end", pick)),
        (1, ("close pair", pick, rng.randint(0, 7))),
        (rng.random() < 0.1, ("restart coordinator",)),
    ]
    weights = [weight for weight, _ in choices]
    return rng.choices([action for _, action in choices], weights)[0]


def _live_through(seed: int) -> None:
    rng = random.Random(seed)
    world = World(prefill=2, decode=2, heartbeat_timeout_s=5.0, drain_s=3.0)
    lives = [0]
    for _ in range(rng.randint(100, 500)):
        _act(world, _draw(rng), lives)
    _check_end(world)


@pytest.mark.parametrize("seed", range(40))
def test_long_random_histories_come_to_their_end(seed: int) -> None:
    _live_through(seed)


@pytest.mark.soak
@pytest.mark.parametrize("thousand", range(1, 11))
def test_ten_thousand_long_histories_come_to_their_end(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        _live_through(seed)
