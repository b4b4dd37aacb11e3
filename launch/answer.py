"""Writes one streamed answer to a terminal or a file, and what can be said about it at its end.

Owns the number of loops by which it colours: the first token always runs all of them. A piece of
text has the colour of the token that completed it.
"""

import sys
from collections.abc import Sequence
from typing import IO

from ..runtime.interfaces import Delta
from ..runtime.types import FinishReason
from .depth_colours import painted
from .timeline import draw_events, draw_handoff


class AnswerWriter:
    def __init__(self, out: IO[str], *, colour: bool) -> None:
        self._out = out
        self._colour = colour
        self._last_depth = 0
        self.num_loops = 0
        self.open_line = False

    def piece(self, delta: Delta) -> None:
        if delta.exit_depths:
            self.num_loops = self.num_loops or delta.exit_depths[0]
            self._last_depth = delta.exit_depths[-1]
        if not delta.text:
            return
        shown = delta.text
        if self._colour and self._last_depth:
            shown = painted(delta.text, self._last_depth, self.num_loops)
        self._out.write(shown)
        self._out.flush()
        self.open_line = not delta.text.endswith("\n")

    def end(self) -> None:
        self._out.write("\n")
        self._out.flush()
        self.open_line = False


def show_end(deltas: Sequence[Delta], *, depths: bool, timeline: bool) -> None:
    if deltas[-1].finish_reason is FinishReason.LENGTH:
        print("(cut at --max-tokens)", file=sys.stderr)
    if depths:
        print(depth_line([depth for delta in deltas for depth in delta.exit_depths]))
    if timeline:
        stamps = deltas[-1].timeline
        print("\n".join([*draw_events(stamps), *draw_handoff(stamps)]))


def depth_line(exit_depths: Sequence[int]) -> str:
    """The first token's depth stands apart: it comes from the prompt, which runs every loop."""
    later = exit_depths[1:]
    mean = f", mean {sum(later) / len(later):.2f} after the first" if later else ""
    return f"exit depths: {' '.join(map(str, exit_depths))}{mean}"
