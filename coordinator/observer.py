"""What may be watched while it happens: the moments that no later look at the state can tell.

Owns the names of those moments. An observer is told and never asked: nothing depends on its
answer. `output` comes once per row of output, so it must cost next to nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from ..runtime.types import Stamp
from .now import Now
from .request import Request


class Observer(Protocol):
    def accepted(self, request: Request) -> None:
        """It was taken and waits for a pair."""
        ...

    def started(self, request: Request, now: Now) -> None:
        """A pair was chosen; once per attempt."""
        ...

    def received(self, stamps: Sequence[Stamp]) -> None:
        """The decode worker holds the whole prompt. stamps: both workers', up to there."""
        ...

    def output(self, request: Request, exit_depths: Sequence[int], now: Now) -> None:
        """New tokens are about to be given out: the request still says how it stood before."""
        ...

    def ended(self, request: Request, now: Now) -> None: ...


class Unobserved:
    """Nobody watches."""

    def accepted(self, request: Request) -> None:
        pass

    def started(self, request: Request, now: Now) -> None:
        pass

    def received(self, stamps: Sequence[Stamp]) -> None:
        pass

    def output(self, request: Request, exit_depths: Sequence[int], now: Now) -> None:
        pass

    def ended(self, request: Request, now: Now) -> None:
        pass
