"""Facts of one handoff that both sides share: chunk tables and what they cover. Pure.

A chunk is (depth, positions) or the hidden state (depth None); its sequence number counts from 0.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from ..runtime.events import Reservation
from ..runtime.types import Generation, KVGeometry, TokenRange
from .messages import ChunkSpec

Outcome = TypeVar("Outcome")

ALLOCATION_LIMIT = 1 << 64  # notifications carry allocations as unsigned 64 bits


def coverage_fault(
    chunks: Sequence[ChunkSpec], num_planes: int, positions: TokenRange
) -> str | None:
    """Why `chunks` is not exactly: sequences 0..n-1 once each, every plane's `positions` covered
    without gap or overlap, and one hidden state. None when it is."""
    if sorted(chunk.sequence for chunk in chunks) != list(range(len(chunks))):
        return "sequence numbers are not 0..n-1, once each"
    hidden = [chunk for chunk in chunks if chunk.depth is None]
    if len(hidden) != 1:
        return f"{len(hidden)} hidden states instead of 1"
    planes: dict[int, list[TokenRange]] = {depth: [] for depth in range(num_planes)}
    for chunk in chunks:
        if chunk.depth is None:
            continue
        if chunk.depth not in planes:
            return f"depth {chunk.depth} does not exist"
        planes[chunk.depth].append(chunk.range)
    for depth, ranges in planes.items():
        reached = positions.start
        for part in sorted(ranges, key=lambda r: (r.start, r.stop)):
            if part.start != reached or part.stop <= part.start:
                return f"depth {depth}: expected a range from {reached}, got {part}"
            reached = part.stop
        if reached != positions.stop:
            return f"depth {depth}: covered up to {reached} of {positions.stop}"
    return None


def reservation_fault(
    reservation: Reservation, geometry: KVGeometry, prompt_tokens: int
) -> str | None:
    """Why D's promise cannot take a prompt of this length. None when it can. Says nothing about
    D's pool."""
    tables, blocks = reservation.tables, geometry.plane_blocks(prompt_tokens)
    if not 0 <= reservation.allocation < ALLOCATION_LIMIT:
        return f"allocation {reservation.allocation} is no number of 64 bits"
    if not 0 <= reservation.cached_tokens < prompt_tokens:
        return f"{reservation.cached_tokens} of {prompt_tokens} prompt tokens cached: none is left"
    if len(tables) != geometry.num_planes:
        return f"a reservation of {len(tables)} planes instead of {geometry.num_planes}"
    for depth, table in enumerate(tables):
        if len(table) < blocks:
            return f"reservation too short at depth {depth}: {len(table)} blocks of {blocks}"
    return None


class ClosedGenerations(Generic[Outcome]):
    """Generations that ended on this worker and how, so that late messages get the right answer.

    Everything below the oldest live generation is closed without being remembered one by one.
    """

    def __init__(self) -> None:
        self._outcome: dict[Generation, Outcome] = {}
        self._oldest_live = Generation(0)

    def close(self, generation: Generation, outcome: Outcome) -> None:
        self._outcome[generation] = outcome

    def __contains__(self, generation: Generation) -> bool:
        return generation < self._oldest_live or generation in self._outcome

    def __len__(self) -> int:
        return len(self._outcome)

    def outcome(self, generation: Generation) -> Outcome | None:
        """How it ended; None when it is not closed, or too old to be remembered."""
        return self._outcome.get(generation)

    def forget_below(self, oldest_live: Generation) -> None:
        """Called with what the coordinator says in its heartbeat answers."""
        if oldest_live <= self._oldest_live:
            return
        self._oldest_live = oldest_live
        self._outcome = {g: o for g, o in self._outcome.items() if g >= oldest_live}
