"""The coordinator's state machine, driven by events among scripted workers."""

from typing import Any

import msgspec
import pytest

from rlt.connector.messages import (
    Cancel,
    Confirm,
    Generate,
    GenerationFailed,
    GenerationReleased,
    Heartbeat,
    HeartbeatAnswer,
    LiveGeneration,
    Output,
    OutputRow,
    PairClosed,
    PairReady,
    Peers,
    Prefill,
    Refused,
    RegisterRefused,
    Resend,
    Reserve,
    Welcome,
)
from rlt.coordinator.generations import COUNTER_BITS
from rlt.runtime.types import FinishReason, Generation, TokenLogprobs

from .workers import GEOMETRY, MODEL, ScriptedWorker, expected_tokens
from .world import World


def outcome(world: World, name: str = "r", client: bytes = b"c0") -> str:
    """How a request ended: its finish reason, or the code of its error."""
    last = world.life(name, client).last
    assert last is not None and last.finish_reason is not None, f"{name} has not ended"
    return last.error_code or last.finish_reason.value


def rejections(world: World) -> list[str]:
    return [rejected.code for rejected in world.clients[b"c0"].rejected]


def asks(worker: ScriptedWorker, kind: type[msgspec.Struct]) -> list[msgspec.Struct]:
    return [message for message in worker.heard if isinstance(message, kind)]


def assert_idle(world: World) -> None:
    world.run_until_idle()
    assert world.state.statistics()["credits_outstanding"] == 0
    for worker in world.workers.values():
        assert not worker.live, worker.name


# The straight way


def test_a_request_goes_through_both_workers_and_ends_with_its_whole_output() -> None:
    world = World()
    world.generate(max_tokens=5)
    assert_idle(world)
    last = world.life().last
    assert last is not None and last.finish_reason is FinishReason.LENGTH
    assert last.num_prompt_tokens == 3
    assert world.life().tokens == list(expected_tokens((5, 6, 7), 5))
    events = [stamp.event for stamp in last.timeline]
    for event in (
        "received",
        "admitted",
        "reserved",
        "prefill_done",
        "committed",
        "activated",
        "released",
        "first_token",
        "last_token",
    ):
        assert event in events, event
    prefill, decode = world.named("p0"), world.named("d0")
    assert len(asks(decode, Reserve)) == len(asks(prefill, Prefill)) == 1
    assert not asks(decode, Cancel) and not asks(prefill, Cancel)
    assert not decode.log  # everything was confirmed


def test_requests_spread_over_equal_pairs() -> None:
    world = World(prefill=2, decode=2)
    for number in range(8):
        world.generate(f"r{number}", prompt=(number + 1,) * 20, max_tokens=20)
    world.deliver_all()
    assert [len(world.named(name).live) for name in ("p0", "p1", "d0", "d1")] == [4, 4, 4, 4]
    assert_idle(world)


def test_a_seed_is_drawn_once_and_the_callers_own_is_kept() -> None:
    world = World()
    world.generate()
    world.deliver_all()
    [reserve] = asks(world.named("d0"), Reserve)
    assert isinstance(reserve, Reserve) and reserve.request.sampling.seed == 7


def test_an_ask_is_repeated_until_it_is_answered() -> None:
    world = World(heartbeat_timeout_s=100.0)
    world.generate()
    decode = world.named("d0").incarnation
    for _ in range(3):
        world.to_worker[decode].clear()  # Reserve is lost
        world.pass_time(5.0)
    world.deliver_all()
    assert len(world.named("d0").live) == 1
    world.to_worker[world.named("p0").incarnation].clear()
    assert_idle(world)
    assert outcome(world) == "length"


def test_output_that_was_lost_is_asked_for_again() -> None:
    world = World()
    world.generate(max_tokens=6)
    decode = world.named("d0")
    while not decode.log:
        world.work()
        world.deliver_all()
    line = world.to_coordinator[decode.incarnation]
    world.work()
    assert isinstance(line.popleft(), Output)
    seen = len(world.life().tokens)
    world.work()
    world.deliver_all()
    assert asks(decode, Resend) == [Resend(generation=next(iter(decode.live)), start_index=seen)]
    assert len(world.life().tokens) == seen + 2
    assert_idle(world)
    assert outcome(world) == "length"


