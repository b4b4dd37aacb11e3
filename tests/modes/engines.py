"""Both ways to run a case's requests: a local engine, and a prefill and a decode engine over NIXL.

Each runs a batch to its end and tells what every request gave, in order. Engines stay alive from
one batch to the next, so that what a batch leaves behind meets the following one.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rlt.runtime.config import EngineConfig
from rlt.runtime.events import TokensProduced, Wait
from rlt.runtime.local import LocalEngine
from rlt.runtime.types import EngineRequest

from ..reference.answer import Ask
from ..reference.dense import DenseModel
from ..system.service import eventually
from ..system.two_engines import TwoEngines
from .asks import engine_request, user_request

HOLDS = ("live", "running", "leases_owner", "leases_pass", "leases_receive", "leases_send")
NOTHING = {**dict.fromkeys(HOLDS, 0), "blocks": 0}


def held_by(statistics: Mapping[str, Any]) -> dict[str, int]:
    """Blocks that hold cached pages alone count as free: they are granted when they are needed."""
    blocks = statistics["blocks_total"] - statistics["blocks_free"]
    return {**{name: statistics[name] for name in HOLDS}, "blocks": blocks}


class Given(NamedTuple):
    tokens: Sequence[int]
    depths: Sequence[int]
    finish: str


class Runner(Protocol):
    def run(self, asks: Sequence[Ask]) -> list[Given]: ...
    def count(self, name: str) -> int:
        """A counter's value, over every engine that has it."""
        ...

    def at_rest(self) -> None:
        """Nothing is held but what the prefix cache may keep."""
        ...

    def close(self) -> None: ...


class Local:
    def __init__(self, reference: DenseModel, **settings: Any) -> None:
        self._eos = reference.eos_token_id
        self._engine = LocalEngine(EngineConfig(**settings))

    def run(self, asks: Sequence[Ask]) -> list[Given]:
        requests = [user_request(number, ask, self._eos) for number, ask in enumerate(asks)]
        results = self._engine.generate(requests)
        for result in results:
            assert result.error is None, result.error
        return [Given(r.token_ids, r.exit_depths, r.finish_reason.value) for r in results]

    def count(self, name: str) -> int:
        value = self._engine.statistics()[name]
        assert isinstance(value, int)
        return value

    def at_rest(self) -> None:
        """A pass that ran ahead of the last token may still be in flight."""
        eventually(self._holds_nothing, lambda: str(self._engine.statistics()))
        self._engine.check()

    def _holds_nothing(self) -> bool:
        return held_by(self._engine.statistics()) == NOTHING

    def close(self) -> None:
        self._engine.shutdown()


class Pair:
    """Requests that D cannot reserve for yet wait here, as they would at the coordinator."""

    def __init__(self, reference: DenseModel, **settings: Any) -> None:
        self._reference = reference
        self.engines = TwoEngines(**settings)
        self._last = 0

    def run(self, asks: Sequence[Ask]) -> list[Given]:
        first = self._last + 1
        self._last += len(asks)
        return self.answers(
            [engine_request(first + n, ask, self._reference) for n, ask in enumerate(asks)]
        )

    def answers(self, requests: Sequence[EngineRequest]) -> list[Given]:
        waiting = deque(requests)
        while waiting:
            while waiting and self._start(waiting[0]):
                waiting.popleft()
            self.engines.step()
            self.engines.rest_a_moment()
        self.engines.settle()
        finished = {
            event.generation: event.finish_reason.value
            for event in self.engines.events
            if isinstance(event, TokensProduced) and event.finish_reason is not None
        }
        outcomes = [self.engines.outcomes[request.generation] for request in requests]
        return [
            Given(outcome.token_ids, outcome.exit_depths, finished[request.generation])
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    def _start(self, request: EngineRequest) -> bool:
        if isinstance(self.engines.d_core.reserve(request), Wait):
            return False
        self.engines.start(request)  # asks again and gets the same reservation
        return True

    def count(self, name: str) -> int:
        cores = (self.engines.p_core, self.engines.d_core)
        return sum(core.statistics()[name] for core in cores)

    def at_rest(self) -> None:
        for core in (self.engines.p_core, self.engines.d_core):
            core.check()
            assert held_by(core.statistics()) == NOTHING

    def close(self) -> None:
        self.engines.__exit__()
