"""Whom a worker's name belongs to, when a new incarnation asks for one that is taken.

Owns since when each newcomer asks. A holder that is heard keeps its name; one that has fallen
silent, or was reaped, loses it to the newcomer.
"""

from collections.abc import Sequence
from enum import Enum

from .now import Now
from .registry import Worker

MAX_ASKING = 1024


class Claim(Enum):
    FREE = "free"
    WAIT = "wait"  # it is not answered, and asks again
    TAKEN = "taken"


class Names:
    def __init__(self, heard_within_s: float, patience_s: float) -> None:
        self._heard_within_s = heard_within_s
        self._patience_s = patience_s
        self._asking: dict[str, float] = {}  # since when; oldest first

    def claim(self, incarnation: str, holders: Sequence[Worker], now: Now) -> Claim:
        if not any(now.mono_s - holder.heard_s <= self._heard_within_s for holder in holders):
            self._asking.pop(incarnation, None)
            return Claim.FREE
        since_s = self._asking.setdefault(incarnation, now.mono_s)
        if len(self._asking) > MAX_ASKING:
            del self._asking[next(iter(self._asking))]
        if now.mono_s - since_s < self._patience_s:
            return Claim.WAIT
        self._asking.pop(incarnation, None)
        return Claim.TAKEN