def test_a_lost_last_output_is_fetched_although_the_worker_has_let_go() -> None:
    world = World()
    world.generate(max_tokens=2)
    decode = world.named("d0")
    while not decode.log:
        world.work()
        world.deliver_all()
    world.work()
    line = world.to_coordinator[decode.incarnation]
    assert [type(message) for message in line] == [Output, GenerationReleased]
    line.popleft()
    world.deliver_all()  # without a heartbeat that would show it
    assert outcome(world) == "length"
    assert_idle(world)


def test_output_that_the_worker_has_let_go_of_is_a_named_error_not_a_wait_for_ever() -> None:
    world = World()
    world.generate(max_tokens=2)
    decode = world.named("d0")
    while not decode.log:
        world.work()
        world.deliver_all()
    world.work()
    world.to_coordinator[decode.incarnation].popleft()
    decode.log.clear()
    assert_idle(world)
    assert outcome(world) == "worker_lost"
    assert world.time_s < 110.0


def test_output_before_the_prefill_was_even_asked_for_is_dropped() -> None:
    world = World()
    world.generate()
    [generation] = [a.generation for a in world.state._attempts.at("d0-1")]
    row = OutputRow(generation=generation, start_index=0, token_ids=(1,), exit_depths=(4,))
    world.perform(world.state.handle_worker("d0-1", Output(rows=(row,)), world.now))
    assert world.life().tokens == []
    assert_idle(world)
    assert outcome(world) == "length"


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (-1,)},
        {"token_ids": (512,)},
        {"token_ids": (1 << 40,)},
        {"exit_depths": ()},
        {"exit_depths": (0,)},
        {"exit_depths": (5,)},
        {"logprobs": (TokenLogprobs(0.0, ()), TokenLogprobs(0.0, ()))},
        {"start_index": -1},
        {"start_index": 99},
        {"token_ids": (5,) * 99, "exit_depths": (4,) * 99},
        {"finish_reason": FinishReason.ERROR},
    ],
)
def test_output_that_cannot_be_ends_its_own_request_and_no_other(
    changes: dict[str, object],
) -> None:
    world = World()
    world.generate("bad")
    world.generate("good")
    world.deliver_all()
    decode = world.named("d0")
    generation = next(iter(decode.live))
    row = OutputRow(generation=generation, start_index=0, token_ids=(5,), exit_depths=(4,))
    odd = Output(rows=(msgspec.structs.replace(row, **changes),))
    world.perform(world.state.handle_worker(decode.incarnation, odd, world.now))
    assert outcome(world, "bad") == "protocol"
    assert_idle(world)
    assert outcome(world, "good") == "length"


def test_a_lost_confirm_is_repeated_when_the_heartbeat_shows_it() -> None:
    world = World()
    world.generate(max_tokens=2)
    decode = world.named("d0")
    for _ in range(20):
        world.work()
        for incarnation in world.workers:
            line = world.to_worker[incarnation]
            kept = [message for message in line if not isinstance(message, Confirm)]
            line.clear()
            line.extend(kept)
        if world.state.idle:
            break
        for incarnation in list(world.workers):
            while world.to_worker[incarnation]:
                world.deliver_to_worker(incarnation)
            while world.to_coordinator[incarnation]:
                world.deliver_to_coordinator(incarnation)
                line = world.to_worker[decode.incarnation]
                kept = [message for message in line if not isinstance(message, Confirm)]
                line.clear()
                line.extend(kept)
    assert outcome(world) == "length" and decode.log
    world.beat()
    world.deliver_all()
    assert not decode.log
    assert not asks(decode, Cancel)


# Refusals


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


# Credits


