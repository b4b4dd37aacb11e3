"""What tests ask about a world, and how they bring a request to a chosen point."""

import msgspec

from .workers import ScriptedWorker
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
