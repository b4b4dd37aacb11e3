"""Numbers for attempts: the coordinator's epoch in the high bits, a counter in the low 40.

A number is never given out twice, also not by a coordinator that was started again: the epoch
starts from the wall clock's minutes and is lifted above every one that a worker has seen.
"""

from ..runtime.types import Generation

COUNTER_BITS = 40
MAX_EPOCH = (1 << 23) - 2  # so that one above it still fits into a signed 64-bit number
_FIRST_MINUTE_S = 1_767_225_600  # 2026-01-01 UTC; 23 bits of minutes last 16 years


def epoch_of(generation: Generation) -> int:
    return generation >> COUNTER_BITS


class Generations:
    def __init__(self, wall_s: float) -> None:
        self.epoch = max(1, int(wall_s - _FIRST_MINUTE_S) // 60)
        self._count = 0

    def exceed(self, seen_epoch: int) -> None:
        """A worker has seen `seen_epoch`: coming numbers lie above it."""
        if seen_epoch >= self.epoch:
            self.epoch = seen_epoch + 1

    def next(self) -> Generation:
        generation = self.upcoming
        self._count += 1
        return generation

    @property
    def upcoming(self) -> Generation:
        """The lowest number that may be given out from now on."""
        return Generation((self.epoch << COUNTER_BITS) | (self._count + 1))