def test_a_receive_slot_comes_back_when_the_request_is_activated() -> None:
    world = World(decode=0)
    world.add(ScriptedWorker("d", "decode", num_receive_slots=1))
    world.deliver_all()
    world.generate("a", max_tokens=50)
    world.generate("b", max_tokens=50)
    while not any(record.phase == "active" for record in world.named("d").live.values()):
        assert len(world.named("d").live) <= 1
        world.work()
        world.deliver_all()
    world.deliver_all()
    assert len(world.named("d").live) == 2
    assert_idle(world)


def test_the_compute_credit_comes_back_when_the_prompt_is_computed_and_blocks_later() -> None:
    world = World()
    world.generate(prompt=(1,) * 20, max_tokens=50)
    account = world.state._books.account("p0-1")
    world.deliver_all()
    assert (account.compute_tokens, account.blocks) == (20, 8)
    world.compute()
    world.deliver_all()
    assert (account.compute_tokens, account.blocks) == (0, 8)
    world.transfer()
    world.deliver_all()
    assert (account.compute_tokens, account.blocks) == (0, 0)
    assert_idle(world)


# Order in the line


def test_a_small_request_may_pass_a_blocked_large_one_a_bounded_number_of_times() -> None:
    world = World(decode=0, max_bypasses=2)
    world.add(ScriptedWorker("d", "decode", num_blocks=40))
    world.deliver_all()
    world.generate("first", prompt=(1,) * 100, max_tokens=20)  # 32 of 40 blocks
    world.deliver_all()
    world.generate("large", prompt=(1,) * 100, max_tokens=20)
    for number in range(4):
        world.generate(f"small{number}", prompt=(1,), max_tokens=1)
        world.deliver_all()
    assert_idle(world)
    reserves = asks(world.named("d"), Reserve)
    sizes = [len(ask.request.prompt) for ask in reserves if isinstance(ask, Reserve)]
    assert sizes == [100, 1, 1, 100, 1, 1]


# Cancels, in every phase


def step_until(world: World, phase: str) -> None:
    prefill, decode = world.named("p0"), world.named("d0")
    reached = {
        "waiting": lambda: True,
        "reserving": lambda: True,
        "reserved": lambda: bool(decode.live),
        "computing": lambda: any(r.phase == "computing" for r in prefill.live.values()),
        "sending": lambda: any(r.phase == "sending" for r in prefill.live.values()),
        "received": lambda: any(r.phase == "received" for r in decode.live.values()),
        "active": lambda: any(r.outputs > 1 for r in decode.live.values()),
    }[phase]
    while not reached():
        moved = False
        for incarnation in list(world.workers):
            if world.to_worker[incarnation] and not reached():
                world.deliver_to_worker(incarnation)
                moved = True
            if world.to_coordinator[incarnation] and not reached():
                world.deliver_to_coordinator(incarnation)
                moved = True
        if moved:
            continue
        for act in (world.decode, world.transfer, world.compute):
            if not reached():
                act()


@pytest.mark.parametrize("ending", ["cancel", "deadline", "client gone"])
@pytest.mark.parametrize(
    "phase", ["waiting", "reserving", "reserved", "computing", "sending", "received", "active"]
)
def test_an_early_end_in_any_phase_releases_everything(phase: str, ending: str) -> None:
    world = World()
    if phase == "waiting":
        world.named("d0")
        for pair in world.state._registry.pairs():
            message = PairClosed(decode=pair.decode, reason="test")
            world.perform(world.state.handle_worker(pair.prefill, message, world.now))
    world.generate("r", max_tokens=50, deadline_s=30.0)
    step_until(world, phase)
    tokens = len(world.life().tokens)
    if ending == "cancel":
        world.cancel("r")
        assert outcome(world) == "cancelled" and world.clients[b"c0"].cancel_done == 1
        if phase != "waiting":
            world.generate("r", prompt=(9,), max_tokens=3)  # the ID works again at once
    elif ending == "deadline":
        world.pass_time(31.0)
        missing = phase == "waiting"
        assert outcome(world) == ("no_decode_worker" if missing else "deadline_exceeded")
    else:
        world.leave(b"c0")
    assert_idle(world)
    assert len(world.clients[b"c0"].lives[0].tokens) == tokens
    if ending == "cancel" and phase != "waiting":
        assert outcome(world) == "length"
    cancels = [m for w in world.workers.values() for m in asks(w, Cancel)]
    assert all(isinstance(m, Cancel) for m in cancels)
    if phase in ("reserving", "reserved"):
        assert [m.writer_never_started for m in cancels if isinstance(m, Cancel)] == [True]
    elif phase != "waiting":
        assert not any(m.writer_never_started for m in cancels if isinstance(m, Cancel))


