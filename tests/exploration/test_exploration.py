"""Every history within the bounds: nothing is written where it must not be, everything ends."""

import pytest

from .bounds import BOUNDS, EVERY_RUN, SOAK
from .search import Explored, Search
from .traces import tell
from .world import World

SOAK_S = 300.0  # of computing, for each of the wider bounds


def explore(name: str, max_s: float = 1e9) -> Explored:
    explored = Search(World(BOUNDS[name])).run(max_s=max_s)
    print(f"{name}: {explored.line()}")  # docs/exploration.md is made of these lines
    assert explored.found is None, tell(name, explored.found)
    return explored


@pytest.mark.parametrize("name", EVERY_RUN)
def test_no_history_within_the_bounds_goes_wrong(name: str) -> None:
    assert explore(name).complete


@pytest.mark.soak
@pytest.mark.timeout(10 * SOAK_S)
@pytest.mark.parametrize("name", SOAK)
def test_no_history_within_wider_bounds_goes_wrong(name: str) -> None:
    explore(name, SOAK_S)
