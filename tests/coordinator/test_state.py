"""The coordinator's state machine, driven by events among scripted workers."""

from rlt.connector.messages import (
    Cancel,
    Prefill,
    Reserve,
)
from rlt.runtime.types import FinishReason

from .world import World


def test_a_request_goes_through_both_workers_and_ends_with_its_whole_output() -> None:
    world = World()
    world.generate(max_tokens=5)
    world.run_until_idle()
    last = world.life().last
    assert last is not None and last.finish_reason is FinishReason.LENGTH
    assert last.num_prompt_tokens == 3
    assert world.state.statistics()["credits_outstanding"] == 0
    events = [stamp.event for stamp in last.timeline]
    for event in (
        "received",
        "admitted",
        "reserved",
        "prefill_accepted",
        "prefill_done",
        "committed",
        "activated",
        "first_token",
        "last_token",
    ):
        assert event in events, event
    heard = [type(m) for m in world.named("p0").heard + world.named("d0").heard]
    assert heard.count(Reserve) == heard.count(Prefill) == 1
    assert Cancel not in heard
    assert not world.named("d0").log  # everything was confirmed