def test_a_cancel_for_an_unknown_request_is_answered() -> None:
    world = World()
    world.cancel("nobody")
    assert world.clients[b"c0"].cancel_done == 1


# Failures


@pytest.mark.parametrize("role", ["p0", "d0"])
def test_a_failure_of_one_leg_cancels_the_other_and_reaches_the_client(role: str) -> None:
    world = World()
    world.generate(max_tokens=50)
    step_until(world, "computing")
    worker = world.named(role)
    [generation] = worker.live
    world.to_coordinator[worker.incarnation].extend(worker.fail(generation, "transfer_failed"))
    world.deliver_all()
    assert outcome(world) == "transfer_failed"
    assert_idle(world)
    other = world.named("d0" if role == "p0" else "p0")
    assert len(asks(other, Cancel)) == 1


def test_a_prefill_workers_lost_failure_ends_the_request_all_the_same() -> None:
    world = World()
    world.generate(max_tokens=10)
    step_until(world, "sending")
    world.deliver_all()
    prefill = world.named("p0")
    _, released = prefill.fail(next(iter(prefill.live)), "transfer_failed")
    world.to_coordinator[prefill.incarnation].append(released)
    assert_idle(world)
    assert outcome(world) == "transfer_failed"
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
def test_a_dead_worker_fails_its_requests_and_the_others_go_on(victim: str, noticed: bool) -> None:
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
    ends = [outcome(world, f"r{number}") for number in range(8)]
    assert sorted(set(ends)) == ["length", "worker_lost"]
    assert ends.count("worker_lost") == 4
    survivor = world.named("d0" if victim == "p0" else "p0")
    assert survivor.peers is not None
    assert victim not in {peer.worker for peer in survivor.peers.peers}


def test_a_closed_connection_that_is_not_opened_again_means_a_dead_worker() -> None:
    world = World()
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


# Membership


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


def test_a_new_incarnation_of_a_name_replaces_the_old_one() -> None:
    world = World()
    world.generate(max_tokens=50)
    world.deliver_all()
    world.dead.add(world.named("d0").incarnation)
    world.workers.pop("d0-1")
    world.add(ScriptedWorker("d0", "decode", life=2))
    world.deliver_to_coordinator("d0-2")
    assert outcome(world) == "worker_lost"
    assert [w.incarnation for w in world.state.workers("decode")] == ["d0-2"]


@pytest.mark.parametrize("above", [0, 1, 1000])
def test_generations_rise_above_every_epoch_that_a_worker_has_seen(above: int) -> None:
    world = World(prefill=0)
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


def test_a_heartbeat_of_an_unknown_incarnation_is_refused() -> None:
    world = World()
    stranger = ScriptedWorker("s", "decode")
    world.to_worker[stranger.incarnation] = world.to_worker["d0-1"].__class__()
    beat = stranger.heartbeat()
    world.perform(world.state.handle_worker(stranger.incarnation, beat, world.now))
    [answer] = world.to_worker[stranger.incarnation]
    assert isinstance(answer, RegisterRefused)


def test_a_draining_service_finishes_what_runs_and_takes_nothing_new() -> None:
    world = World()
    world.generate("r")
    world.state.drain()
    world.generate("late")
    assert rejections(world) == ["shutting_down"]
    assert_idle(world)
    assert outcome(world, "r") == "length"


def test_time_up_while_draining_ends_the_rest_by_name() -> None:
    world = World()
    world.generate("r", max_tokens=500)
    world.deliver_all()
    world.state.drain()
    world.perform(world.state.end_all(world.now))
    assert outcome(world, "r") == "shutting_down"
    assert_idle(world)
