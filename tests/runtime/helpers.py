"""Requests and drivers that several tests of the engine share."""

from collections.abc import Iterable, Sequence
from typing import Any

from rlt.runtime.config import SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import EngineEvent, Released, RequestFailed, TokensProduced
from rlt.runtime.types import (
    EngineRequest,
    ExitMode,
    ExitSettings,
    FinishReason,
    Generation,
    SamplingParams,
)

from .simulated_executor import Clock, SimulatedExecutor


def engine_request(
    generation: int,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    threshold: float = 0.5,
    min_loops: int = 2,
    max_loops: int = 4,
    ignore_eos: bool = True,
    stop: tuple[int, ...] = (),
    mode: ExitMode = "ouro",
    trace: tuple[int, ...] = (),
    priority: int = 0,
) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=3, ignore_eos=ignore_eos, stop_token_ids=stop
    )
    return EngineRequest(
        generation=Generation(generation),
        prompt=tuple(prompt),
        sampling=sampling,
        exit=ExitSettings(threshold, min_loops, max_loops, mode, trace),
        priority=priority,
    )


def local_core(
    executor: SimulatedExecutor,
    *,
    chunk_tokens: int = 4,
    mixed_batches: bool = False,
    **more: Any,
) -> EngineCore:
    config = SchedulerConfig(chunk_tokens=chunk_tokens, mixed_batches=mixed_batches, **more)
    return EngineCore(executor, config, clock=Clock())


def drain(core: EngineCore, limit: int = 5000) -> list[EngineEvent]:
    """Step until nothing lives; every step leaves sound books."""
    events: list[EngineEvent] = []
    for _ in range(limit):
        events += core.step()
        core.check()
        if core.idle():
            return events
    raise AssertionError(f"still live after {limit} steps: {core.live()}")


class Outcome:
    """What one generation gave, checked for order as it comes in."""

    def __init__(self, first: int = 0) -> None:
        self.first = first  # index of the first output that is told
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.released = 0

    @property
    def result(self) -> tuple[list[int], list[int], FinishReason | None]:
        return self.tokens, self.depths, self.finish


def outcomes(
    events: Iterable[EngineEvent], replayed: Iterable[EngineRequest] = ()
) -> dict[Generation, Outcome]:
    """replayed: requests whose first outputs were delivered before."""
    behind = {request.generation: len(request.delivered) for request in replayed}
    found: dict[Generation, Outcome] = {}
    for event in events:
        outcome = found.setdefault(event.generation, Outcome(behind.get(event.generation, 0)))
        assert not outcome.released, f"{event} came after Released"
        match event:
            case TokensProduced():
                assert outcome.finish is None and outcome.error is None
                assert event.start_index == outcome.first + len(outcome.tokens)
                outcome.tokens += event.token_ids
                outcome.depths += event.exit_depths
                outcome.finish = event.finish_reason
            case RequestFailed():
                assert outcome.finish is None and outcome.error is None
                outcome.error = event.code
            case Released():
                outcome.released += 1
            case _:
                pass
    return found


def alone(request: EngineRequest) -> tuple[list[int], list[int], FinishReason | None]:
    """What the request gives in an engine of its own."""
    core = local_core(SimulatedExecutor(num_blocks=400), chunk_tokens=5)
    core.add_local(request)
    return outcomes(drain(core))[request.generation].result


def at_rest(core: EngineCore) -> None:
    """Nothing is held: every block, slot and lease is back or quarantined."""
    core.check()
    numbers = core.statistics()
    assert numbers["blocks_free"] + numbers["blocks_quarantined"] == numbers["blocks_total"]
    held = ("owner", "pass", "receive", "send")
    assert [numbers[f"leases_{name}"] for name in held] == [0, 0, 0, 0]
    assert numbers["live"] == numbers["running"] == 0
