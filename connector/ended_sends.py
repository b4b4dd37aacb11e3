"""What a decode worker may still ask P about: sends that ended, or were stopped before they began.

Pure, and bounded whatever a peer asks. An answer (how many sequences were posted) is evidence, so
what was forgotten is not answered; what was stopped before it began must not begin later.
"""

from collections import OrderedDict

from ..runtime.types import Generation

MOST_ENDED = 16384
MOST_EARLY = 4096  # of one decode worker; an honest one stops what it reserved, so a few


class EndedSends:
    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[str, Generation], int] = OrderedDict()
        self._forgotten = Generation(-1)  # nothing above it was forgotten
        self._early: dict[str, set[Generation]] = {}

    def end(self, peer: str, generation: Generation, posted: int) -> None:
        self._ended[peer, generation] = posted
        if len(self._ended) > MOST_ENDED:
            (_, oldest), _ = self._ended.popitem(last=False)
            self._forgotten = max(self._forgotten, oldest)

    def posted(self, peer: str, generation: Generation) -> int | None:
        """How many sequences of a send that will not go on were posted; 0 if it never began; None
        when that is not known any more. Ask only about what does not run."""
        if (peer, generation) in self._ended:
            return self._ended[peer, generation]
        if self.stopped_early(peer, generation) or generation > self._forgotten:
            return 0
        return None

    def stop_early(self, peer: str, generation: Generation) -> bool:
        """It must not begin. False: there are too many of this peer; this one was not noted."""
        early = self._early.setdefault(peer, set())
        if generation not in early and len(early) >= MOST_EARLY:
            return False
        early.add(generation)
        return True

    def stopped_early(self, peer: str, generation: Generation) -> bool:
        return generation in self._early.get(peer, ())

    def forget_below(self, oldest_live: Generation) -> None:
        """What is older cannot begin any more."""
        for peer, early in list(self._early.items()):
            self._early[peer] = {g for g in early if g >= oldest_live}
            if not self._early[peer]:
                del self._early[peer]
