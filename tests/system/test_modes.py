"""The golden outputs of every exit mode and both layouts, through whole services."""

import json
from typing import Any

import pytest

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import ExitParams, RequestId, SamplingParams

from .service import GOLDEN, eventually, running

pytestmark = pytest.mark.system
DATA: dict[str, Any] = json.loads((GOLDEN.parent / "golden.json").read_text())
ON = "on"


def answers(client: Client, case: dict[str, Any]) -> list[dict[str, list[int]]]:
    """All prompts of one golden case at once."""
    outputs: list[dict[str, list[int]]] = []
    for number, prompt in enumerate(DATA["prompts"]):
        outputs.append({"token_ids": [], "exit_depths": []})
        traced = case["exit_mode"] == "trace"
        client.submit(
            GenerateRequest(
                request_id=RequestId(str(number)),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=DATA["max_tokens"], ignore_eos=True),
                exit=ExitParams(
                    exit_mode=case["exit_mode"],
                    exit_threshold=None if traced else case["exit_threshold"],
                    min_loops=case["min_loops"],
                    max_loops=case["max_loops"],
                    trace=tuple(DATA["traces"][number]) if traced else None,
                ),
                priority=number % 3,
            )
        )
    unfinished = len(outputs)
    while unfinished:
        deltas = client.outputs(timeout_s=60.0)
        assert deltas, "nothing came"
        for delta in deltas:
            assert delta.error is None, delta
            outputs[int(delta.request_id)]["token_ids"] += delta.token_ids
            outputs[int(delta.request_id)]["exit_depths"] += delta.exit_depths
            unfinished -= delta.finish_reason is not None
    return outputs


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(
            "last_exited",
            ("--async-scheduling", ON, "--prefix-cache", ON),
            marks=pytest.mark.soak,
        ),
        ("shared", ("--async-scheduling", ON, "--refill", "off")),
        pytest.param(
            "last_exited",
            ("--admission", "incremental", "--num-blocks", "96"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "shared",
            ("--admission", "incremental", "--num-blocks", "24", "--prefix-cache", ON),
            marks=pytest.mark.soak,
        ),
    ],
)
@pytest.mark.timeout(400)
def test_every_golden_case_comes_through_a_service(layout: str, options: tuple[str, ...]) -> None:
    cases = [case for case in DATA["cases"] if case["layout"] == layout]
    assert len(cases) >= 8
    fixed = ["--layout", layout, "--threads", "1", "--chunk-tokens", "32"]
    with running(1, 1, *fixed, *options) as service, service.client() as client:
        for case in cases:
            expected = [
                {key: output[key] for key in ("token_ids", "exit_depths")}
                for output in case["outputs"]
            ]
            assert answers(client, case) == expected, case["name"]
        eventually(lambda: service.at_rest(client), lambda: f"at rest; held: {service.held}")
