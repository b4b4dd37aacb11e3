"""Scheduler and device side together reproduce the reference outputs, however they are scheduled.

Two independent implementations agree on these tokens and exit depths (tests/golden/README.md).
"""

import itertools
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
from rlt.runtime.types import ExitParams, KVLayout, RequestId, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"


LAYOUTS: tuple[KVLayout, ...] = ("last_exited", "shared")


@cache
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return content


def cases(layout: KVLayout, kind: str = "cases") -> list[dict[str, Any]]:
    return [case for case in golden()[kind] if case["layout"] == layout]


def case(name: str, layout: KVLayout = "last_exited") -> dict[str, Any]:
    return next(case for case in cases(layout) if case["name"] == name)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def engine(**changes: Any) -> LocalEngine:
    fields = {"chunk_tokens": 64, "num_slots": 16, "num_blocks": 256, **changes}
    config = EngineConfig(
        model=str(GOLDEN / "ckpt"),
        dtype="float32",
        device="cpu",
        block_size=16,
        num_receive_slots=0,
        threads=1,
        **fields,
    )
    return LocalEngine(config)


def requests(case: dict[str, Any], *, ignore_eos: bool = True) -> list[GenerateRequest]:
    traces = golden()["traces"] if case["exit_mode"] == "trace" else itertools.repeat(None)
    return [
        GenerateRequest(
            request_id=RequestId(f"{case.get('name', 'eos')}-{index}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=24, ignore_eos=ignore_eos),
            exit=ExitParams(
                exit_mode=case["exit_mode"],
                trace=None if trace is None else tuple(trace),
                exit_threshold=case["exit_threshold"],
                min_loops=case["min_loops"],
                max_loops=case.get("max_loops"),
            ),
        )
        for index, (prompt, trace) in enumerate(zip(golden()["prompts"], traces, strict=False))
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


def assert_batched(asked_cases: list[dict[str, Any]], **settings: Any) -> None:
    """All requests of all cases at once give the reference's outputs."""
    asked = [request for case in asked_cases for request in requests(case)]
    expected = [output for case in asked_cases for output in case["outputs"]]
    with engine(**settings) as local:
        assert_equal(local.generate(asked), expected)
        assert_at_rest(local)


@pytest.fixture(scope="module")
def one_engine() -> Iterator[LocalEngine]:
    with engine() as local:
        yield local


@pytest.mark.soak  # those that run however they are scheduled run in every run
@pytest.mark.parametrize("name", [case["name"] for case in cases("last_exited")])
def test_golden_outputs_alone(one_engine: LocalEngine, name: str) -> None:
    results = [one_engine.generate([request])[0] for request in requests(case(name))]
    assert_equal(results, case(name)["outputs"])
    assert_at_rest(one_engine)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case["name"], marks=() if index % 5 == 0 else pytest.mark.soak)
        for index, case in enumerate(cases("shared"))
    ],
)
def test_golden_outputs_of_layout_shared_alone(name: str) -> None:
    with engine(layout="shared", async_scheduling=True) as local:
        asked = requests(case(name, "shared"))
        assert_equal([local.generate([r])[0] for r in asked], case(name, "shared")["outputs"])


@pytest.mark.parametrize(
    "chunk_tokens",
    [pytest.param(n, marks=() if n == 7 else pytest.mark.soak) for n in (1, 3, 7, 16, 64)],
)
def test_golden_outputs_of_all_cases_in_chunks(chunk_tokens: int) -> None:
    assert_batched(cases("last_exited"), chunk_tokens=chunk_tokens)


SCHEDULING = [
    (layout, ahead, refill, mixed)
    for layout in LAYOUTS
    for ahead in (False, True)
    for refill in (True, False)
    for mixed in (True, False)
]
# Every pair of values of two different settings is among these.
SAMPLED = [
    ("last_exited", False, True, True),
    ("last_exited", True, False, False),
    ("last_exited", True, True, True),
    ("last_exited", False, False, False),
    ("shared", True, True, False),
    ("shared", False, False, True),
]


@pytest.mark.parametrize(
    ("layout", "ahead", "refill", "mixed"),
    [
        pytest.param(*values, marks=() if values in SAMPLED else pytest.mark.soak)
        for values in SCHEDULING
    ],
)
def test_golden_outputs_of_all_cases_however_they_are_scheduled(
    layout: KVLayout, ahead: bool, refill: bool, mixed: bool
) -> None:
    assert_batched(
        cases(layout),
        layout=layout,
        async_scheduling=ahead,
        refill=refill,
        mixed_batches=mixed,
        chunk_tokens=32,
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_golden_outputs_in_a_pool_that_holds_few_requests_at_once(ahead: bool) -> None:
    few = case("ouro_t0.5_min1")
    with engine(chunk_tokens=16, num_slots=5, num_blocks=30, async_scheduling=ahead) as local:
        longest_first = local.generate(requests(few)[::-1])
        assert_equal(longest_first[::-1], few["outputs"])
        assert local.statistics()["bypasses"], "no request passed another: the pool is too large"
        assert_at_rest(local)


@pytest.mark.parametrize("ahead", [False, True])
def test_golden_outputs_end_with_eos(ahead: bool) -> None:
    with engine(async_scheduling=ahead) as local:
        for ended in cases("last_exited", "eos"):
            assert_equal(local.generate(requests(ended, ignore_eos=False)), ended["outputs"])
        assert_at_rest(local)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_depths_of_the_random_head_do_not_depend_on_scheduling(layout: KVLayout) -> None:
    settings = ExitParams(exit_mode="random_lookahead", exit_threshold=0.5, min_loops=1)
    asked = [
        msgspec.structs.replace(request, exit=settings) for request in requests(case("fixed4"))
    ]

    def answers(**changes: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        with engine(layout=layout, **changes) as local:
            results = local.generate(asked)
            assert_at_rest(local)
        return [(result.token_ids, result.exit_depths) for result in results]

    plain = answers()
    assert {depth for _, depths in plain for depth in depths[1:]} == {2, 3, 4}
    assert answers(async_scheduling=True, chunk_tokens=7, num_slots=5) == plain
    assert answers(refill=False, mixed_batches=False) == plain
    assert answers(random_head_seed=1) != plain


@pytest.mark.parametrize("ahead", [False, True])
def test_seeded_draws_are_the_same_alone_batched_and_in_other_chunks(
    one_engine: LocalEngine, ahead: bool
) -> None:
    sampling = SamplingParams(
        max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=5, ignore_eos=True, logprobs=2
    )
    asked = [
        msgspec.structs.replace(request, sampling=sampling)
        for request in requests(case("ouro_t0.5_min1"))
    ]
    alone = [one_engine.generate([request])[0] for request in asked]
    with engine(chunk_tokens=7, num_slots=5, async_scheduling=ahead) as local:
        batched = local.generate(asked)
    assert [r.token_ids for r in alone] == [r.token_ids for r in batched]
    assert [r.exit_depths for r in alone] == [r.exit_depths for r in batched]
    assert all(len(r.logprobs) == len(r.token_ids) for r in alone)
    greedy = case("ouro_t0.5_min1")["outputs"]
    assert [list(r.token_ids) for r in alone] != [o["token_ids"][:12] for o in greedy]
