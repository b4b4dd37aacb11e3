"""When a token exits, as the design's table and example say, and when that is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.exit_policy import Next, exit_policy_for
from rlt.runtime.types import ExitMode, ExitSettings

SCORED: tuple[ExitMode, ...] = ("ouro", "ouro_delayed", "random_lookahead")


def exit_depth(settings: ExitSettings, scores: list[float], *, late: bool = False) -> int:
    """Loops that a token runs when loop r gives scores[r - 1], asked for as the engine does.

    late: a score is fed only when nothing can be submitted without it.
    """
    policy = exit_policy_for(settings)
    policy.start_token(1)
    unread: list[int] = []
    loops = 0
    while (after := policy.after(loops)) is not Next.EXIT:
        if after is Next.LOOP:
            loops += 1
            unread += [loop for loop in [loops] if policy.wants_score(loop)]
        if unread and (after is Next.WAIT or not late):
            policy.feed(unread[0], scores[unread.pop(0) - 1])
        else:
            assert after is Next.LOOP, "waits for a score that was never asked for"
    return loops


def settings_of(mode: ExitMode, threshold: float, low: int, high: int) -> ExitSettings:
    return ExitSettings(threshold, low, high, mode)


@pytest.mark.parametrize(("mode", "depth"), [("ouro", 2), ("ouro_delayed", 3)])
def test_the_designs_example(mode: ExitMode, depth: int) -> None:
    assert exit_depth(settings_of(mode, 0.5, 2, 4), [0.3, 0.3, 0.3, 0.3]) == depth


@pytest.mark.parametrize(
    ("settings", "scores", "depth"),
    [
        (ExitSettings(0.5, 1, 4), [0.5, 0, 0, 0], 1),  # reaching the threshold is enough
        (ExitSettings(0.5, 2, 4), [0.9, 0.0, 0, 0], 2),  # loops before min_loops count
        (ExitSettings(0.5, 1, 3), [0.1, 0.1, 0.1, 0.9], 3),  # max_loops caps
        (ExitSettings(1.0, 1, 4), [1.0, 1.0, 1.0, 1.0], 4),  # 1 never exits early
        (ExitSettings(0.0, 3, 4), [0.0, 0.0, 0.0, 0.0], 3),  # 0 exits at min_loops
        (ExitSettings(0.99, 1, 4), [0.9, 0.9, 0.0, 0.0], 2),  # 1 - 0.1 * 0.1, rounded in double
        (settings_of("ouro_delayed", 0.5, 1, 4), [0.5, 0, 0, 0], 2),
        (settings_of("ouro_delayed", 0.5, 2, 4), [0.9, 0, 0, 0], 3),  # min_loops bounds the signal
        (settings_of("ouro_delayed", 0.5, 1, 2), [0.9, 0.9, 0, 0], 2),  # max_loops caps
        (settings_of("ouro_delayed", 1.0, 1, 4), [1.0, 1.0, 1.0, 1.0], 4),
        (settings_of("ouro_delayed", 0.0, 1, 4), [0.0, 0.0, 0.0, 0.0], 2),
        (settings_of("ouro_delayed", 0.5, 4, 4), [1.0, 1.0, 1.0, 1.0], 4),
        (settings_of("random_lookahead", 0.5, 1, 4), [0.4, 0.4, 0.4, 0.4], 4),  # no product
        (settings_of("random_lookahead", 0.5, 1, 4), [0.4, 0.5, 0.0, 0.0], 3),
        (settings_of("random_lookahead", 0.5, 2, 4), [0.9, 0.0, 0.0, 0.0], 4),  # before min_loops
        (settings_of("random_lookahead", 1.0, 1, 4), [1.0, 1.0, 1.0, 1.0], 4),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_exit_depth(settings: ExitSettings, scores: list[float], depth: int, late: bool) -> None:
    assert exit_depth(settings, scores, late=late) == depth


def test_trace_gives_each_output_its_depth_and_reads_no_gate() -> None:
    policy = exit_policy_for(ExitSettings(0.5, 1, 4, "trace", (4, 1, 3)))
    for output_index, depth in ((1, 1), (2, 3)):
        policy.start_token(output_index)
        follows = [policy.after(loops) for loops in range(1, depth + 1)]
        assert follows == [Next.LOOP] * (depth - 1) + [Next.EXIT]
        assert not any(policy.wants_score(loop) for loop in range(1, 5))


def test_the_product_starts_again_with_every_token() -> None:
    policy = exit_policy_for(ExitSettings(0.5, 1, 4))
    for output_index in (1, 2):
        policy.start_token(output_index)
        policy.feed(1, 0.3)
        assert policy.after(1) is Next.LOOP
        policy.feed(2, 0.3)
        assert policy.after(2) is Next.EXIT


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (ExitSettings(0.5, 2, 4), [1, 2, 3]),  # not at the cap: it exits there anyway
        (ExitSettings(1.0, 1, 4), []),
        (ExitSettings(0.0, 2, 4), []),
        (ExitSettings(0.5, 3, 3), []),
        (settings_of("ouro_delayed", 0.5, 2, 4), [1, 2]),  # loop 3's signal would exit at the cap
        (settings_of("ouro_delayed", 0.5, 3, 4), []),
        (settings_of("random_lookahead", 0.5, 2, 4), [2]),  # loops before min_loops say nothing
    ],
)
def test_scores_are_asked_for_only_where_they_can_matter(
    settings: ExitSettings, wanted: list[int]
) -> None:
    policy = exit_policy_for(settings)
    assert [loop for loop in range(1, settings.max_loops + 1) if policy.wants_score(loop)] == wanted


@pytest.mark.parametrize(
    ("mode", "unread"),
    [
        ("ouro", [Next.LOOP, Next.WAIT]),  # loop 1 is below min_loops, loop 2 may be the last
        ("ouro_delayed", [Next.LOOP, Next.LOOP, Next.WAIT]),
        ("random_lookahead", [Next.LOOP, Next.LOOP, Next.WAIT]),
    ],
)
def test_what_is_known_before_any_score_is_read(mode: ExitMode, unread: list[Next]) -> None:
    policy = exit_policy_for(settings_of(mode, 0.5, 2, 4))
    policy.start_token(1)
    assert [policy.after(loops) for loops in range(1, len(unread) + 1)] == unread


@given(
    scores=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    threshold=st.floats(0, 1),
    bounds=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    mode=st.sampled_from(SCORED),
    late=st.booleans(),
)
def test_unasked_and_late_scores_never_change_the_depth(
    scores: list[float], threshold: float, bounds: list[int], mode: ExitMode, late: bool
) -> None:
    low, high = bounds
    survival, expected = 1.0, high
    for loop, score in enumerate(scores, start=1):
        survival *= 1.0 - score
        signal = score if mode == "random_lookahead" else 1.0 - survival
        if threshold < 1 and loop >= low and signal >= threshold:
            expected = min(loop if mode == "ouro" else loop + 1, high)
            break
    assert exit_depth(settings_of(mode, threshold, low, high), scores, late=late) == expected
