"""How large the explored world is: requests, workers, pools, and which faults may happen how often.

Frozen. A bound is part of what the exploration says: "holds for all histories within it".
"""

from functools import cache
from typing import Any

import msgspec

from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import (
    EngineRequest,
    ExitParams,
    ExitSettings,
    Generation,
    RequestId,
    SamplingParams,
)

from ..runtime.oracle import oracle

NUM_LOOPS = 2
FAULTS = (
    *("lose", "double", "swap", "early", "cancel", "deadline", "kill", "stop", "fail", "silent"),
    "late",
)


class Pool(msgspec.Struct, frozen=True):
    blocks: int
    slots: int = 1
    receive_slots: int = 1


def ask(name: str, prompt: tuple[int, ...] = (3, 5), max_tokens: int = 2) -> GenerateRequest:
    """One loop per token after the first, so that a token costs few steps."""
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        exit=ExitParams(exit_threshold=1.0, min_loops=1, max_loops=1),
    )


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """faults: kind -> how often at most; together: of all kinds. rounds: how often time may pass
    while nothing else can happen before it is only looked at how all would end. victims: whom what
    befalls a worker may befall (none named: every one). at_once: requests do not wait for one
    another.

    delays None: every order of events. Else what could happen next happens in one fixed order, and
    so often something is put off until nothing else can happen.
    """

    requests: tuple[GenerateRequest, ...] = (ask("a"),)
    at_once: bool = False
    workers: tuple[str, ...] = ("P1.1", "D1.1")
    spares: tuple[str, ...] = ()  # incarnations that are started after another of the name ended
    prefill: Pool = Pool(4, receive_slots=0)
    decode: Pool = Pool(4)
    block_size: int = 2
    chunk_tokens: int = 2
    max_inflight_bytes: int = 1 << 20
    max_attempts: int = 2
    max_quarantined: float = 1.0
    faults: tuple[tuple[str, int], ...] = ()
    together: int = 0
    victims: tuple[str, ...] = ()
    rounds: int = 0
    delays: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of every process: the coordinator, the client, the workers."""
        return ("C", "K", *self.workers, *self.spares)

    def right_tokens(self, name: str) -> list[int]:
        return list(_right_tokens(next(r for r in self.requests if r.request_id == name)))


@cache
def _right_tokens(asked: GenerateRequest) -> tuple[int, ...]:
    return tuple(oracle(engine_request(asked), num_loops=NUM_LOOPS)[0])


def engine_request(asked: GenerateRequest) -> EngineRequest:
    assert asked.prompt_token_ids is not None
    return EngineRequest(
        generation=Generation(1),
        prompt=asked.prompt_token_ids,
        sampling=msgspec.structs.replace(asked.sampling, seed=7),
        exit=ExitSettings(1.0, 1, 1),
    )


_TWO = (ask("a"), ask("b"))
_AGAIN = ("P1.2", "D1.2")  # a killed worker is started again
_TWO_P = ("P1.1", "P2.1", "D1.1")
_TWO_D = ("P1.1", "D1.1", "D2.1")


def _with(*kinds: str, together: int = 1, requests: int = 1, **more: Any) -> Bounds:
    return Bounds(
        faults=tuple((kind, together) for kind in kinds),
        together=together,
        requests=_TWO[:requests],
        **more,
    )


_HIT_P: dict[str, Any] = {"workers": _TWO_P, "victims": ("P1.1",), "delays": 1}
_HIT_D: dict[str, Any] = {"workers": _TWO_D, "victims": ("D1.1",), "delays": 1}
_EVERY_ORDER = {
    "plain": _with(requests=2),
    **{kind: _with(kind) for kind in ("lose", "double", "swap", "cancel")},
    "fail": _with("fail", spares=_AGAIN, max_quarantined=0.5),
}
_ONE_DELAY = {
    **{kind: _with(kind, delays=1) for kind in ("early", "deadline")},
    **{f"{kind} p": _with(kind, **_HIT_P) for kind in ("kill", "stop", "silent", "late")},
    **{f"{kind} d": _with(kind, **_HIT_D) for kind in ("kill", "stop", "silent")},
}
_SPARES = ("P1.2", "P1.3", "D1.2", "D1.3")
EVERY_RUN = {**_EVERY_ORDER, **_ONE_DELAY}
SOAK = {
    **{
        f"{name}, 3 delays": msgspec.structs.replace(bounds, delays=3)
        for name, bounds in _ONE_DELAY.items()
    },
    "any two": _with(*FAULTS, together=2, delays=0, spares=_SPARES, max_quarantined=0.5),
    "any one, 1 delay": _with(*FAULTS, delays=1, spares=_AGAIN, max_quarantined=0.5, requests=2),
}
BOUNDS = {**EVERY_RUN, **SOAK}
