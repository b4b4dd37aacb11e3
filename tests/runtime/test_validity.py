"""Which positions may be read: a token's stand in a plane once no later loop changes them."""

import pytest

from rlt.runtime.config import SchedulerConfig
from rlt.runtime.kv_manager import KVManager
from rlt.runtime.request import Role
from rlt.runtime.scheduler import Scheduler
from rlt.runtime.types import Generation, KVLayout

from .helpers import engine_request
from .simulated_executor import Clock, SimulatedExecutor

G = Generation(1)
TRACE = (4, 2, 1, 4)


class Steps:
    """A scheduler whose KV manager can be looked at between passes."""

    def __init__(self, layout: KVLayout, max_in_flight: int) -> None:
        self.executor = SimulatedExecutor(layout=layout)
        geometry = self.executor.capabilities().geometry
        self.kv = KVManager(num_blocks=40, geometry=geometry)
        self.scheduler = Scheduler(
            SchedulerConfig(chunk_tokens=8, max_in_flight=max_in_flight),
            kv=self.kv,
            slots=self.executor,
            geometry=geometry,
            limits=self.executor.admission_limits(),
            eos_token_ids=(),
            clock=Clock(),
        )
        self.executor.one_by_one = True
        self.planes = geometry.num_planes
        request = engine_request(1, (1, 2), max_tokens=4, mode="trace", trace=TRACE)
        self.scheduler.add(request, Role.LOCAL)
        self.scheduler.admit()

    def valid_after_each_pass(self) -> list[tuple[int, ...]]:
        """Valid positions per plane, where a pass changed them."""
        found: list[tuple[int, ...]] = []
        while not self.scheduler.idle():
            while (plan := self.scheduler.schedule()) is not None:
                self.executor.submit(plan)
            valid = tuple(self.kv.valid_tokens(G, plane) for plane in range(self.planes))
            if valid not in found:
                found.append(valid)
            for output in self.executor.collect():
                self.scheduler.update_from_output(output)
        return found


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_in_layout_shared_a_position_is_valid_once_its_token_has_exited(max_in_flight: int) -> None:
    steps = Steps("shared", max_in_flight)
    assert steps.valid_after_each_pass() == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_in_layout_last_exited_deeper_planes_are_valid_with_the_coda(max_in_flight: int) -> None:
    prompt = [(0, 0, 0, 0), (2, 0, 0, 0), (2, 2, 0, 0), (2, 2, 2, 0), (2, 2, 2, 2)]
    second = [(3, 2, 2, 2), (3, 3, 2, 2), (3, 3, 3, 3)]
    third = [(4, 3, 3, 3), (4, 4, 4, 4)]
    last = [(5, 4, 4, 4), (5, 5, 4, 4), (5, 5, 5, 4), (5, 5, 5, 5)]
    steps = Steps("last_exited", max_in_flight)
    assert steps.valid_after_each_pass() == [*prompt, *second, *third, *last]
