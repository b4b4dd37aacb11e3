"""A rule taken out of the product is missed: the exploration finds what then goes wrong."""

import re

import pytest

from .bounds import BOUNDS
from .mutations import MUTATIONS
from .search import Search
from .traces import run_trace, tell
from .world import World


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_this_rule_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    mutation.patch(monkeypatch)
    found = Search(World(BOUNDS[mutation.bounds])).run().found
    assert found is not None, f"nobody misses the rule that {mutation.rule}"
    print(f"without the rule that {mutation.rule}:\n{tell(mutation.bounds, found)}")
    assert re.search(mutation.fault, found.fault)
    assert run_trace(BOUNDS[mutation.bounds], found.trace) == found.fault
