"""Who waits is offered a start as soon as whoever stood before it has left the line."""

import pytest

from .looking import assert_idle, outcome
from .workers import ScriptedWorker
from .world import World

LOOK_AHEADS = 10  # steps of time, each of which looks at some of the line


def blocked_behind_large() -> World:
    """Of 40 blocks 32 are taken for good; large waits and may be passed by nobody any more."""
    world = World(decode=0, max_bypasses=0, heartbeat_timeout_s=100.0)
    world.add(ScriptedWorker("d", "decode", num_blocks=40))
    world.deliver_all()
    world.generate("first", prompt=(1,) * 100, max_tokens=20)
    world.deliver_all()
    world.generate("large", prompt=(1,) * 100, max_tokens=20, deadline_s=50.0)
    world.generate("small", prompt=(1,), max_tokens=1)
    world.deliver_all()
    assert len(world.named("d").live) == 1 and len(world.state._dispatcher) == 2
    return world


@pytest.mark.parametrize("ending", ["cancel", "deadline"])
def test_who_was_stopped_by_a_request_that_ends_in_the_line_starts_at_once(ending: str) -> None:
    world = blocked_behind_large()
    if ending == "cancel":
        world.cancel("large")
        assert outcome(world, "large") == "cancelled"
    else:
        world.pass_time(60.0)
        assert outcome(world, "large") == "deadline_exceeded"
    assert len(world.state._dispatcher) == 0
    world.deliver_all()
    assert len(world.named("d").live) == 2  # although first goes on, and nothing else happened
    assert_idle(world)
    assert outcome(world, "small") == "length"


def test_a_good_request_behind_many_that_no_worker_can_take_starts_when_those_have_ended() -> None:
    world = World(prefill=0, decode=0, max_queue=500)
    for number in range(400):
        world.generate(f"bad{number}", prompt=(1,), max_tokens=100_000)
    world.generate("good")
    world.add(ScriptedWorker("p0", "prefill"))
    world.add(ScriptedWorker("d0", "decode"))
    world.deliver_all()
    for _ in range(LOOK_AHEADS):
        world.pass_time(0.05)  # and nobody says anything
    world.deliver_all()
    assert len(world.named("d0").live) == 1
    assert_idle(world)
    assert outcome(world, "good") == "length"
    assert outcome(world, "bad399") not in ("length", "deadline_exceeded")
