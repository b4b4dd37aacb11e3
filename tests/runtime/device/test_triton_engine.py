"""A whole engine on Triton kernels gives the golden tokens and depths: interpreted, or on a GPU."""

import itertools
import logging
import os
from pathlib import Path

import pytest

from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import ConfigError
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.local import LocalEngine
from rlt.runtime.types import ExitParams, RequestId, SamplingParams

from .checkpoints import CKPT, golden_json, golden_worker

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# case, layout, prompts, tokens of each output
QUICK = [
    ("ouro_t0.5_min1", "last_exited", (1, 4, 7), 6),
    pytest.param("delayed_t0.5_min1", "last_exited", (0, 8), 6, marks=pytest.mark.soak),
    ("trace", "shared", (0, 2), 6),
]


def check(name: str, layout: str, prompts: tuple[int, ...], tokens: int, device: str) -> None:
    """Requests in one batch; prompts in chunks that share passes with decode rows."""
    golden = golden_json()
    case = next(c for c in golden["cases"] if (c["name"], c["layout"]) == (name, layout))
    traces = golden["traces"] if case["exit_mode"] == "trace" else itertools.repeat(None)
    chosen = [
        (prompt, trace, output)
        for index, (prompt, trace, output) in enumerate(
            zip(golden["prompts"], traces, case["outputs"], strict=False)
        )
        if index in prompts
    ]
    asked = [
        GenerateRequest(
            request_id=RequestId(str(index)),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
            exit=ExitParams(
                exit_mode=case["exit_mode"],
                trace=None if trace is None else tuple(trace[:tokens]),
                exit_threshold=case["exit_threshold"],
                min_loops=case["min_loops"],
                max_loops=case["max_loops"],
            ),
        )
        for index, (prompt, trace, _) in enumerate(chosen)
    ]
    config = EngineConfig(
        model=str(CKPT),
        dtype="float32",
        device=device,
        backend="triton",
        layout=layout,
        block_size=12,
        chunk_tokens=24,
        num_blocks=256,
        num_slots=16,
        num_receive_slots=0,
    )
    with LocalEngine(config) as engine:
        results = engine.generate(asked)
    for result, (_, _, output) in zip(results, chosen, strict=True):
        assert list(result.token_ids) == output["token_ids"][:tokens]
        assert list(result.exit_depths) == output["exit_depths"][:tokens]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "layout", "prompts", "tokens"), QUICK)
def test_golden_outputs(
    name: str, layout: str, prompts: tuple[int, ...], tokens: int, device: str
) -> None:
    check(name, layout, prompts, tokens, device)


@pytest.mark.soak
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "layout"), [(c["name"], c["layout"]) for c in golden_json()["cases"]]
)
def test_golden_outputs_of_every_case(name: str, layout: str, device: str) -> None:
    check(name, layout, (1, 4, 7), 8, device)


@pytest.mark.parametrize("device", DEVICES[:1])
def test_the_choice_and_its_reason_are_told_at_start(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    golden_worker(backend="triton", device=device)
    assert "kernels: triton (asked for; interpreted)" in caplog.messages
    golden_worker(device=device)
    assert "kernels: torch (the device is a CPU)" in caplog.messages


def test_triton_on_a_cpu_without_the_interpreter_names_the_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"--backend triton: on a CPU, .* TRITON_INTERPRET=1"):
        golden_worker(backend="triton", device="cpu")
