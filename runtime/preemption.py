"""Who gives its blocks up when nothing is free: pure choices over frozen facts.

Owns no state. Preemption happens in room.py; this file decides.

Why it makes progress. A request that may grow is let in only if the snapshots of all such requests
fit the executor's bound together (else it gets all its blocks at once and never asks again), so
suspending one cannot fail for lack of memory. Let T be the most urgent request that holds blocks,
executes, and fits the usable blocks with its next column. Nobody less urgent can take blocks from
it, and its own lack is met by suspending, one after the other, everybody less urgent that may grow
and has no pass in flight; a victim whose pass is in flight is held back until it is collected. What
then still holds blocks needs none: requests with all their blocks, which run to their end; received
ones, which get the slots of the victims (so D grows only with two slots or more) and become victims
themselves; receiving and sending ones, which end with their transfer. So T gets blocks, loops, and
ends, because one request always fits the pool; then the next one is T. Suspended requests return
most urgent first, before any less urgent request is let in. (Should an executor keep less memory
for snapshots than it said, the least urgent victim ends with a named error once nobody can run.)

Quarantined blocks are not usable, so that a request that has grown may not fit any more, even
alone. It is suspended itself at its next column, before anybody gives way to it, and neither
returns nor holds newcomers back until it fits again: it holds nothing, nobody waits for it, and T
is another one. If T itself stops fitting because a transfer ends in quarantine, the same happens to
it. It comes back when the quarantine ends. Without a quarantine nobody is in that place.
"""

from collections.abc import Iterable

import msgspec

from .types import Generation

Urgency = tuple[int, int]  # (priority, arrival): the smaller goes first, the larger gives way


class Candidate(msgspec.Struct, frozen=True):
    """A request that executes and may grow. busy: a pass of it is in flight."""

    generation: Generation
    urgency: Urgency
    busy: bool


def choose_victim(needy: Urgency, candidates: Iterable[Candidate]) -> Candidate | None:
    """The least urgent of those less urgent than the needy one: lowest priority, then latest."""
    below = [candidate for candidate in candidates if candidate.urgency > needy]
    return max(below, key=lambda candidate: candidate.urgency, default=None)


def resume_margin(*, executing: int, num_planes: int, watermark: int) -> int:
    """Blocks that must stay free when a suspended request comes back: one column for everybody, so
    that it is not the next victim at once. Nothing is asked where nobody else runs."""
    return (executing + 1) * num_planes + watermark if executing else 0
