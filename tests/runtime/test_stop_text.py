"""Stop strings in text that comes piece by piece."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.stop_text import OutputText, StopText

LETTERS = st.text(alphabet="ab", max_size=12)


def cut(text: str, stops: Sequence[str]) -> str:
    """The plain rule: up to the stop string that begins first."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_ends_where_the_first_complete_stop_string_begins(
    pieces: list[str], stops: list[str]
) -> None:
    finder, shown, read = StopText(stops), "", ""
    for piece in pieces:
        shown += finder.push(piece)
        read += piece
        if finder.found is not None:
            break
        assert not any(stop in read for stop in stops)
    else:
        shown += finder.finish()
    assert shown == cut(read, stops)
    assert (finder.found is not None) == any(stop in read for stop in stops)


@given(st.lists(LETTERS, max_size=8))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(pieces: list[str]) -> None:
    finder, shown, read = StopText(["abb"]), "", ""
    for piece in pieces:
        if "abb" in read + piece:
            return
        read += piece
        shown += finder.push(piece)
        held = read[len(shown) :]
        assert held in ("", "a", "ab") and read == shown + held


class Letters:
    """Token n is the n-th letter."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("step", [1, 2, 3, 26])
def test_the_token_that_completes_a_stop_string_is_the_last_one(step: int) -> None:
    text, shown, taken = OutputText(Letters(), ["fgh", "z"]), "", 0
    for start in range(0, 26, step):
        piece = text.push(range(start, min(26, start + step)))
        shown, taken = shown + piece.text, taken + piece.taken
        if piece.stopped:
            break
    assert (shown, taken, text.stopped) == ("abcde", 8, True)
    assert text.finish() == ""


def test_a_stop_string_that_only_begins_is_shown_at_the_end() -> None:
    text = OutputText(Letters(), ["cdx"])
    assert text.push([0, 1, 2, 3]) == ("ab", 4, False)
    assert text.finish() == "cd"
