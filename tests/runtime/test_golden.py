"""Scheduler and device side together reproduce the reference outputs, however they are scheduled.

Two independent implementations agree on these tokens and exit depths (tests/golden/README.md).
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlt.runtime.config import EngineConfig
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.local import LocalEngine
from rlt.runtime.local_result import Result
from rlt.runtime.types import ExitParams, RequestId, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return content


def cases(name: str) -> list[dict[str, Any]]:
    """Those that this engine has: exit mode ouro, layout last_exited."""
    return [
        case
        for case in golden()[name]
        if case["layout"] == "last_exited" and case["exit_mode"] == "ouro"
    ]


CASES = {case["name"]: case for case in cases("cases")}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def engine(*, chunk_tokens: int = 64, num_slots: int = 16, num_blocks: int = 256) -> LocalEngine:
    config = EngineConfig(
        model=str(GOLDEN / "ckpt"),
        dtype="float32",
        device="cpu",
        block_size=16,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_receive_slots=0,
        chunk_tokens=chunk_tokens,
        threads=1,
    )
    return LocalEngine(config)


def requests(case: dict[str, Any], *, ignore_eos: bool = True) -> list[GenerateRequest]:
    exit_params = ExitParams(
        exit_threshold=case["exit_threshold"],
        min_loops=case["min_loops"],
        max_loops=case.get("max_loops"),
    )
    return [
        GenerateRequest(
            request_id=RequestId(f"{case.get('name', 'eos')}-{index}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=24, ignore_eos=ignore_eos),
            exit=exit_params,
        )
        for index, prompt in enumerate(golden()["prompts"])
    ]


def assert_equal(results: list[Result], expected: list[dict[str, Any]]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert list(result.token_ids) == reference["token_ids"], result.request_id
        assert list(result.exit_depths) == reference["exit_depths"], result.request_id
        if "finish_reason" in reference:
            assert result.finish_reason.value == reference["finish_reason"]


def assert_at_rest(local: LocalEngine) -> None:
    local.check()
    numbers = local.statistics()
    assert numbers["blocks_free"] == numbers["blocks_total"]
    assert numbers["live"] == 0


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[LocalEngine]:
    with engine() as local:
        yield local


@pytest.mark.parametrize("name", CASES)
def test_golden_outputs_alone(shared_engine: LocalEngine, name: str) -> None:
    results = [shared_engine.generate([request])[0] for request in requests(CASES[name])]
    assert_equal(results, CASES[name]["outputs"])
    assert_at_rest(shared_engine)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16, 64])
def test_golden_outputs_of_all_cases_batched_together(chunk_tokens: int) -> None:
    asked = [request for case in CASES.values() for request in requests(case)]
    expected = [output for case in CASES.values() for output in case["outputs"]]
    with engine(chunk_tokens=chunk_tokens) as local:
        assert_equal(local.generate(asked), expected)
        assert_at_rest(local)


def test_golden_outputs_in_a_pool_that_holds_few_requests_at_once() -> None:
    case = CASES["ouro_t0.5_min1"]
    with engine(chunk_tokens=16, num_slots=5, num_blocks=30) as local:
        longest_first = local.generate(requests(case)[::-1])
        assert_equal(longest_first[::-1], case["outputs"])
        assert local.statistics()["bypasses"], "no request passed another: the pool is too large"
        assert_at_rest(local)


@pytest.mark.parametrize("index", range(len(cases("eos"))))
def test_golden_outputs_end_with_eos(shared_engine: LocalEngine, index: int) -> None:
    case = cases("eos")[index]
    assert_equal(shared_engine.generate(requests(case, ignore_eos=False)), case["outputs"])


def test_seeded_draws_are_the_same_alone_batched_and_in_other_chunks(
    shared_engine: LocalEngine,
) -> None:
    sampling = SamplingParams(
        max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=5, ignore_eos=True, logprobs=2
    )
    asked = [
        msgspec.structs.replace(request, sampling=sampling)
        for request in requests(CASES["ouro_t0.5_min1"])
    ]
    alone = [shared_engine.generate([request])[0] for request in asked]
    with engine(chunk_tokens=7, num_slots=5) as local:
        batched = local.generate(asked)
    assert [r.token_ids for r in alone] == [r.token_ids for r in batched]
    assert [r.exit_depths for r in alone] == [r.exit_depths for r in batched]
    assert all(len(r.logprobs) == len(r.token_ids) for r in alone)
    greedy = CASES["ouro_t0.5_min1"]["outputs"]
    assert [list(r.token_ids) for r in alone] != [o["token_ids"][:12] for o in greedy]
