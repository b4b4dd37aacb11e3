"""When a token has looped enough: one policy object per request, fed one score per wanted loop.

Owns the exit state of the token that is looping; it restarts with every token. Never sees a tensor,
a queue or another request.
after(n) speaks of loops that were submitted, read or not. LOOP and EXIT never change afterwards, so
no loop beyond the exit depth is ever submitted.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, assert_never

from .types import ExitSettings


class Next(Enum):
    LOOP = auto()  # the token runs one more loop, whatever the scores to come say
    EXIT = auto()
    WAIT = auto()  # a score that was not fed yet decides


class ExitPolicy(Protocol):
    """Loops are counted from 1: loop r writes depth r - 1."""

    def start_token(self, output_index: int) -> None:
        """The loops to come produce output `output_index`."""
        ...

    def wants_score(self, loop: int) -> bool: ...
    def feed(self, loop: int, score: float) -> None:
        """The score of `loop`, in order and each once."""
        ...

    def after(self, loops: int) -> Next:
        """What follows once `loops` loops of the token are submitted."""
        ...


class KnownDepth:
    """The depth of every output is known beforehand: no score is wanted."""

    def __init__(self, depth_of: Callable[[int], int]) -> None:
        self._depth_of = depth_of
        self._depth = 0

    def start_token(self, output_index: int) -> None:
        self._depth = self._depth_of(output_index)

    def wants_score(self, loop: int) -> bool:
        return False

    def feed(self, loop: int, score: float) -> None:
        return

    def after(self, loops: int) -> Next:
        return Next.EXIT if loops >= self._depth else Next.LOOP


class ScoredDepth:
    """Exit `lookahead` loops after the first loop r >= min_loops whose signal reaches threshold.

    hazards: scores are hazards, the signal is 1 - prod(1 - score) and loops before min_loops count
    in it; else the signal is the score itself.
    """

    def __init__(self, settings: ExitSettings, *, lookahead: int, hazards: bool) -> None:
        self._threshold = settings.threshold
        self._min_loops, self._max_loops = settings.min_loops, settings.max_loops
        self._lookahead, self._hazards = lookahead, hazards
        self._first_wanted = 1 if hazards else settings.min_loops
        self.start_token(1)

    def start_token(self, output_index: int) -> None:
        self._survival = 1.0  # prod(1 - hazard), in double
        self._fed = 0
        self._exit_depth = self._max_loops

    def wants_score(self, loop: int) -> bool:
        return self._first_wanted <= loop and loop + self._lookahead < self._max_loops

    def feed(self, loop: int, score: float) -> None:
        self._fed = loop
        self._survival *= 1.0 - score
        signal = 1.0 - self._survival if self._hazards else score
        if loop >= self._min_loops and signal >= self._threshold:
            self._exit_depth = min(self._exit_depth, loop + self._lookahead)

    def after(self, loops: int) -> Next:
        if loops >= self._exit_depth:
            return Next.EXIT
        deciding = loops - self._lookahead  # its score says whether one more loop runs
        known = deciding < self._min_loops or deciding <= self._fed
        return Next.LOOP if known else Next.WAIT


def exit_policy_for(settings: ExitSettings) -> ExitPolicy:
    match settings.mode:
        case "ouro":
            return _scored(settings, lookahead=0, hazards=True)
        case "ouro_delayed":
            return _scored(settings, lookahead=1, hazards=True)
        case "random_lookahead":
            return _scored(settings, lookahead=1, hazards=False)
        case "trace":
            return KnownDepth(settings.trace.__getitem__)
        case _:
            assert_never(settings.mode)


def _scored(settings: ExitSettings, *, lookahead: int, hazards: bool) -> ExitPolicy:
    """Threshold 1 never exits early, even where a float32 sigmoid rounds to 1; threshold 0 always
    does: neither needs a score, nor do bounds that leave no choice."""
    first, last = min(settings.min_loops + lookahead, settings.max_loops), settings.max_loops
    if settings.threshold >= 1.0 or first == last:
        return KnownDepth(lambda _: last)
    if settings.threshold <= 0.0:
        return KnownDepth(lambda _: first)
    return ScoredDepth(settings, lookahead=lookahead, hazards=hazards)
