"""When a token exits, as the design's table and example say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.exit_policy import exit_policy_for
from rlt.runtime.types import ExitSettings


def exit_depth(settings: ExitSettings, hazards: list[float]) -> int:
    """Loops that a token runs when the gate gives `hazards`; asks for scores as the engine does."""
    policy = exit_policy_for(settings)
    policy.start_token(1)
    for loop, hazard in enumerate(hazards, start=1):
        if policy.exits_after(loop, hazard if policy.wants_score(loop) else None):
            return loop
    raise AssertionError("never exited")


def test_the_designs_example_exits_at_two() -> None:
    assert exit_depth(ExitSettings(0.5, 2, 4), [0.3, 0.3, 0.3, 0.3]) == 2


@pytest.mark.parametrize(
    ("settings", "hazards", "depth"),
    [
        (ExitSettings(0.5, 1, 4), [0.5, 0, 0, 0], 1),  # reaching the threshold is enough
        (ExitSettings(0.5, 2, 4), [0.9, 0.0, 0, 0], 2),  # loops before min_loops count
        (ExitSettings(0.5, 1, 3), [0.1, 0.1, 0.1, 0.9], 3),  # max_loops caps
        (ExitSettings(1.0, 1, 4), [1.0, 1.0, 1.0, 1.0], 4),  # 1 never exits early
        (ExitSettings(0.0, 3, 4), [0.0, 0.0, 0.0, 0.0], 3),  # 0 exits at min_loops
        (ExitSettings(0.99, 1, 4), [0.9, 0.9, 0.0, 0.0], 2),  # 1 - 0.1 * 0.1, rounded in double
    ],
)
def test_exit_depth(settings: ExitSettings, hazards: list[float], depth: int) -> None:
    assert exit_depth(settings, hazards) == depth


def test_threshold_one_never_exits_early_even_if_a_score_of_one_is_fed() -> None:
    policy = exit_policy_for(ExitSettings(1.0, 1, 4))
    assert [policy.exits_after(loop, 1.0) for loop in range(1, 5)] == [False, False, False, True]


def test_the_product_starts_again_with_every_token() -> None:
    policy = exit_policy_for(ExitSettings(0.5, 1, 4))
    assert [policy.exits_after(1, 0.3), policy.exits_after(2, 0.3)] == [False, True]
    policy.start_token(2)
    assert [policy.exits_after(1, 0.3), policy.exits_after(2, 0.3)] == [False, True]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (ExitSettings(0.5, 2, 4), [1, 2, 3]),  # not at the cap: it exits there anyway
        (ExitSettings(1.0, 1, 4), []),
        (ExitSettings(0.0, 2, 4), []),
        (ExitSettings(0.5, 3, 3), []),
    ],
)
def test_scores_are_asked_for_only_where_they_can_matter(
    settings: ExitSettings, wanted: list[int]
) -> None:
    policy = exit_policy_for(settings)
    assert [loop for loop in range(1, settings.max_loops + 1) if policy.wants_score(loop)] == wanted


@given(
    hazards=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    threshold=st.floats(0, 1),
    bounds=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_unasked_scores_never_change_the_depth(
    hazards: list[float], threshold: float, bounds: list[int]
) -> None:
    settings = ExitSettings(threshold, bounds[0], bounds[1])
    survival, expected = 1.0, bounds[1]
    for loop, hazard in enumerate(hazards, start=1):
        survival *= 1.0 - hazard
        if threshold < 1 and loop >= bounds[0] and 1.0 - survival >= threshold:
            expected = min(loop, bounds[1])
            break
    assert exit_depth(settings, hazards) == expected
