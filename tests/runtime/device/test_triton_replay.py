"""Replay on Triton kernels: chunks in which some positions have ended, interpreted or on a GPU."""

from collections.abc import Sequence
from typing import Any

import pytest

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.executor import build_executor
from rlt.runtime.types import EngineRequest, ExitSettings, Generation, SamplingParams

from ..helpers import Outcome, outcomes
from .checkpoints import CKPT, golden_json
from .test_triton_engine import DEVICES

TOKENS = 6


def run(requests: Sequence[EngineRequest], **settings: Any) -> list[Outcome]:
    config = EngineConfig(
        model=str(CKPT), dtype="float32", num_blocks=256, num_receive_slots=0, **settings
    )
    executor = build_executor(config)
    core = EngineCore(executor, SchedulerConfig.from_engine(config), clock=SystemClock())
    try:
        for request in requests:
            core.add_local(request)
        events = []
        while not core.idle():
            events += core.step()
            executor.wait(0.01)
    finally:
        core.shutdown()
    ended = outcomes(events, requests)
    return [ended[request.generation] for request in requests]


def cut_request(
    generation: int, case: dict[str, Any], prompt: list[int], output: dict[str, Any], cut: int
) -> EngineRequest:
    depths = output["exit_depths"]
    return EngineRequest(
        generation=Generation(generation),
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0),
        exit=ExitSettings(
            threshold=case["exit_threshold"] or 0.0,
            min_loops=case["min_loops"] or 1,
            max_loops=case["max_loops"] or depths[0],
            mode=case["exit_mode"],
            trace=tuple(depths[:TOKENS]) if case["exit_mode"] == "trace" else (),
        ),
        delivered=tuple(output["token_ids"][:cut]),
        delivered_depths=tuple(depths[:cut]),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ouro_t0.5_min1", "last_exited"),
        pytest.param("trace", "shared", marks=pytest.mark.soak),
    ],
)
def test_the_golden_outputs_stand_behind_a_cut(name: str, layout: str, device: str) -> None:
    golden = golden_json()
    case = next(c for c in golden["cases"] if (c["name"], c["layout"]) == (name, layout))
    asked = [(golden["prompts"][index], case["outputs"][index]) for index in (1, 4)]
    requests = [
        cut_request(number + 1, case, prompt, output, cut)
        for number, ((prompt, output), cut) in enumerate(zip(asked, (4, 3), strict=True))
    ]
    settings = {"device": device, "backend": "triton", "layout": layout, "block_size": 12}
    for request, given, (_, output) in zip(
        requests, run(requests, chunk_tokens=8, **settings), asked, strict=True
    ):
        behind = slice(len(request.delivered), TOKENS)
        assert given.error is None
        assert given.tokens == output["token_ids"][behind]
        assert given.depths == output["exit_depths"][behind]
