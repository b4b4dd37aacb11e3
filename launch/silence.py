"""Whether the coordinator has fallen silent. Pure: told of beats and answers, kills nobody.

Owns how long that process may still say nothing. Silence is counted in beats of whoever listens,
so that a listener or a machine which stood still blames nobody.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """first_s: until a process that has just started answers. between_s: from then on."""

    between_s: float
    first_s: float = 120.0


ENDLESS = Patience(between_s=math.inf, first_s=math.inf)


class Silence:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._pid: int | None = None
        self._left_s = 0.0

    def answered(self, pid: int) -> None:
        """Late words of an earlier process count for nothing."""
        if pid == self._pid:
            self._left_s = self._patience.between_s

    def beat(self, pid: int, beat_s: float) -> bool:
        """`beat_s` have passed. pid: who is to answer now. True: it has not for too long; it has
        its first patience again then, to end in."""
        if pid != self._pid:
            self._pid, self._left_s = pid, self._patience.first_s
            return False
        self._left_s -= beat_s
        if self._left_s >= 0:
            return False
        self._left_s = self._patience.first_s
        return True
