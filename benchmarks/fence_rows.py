"""What is done to a writer or a receiver in the middle of a WRITE: one function per experiment.

Each gets a lab, does one repetition and leaves the lab as it was. ROWS is the list of all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fence_lab import VICTIM_BLOCKS, WRITES, Lab, Outcome, faults_of, peers

# What a receiver may do while the writer is stopped, killed, or still writing.


def stopped_agent_kept(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    writer.stop()
    in_flight = lab.refill()
    writer.wake()
    outcome = Outcome(in_flight, lab.landed())
    lab.fence(writer)
    return outcome


def stopped_agent_destroyed(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    writer.stop()
    seconds = lab.receiver.call("drop_source", writer.name)
    in_flight = lab.refill()
    writer.wake()
    outcome = Outcome(in_flight, lab.landed(), seconds)
    lab.fence(writer)
    return outcome


def killed_agent_kept(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.end(writer)
    outcome = Outcome(lab.refill(), lab.landed())
    lab.fence(writer)
    return outcome


def killed_then_destroyed(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.end(writer)
    seconds = lab.receiver.call("drop_source", writer.name)
    return Outcome(lab.refill(), lab.landed(), seconds)


def destroyed_then_killed(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    seconds = lab.receiver.call("drop_source", writer.name)
    lab.end(writer)
    return Outcome(lab.refill(), lab.landed(), seconds)


def stopped_destroyed_killed(lab: Lab) -> Outcome:
    """A stalled worker that is expelled: SIGKILL ends it without waking it."""
    writer = lab.writer()
    lab.post_and_wait(writer)
    writer.stop()
    seconds = lab.receiver.call("drop_source", writer.name)
    lab.end(writer)
    return Outcome(lab.refill(), lab.landed(), seconds)


# What a writer is left with when its target is gone.


def target_killed(lab: Lab) -> Outcome:
    """The WRITEs must end with an error, another target must go on, a new incarnation join."""
    writer, victim = hit_target(lab)
    outcome = Outcome(False)
    start_s = time.monotonic()
    victim.kill()
    with faults_of(writer, outcome):
        ended = lab.all_ended(writer, WRITES)
        outcome.in_flight = any(error for _, error, _ in ended)
        if outcome.in_flight:
            outcome.seconds = max(end_s for _, _, end_s in ended) - start_s
        writer.call("drop_target", victim.name)
        lab.warm(writer, lab.receiver)
        new_incarnation(lab, writer)
    lab.fence(writer)
    return outcome


def target_stopped_and_woken(lab: Lab) -> Outcome:
    """While it is stopped, another target must go on and a new incarnation join."""
    writer, victim = hit_target(lab)
    outcome = Outcome(False)
    victim.stop()
    with faults_of(writer, outcome):
        lab.warm(writer, lab.receiver, ended=0)
        new_incarnation(lab, writer, ended=0)
        early = len(writer.call("take_ended")) - 2
        outcome.in_flight = early < WRITES
        victim.wake()
        start_s = time.monotonic()
        ended = lab.all_ended(writer, WRITES - early)
        outcome.faults += [error for _, error, _ in ended if error]
        outcome.seconds = time.monotonic() - start_s
        writer.call("drop_target", victim.name)
    lab.fence(writer)
    victim.kill()
    return outcome


def target_stopped_and_killed(lab: Lab) -> Outcome:
    writer, victim = hit_target(lab)
    outcome = Outcome(False)
    victim.stop()
    with faults_of(writer, outcome):
        time.sleep(lab.polled_s)
        early = len(writer.call("take_ended"))
        outcome.in_flight = early < WRITES
        start_s = time.monotonic()
        victim.kill()
        lab.all_ended(writer, WRITES - early)
        outcome.seconds = time.monotonic() - start_s
        writer.call("drop_target", victim.name)
        lab.warm(writer, lab.receiver)
    lab.fence(writer)
    return outcome


def target_restarted(lab: Lab) -> Outcome:
    """The writer sleeps through the death of its target and the start of the next one."""
    writer, victim = hit_target(lab)
    writer.stop()
    victim.kill()
    heir = lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(lab.writer(), heir)
    heir.call("refill", 0, VICTIM_BLOCKS)
    writer.wake()
    time.sleep(lab.polled_s)
    outcome = Outcome(False, heir.call("landed", 0, VICTIM_BLOCKS))
    with faults_of(writer, outcome):
        outcome.in_flight = any(error for _, error, _ in lab.all_ended(writer, WRITES))
        lab.pair(writer, heir)
        lab.warm(writer, heir)
    lab.fence(writer)
    heir.kill()
    return outcome


def hit_target(lab: Lab) -> tuple[Any, Any]:
    """A writer in the middle of its WRITEs to a target of its own."""
    writer, victim = lab.writer(), lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(writer, victim)
    lab.warm(writer, victim)
    lab.post_and_wait(writer, victim)
    return writer, victim


def new_incarnation(lab: Lab, writer: Any, ended: int = 1) -> None:
    heir = lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(writer, heir)
    lab.warm(writer, heir, ended)
    heir.kill()


def pair_closed_and_opened(lab: Lab) -> Outcome:
    """Both live: the receiver destroys its agent in the middle, the writer drops the target when
    its WRITEs have ended, and the same two pair again."""
    writer = lab.writer()
    lab.post_and_wait(writer)
    start_s = time.monotonic()
    lab.receiver.call("drop_source", writer.name)
    outcome = Outcome(lab.refill())
    with faults_of(writer, outcome):
        ended = lab.all_ended(writer, WRITES)
        outcome.seconds = max(end_s for _, _, end_s in ended) - start_s
        outcome.landed = lab.landed()
        writer.call("drop_target", lab.receiver.name)
        lab.pair(writer, lab.receiver)
        lab.warm(writer, lab.receiver)
    lab.fence(writer)
    return outcome


# What a link may still bring that was cut and is mended.

CUT_S = 1.0
MENDED_S = 4.0  # TCP tries again after twice the time it was cut


def cut_agent_kept(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    return mended(lab, writer, Outcome(False))


def cut_agent_destroyed(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    seconds = lab.receiver.call("drop_source", writer.name)
    return mended(lab, writer, Outcome(False, seconds=seconds))


def cut_killed_agent_kept(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    writer.kill()
    return mended(lab, writer, Outcome(False))


def cut_killed_destroyed(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    writer.kill()
    seconds = lab.receiver.call("drop_source", writer.name)
    return mended(lab, writer, Outcome(False, seconds=seconds))


def cut_writer(lab: Lab) -> Any:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.link.cut()
    time.sleep(CUT_S)
    return writer


def mended(lab: Lab, writer: Any, outcome: Outcome) -> Outcome:
    outcome.in_flight = lab.refill()
    lab.link.mend()
    outcome.landed = lab.landed(MENDED_S)
    lab.fence(writer)
    return outcome


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    run: Callable[[Lab], Outcome]
    must_hold: bool  # rlt relies on it
    over_link: bool = False


ROWS = [
    Row("stopped", "writer stopped, then woken", stopped_agent_kept, False),
    Row("stopped-destroyed", "writer stopped, agent destroyed, writer woken",
        stopped_agent_destroyed, False),
    Row("killed", "writer killed and reaped", killed_agent_kept, False),
    Row("killed-destroyed", "writer killed and reaped, agent destroyed",
        killed_then_destroyed, True),
    Row("destroyed-killed", "agent destroyed, writer killed and reaped",
        destroyed_then_killed, True),
    Row("stopped-destroyed-killed", "writer stopped, agent destroyed, writer killed and reaped",
        stopped_destroyed_killed, True),
    Row("restarted", "writer stopped, receiver restarted, writer woken", target_restarted, True),
    Row("closed", "agent destroyed while both live, paired again", pair_closed_and_opened, False),
    Row("target-killed", "target killed", target_killed, True),
    Row("target-stopped", "target stopped, then woken", target_stopped_and_woken, True),
    Row("target-stopped-killed", "target stopped, then killed", target_stopped_and_killed, True),
    Row("cut", "link cut and mended", cut_agent_kept, False, True),
    Row("cut-destroyed", "link cut, agent destroyed, mended", cut_agent_destroyed, False, True),
    Row("cut-killed", "link cut, writer killed and reaped, mended",
        cut_killed_agent_kept, False, True),
    Row("cut-killed-destroyed", "link cut, writer killed and reaped, agent destroyed, mended",
        cut_killed_destroyed, True, True),
]  # fmt: skip
