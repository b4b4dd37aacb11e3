"""The coordinator's state machine, driven by events among scripted workers."""

import msgspec
import pytest

from rlt.connector.messages import (
    Cancel,
    Confirm,
    GenerationReleased,
    Output,
    OutputRow,
    PairClosed,
    Prefill,
    Resend,
    Reserve,
)
from rlt.runtime.types import FinishReason, TokenLogprobs

from .looking import asks, assert_idle, outcome, rejections, step_until
from .workers import ScriptedWorker, expected_tokens
from .world import World

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
    world = World(max_attempts=1)
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


# The end


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
