"""What replay tests share: requests cut behind an output, and a local engine that takes them.

LocalEngine numbers and resolves users' requests, which were never cut: so here EngineCore is driven
itself.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import RequestFailed, TokensProduced
from rlt.runtime.executor import build_executor
from rlt.runtime.types import EngineRequest, Generation

from ..reference.answer import Ask
from ..reference.dense import DenseModel
from .asks import engine_request
from .engines import NOTHING, Given, Pair, held_by


class Core:
    """Prefill and decode on one EngineCore, stepped by the test."""

    def __init__(self, reference: DenseModel, **settings: Any) -> None:
        config = EngineConfig(**settings)
        self.executor = build_executor(config)
        self.core = EngineCore(
            self.executor, SchedulerConfig.from_engine(config), clock=SystemClock()
        )

    def answers(self, requests: Sequence[EngineRequest]) -> list[Given]:
        given = {request.generation: Given([], [], "none") for request in requests}
        for request in requests:
            self.core.add_local(request)
        while not self.core.idle():
            for event in self.core.step():
                if isinstance(event, RequestFailed):
                    given[event.generation] = Given([], [], event.code)
                if isinstance(event, TokensProduced):
                    tokens, depths, _ = given[event.generation]
                    reason = event.finish_reason
                    given[event.generation] = Given(
                        [*tokens, *event.token_ids],
                        [*depths, *event.exit_depths],
                        "none" if reason is None else reason.value,
                    )
            self.core.check()
            self.executor.wait(0.001)
        return [given[request.generation] for request in requests]

    def count(self, name: str) -> int:
        return self.core.statistics()[name]

    def at_rest(self) -> None:
        self.core.check()
        assert held_by(self.core.statistics()) == NOTHING

    def close(self) -> None:
        self.core.shutdown()


class Replaying:
    """One engine, or a pair of them, to which the same requests come whole and cut."""

    def __init__(self, where: str, reference: DenseModel, **settings: Any) -> None:
        kind = Core if where == "local" else Pair
        self.runner: Core | Pair = kind(reference, **settings)
        self._reference = reference
        self._numbered = 0

    def whole(self, asks: Sequence[Ask]) -> list[Given]:
        return self.runner.answers([self.request(ask) for ask in asks])

    def request(self, ask: Ask) -> EngineRequest:
        self._numbered += 1
        return engine_request(self._numbered, ask, self._reference)

    def cut(self, ask: Ask, whole: Given, outputs: int) -> EngineRequest:
        """The request as it comes again after so many outputs were delivered."""
        return msgspec.structs.replace(
            self.request(ask),
            delivered=tuple(whole.tokens[:outputs]),
            delivered_depths=tuple(whole.depths[:outputs]),
        )

    def second_use(self, request: EngineRequest) -> EngineRequest:
        self._numbered += 1
        return msgspec.structs.replace(request, generation=Generation(self._numbered))
