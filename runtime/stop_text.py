"""One output's tokens turned into the text that may be shown, up to its first stop string. Pure.

Owns the few characters that could still become part of a stop string: they are held back until it
is clear that they do not. Nothing of a found stop string, and nothing after it, is ever given out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .prompt import TextDecoder


class Piece(NamedTuple):
    """taken: how many of the tokens belong to the output; fewer than given only if `stopped`."""

    text: str
    taken: int
    stopped: bool


class OutputText:
    """The text of one output. stopped: a stop string was found, the output is over."""

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = StopText(stops) if stops else None

    @property
    def stopped(self) -> bool:
        return self._stops is not None and self._stops.found is not None

    def push(self, token_ids: Sequence[int]) -> Piece:
        """The token that completes a stop string is the last one of the output."""
        if self._stops is None:
            return Piece(self._decoder.push(token_ids), len(token_ids), False)
        text = ""
        for count, token in enumerate(token_ids, start=1):
            text += self._stops.push(self._decoder.push((token,)))
            if self.stopped:
                return Piece(text, count, True)
        return Piece(text, len(token_ids), False)

    def finish(self) -> str:
        """What is still pending at the end. It may hold a stop string: see `stopped`."""
        if self._stops is None:
            return self._decoder.finish()
        if self.stopped:
            return ""
        text = self._stops.push(self._decoder.finish())
        return text if self.stopped else text + self._stops.finish()


class StopText:
    """Feed every piece to push(); once `found` is set, or after finish(), nothing more comes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What may be shown. The stop string that begins first wins; of two at one place, the
        longer one."""
        text = self._held + piece
        places = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            place, _, self.found = min(places)
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, when the output ends without a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are a beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0
