"""The last things that happened to each generation, for the message of a failed check.

Owns a bounded ring of (generation, word). Never decides anything.
Only phase changes are noted, never tokens, so the ring reaches far back.
"""

from collections import deque

from .types import Generation


class Story:
    def __init__(self, limit: int = 4096) -> None:
        self._ring: deque[tuple[Generation, str]] = deque(maxlen=limit)

    def note(self, generation: Generation, what: str) -> None:
        self._ring.append((generation, what))

    def last(self, generation: Generation, count: int = 20) -> str:
        mine = [what for noted, what in self._ring if noted == generation]
        return " > ".join(mine[-count:]) or "(nothing noted)"
