"""Colours for loops per token: from cool (few loops) to warm (all of them). Pure.

The scale is the 256-colour one that every terminal has had for decades. Nothing is coloured that
does not go to a terminal, unless the user insists; NO_COLOR is respected.
"""

import os
from collections import Counter
from collections.abc import Iterable
from typing import IO

SCALE = (39, 43, 77, 148, 220, 208, 203)  # blue, teal, green, lime, yellow, orange, red
RESET = "\x1b[0m"
DIM = "\x1b[2m"


def wants_colour(stream: IO[str], *, forced: bool) -> bool:
    return forced or (stream.isatty() and not os.environ.get("NO_COLOR"))


def painted(text: str, depth: int, num_loops: int) -> str:
    """Line ends stay outside, so that no colour runs on into what follows."""
    share = (min(depth, num_loops) - 1) / (num_loops - 1) if num_loops > 1 else 1.0
    start = f"\x1b[38;5;{SCALE[round(share * (len(SCALE) - 1))]}m"
    return "\n".join(f"{start}{part}{RESET}" if part else "" for part in text.split("\n"))


def dimmed(text: str, colour: bool) -> str:
    return f"{DIM}{text}{RESET}" if colour else text


def depth_counts(exit_depths: Iterable[int], num_loops: int, colour: bool) -> str:
    """How many tokens ran how many loops: the legend of an answer's colours."""
    counts = Counter(exit_depths)
    named = [(depth, f"{depth}×{counts[depth]}") for depth in sorted(counts)]  # noqa: RUF001
    return " ".join(painted(text, depth, num_loops) if colour else text for depth, text in named)
