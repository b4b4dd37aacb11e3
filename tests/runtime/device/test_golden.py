"""The model runner against reference outputs: logits at every position and loop, tokens, depths."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlt.runtime.plans import Stage
from rlt.runtime.types import SamplingParams
from rlt.runtime.worker import Worker

from .checkpoints import GOLDEN, golden_json, golden_worker
from .driver import Driver, Request, ouro_exit

DATA = golden_json()
PROMPTS: list[list[int]] = DATA["prompts"]
CASES = {f"{case['layout']}-{case['name']}": case for case in DATA["cases"]}
GREEDY = SamplingParams(logprobs=None)


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """One per layout."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {layout: golden_worker(layout=layout) for layout in ("last_exited", "shared")}
    torch.set_num_threads(threads)


@pytest.fixture
def worker(workers: dict[str, Worker]) -> Worker:
    return workers["last_exited"]


def driver_of(worker: Worker) -> Driver:
    worker.parts.storage.kv.fill_(float("nan"))
    worker.parts.storage.hidden.fill_(float("nan"))
    return Driver(worker.run, worker.parts.storage.geometry, worker.parts.storage.plan.num_blocks)


def logits_of(worker: Worker, slot: int) -> torch.Tensor:
    with torch.inference_mode():
        return worker.parts.model.logits(worker.parts.storage.hidden[slot : slot + 1])[0]


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_fixed_depth_logits_equal_the_hugging_face_models(
    worker: Worker, number: int, chunk: int
) -> None:
    want = load_file(GOLDEN / "hf_logits.safetensors")[f"prompt{number:02d}"]
    driver = driver_of(worker)
    prompt = PROMPTS[number]
    # Every position of the prompt is the last one of some prefix.
    for slot, length in enumerate(range(1, len(prompt) + 1, max(1, len(prompt) // 4))):
        driver.prefill(driver.start(slot, prompt[:length], 1), chunk)
        assert (logits_of(worker, slot) - want[length - 1]).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_logits_and_gate_after_each_loop_equal_the_reference(
    workers: dict[str, Worker], layout: str
) -> None:
    worker = workers[layout]
    # `shared` is a recurrence over positions, which lets rounding grow.
    tolerance = 1e-4 if layout == "last_exited" else 1e-3
    want = load_file(GOLDEN / "prefill_logits.safetensors")
    driver = driver_of(worker)
    for number, prompt in enumerate(PROMPTS):
        if len(prompt) == 1:
            continue
        # The last prompt token runs as a decode row, so that every loop leaves its hidden state.
        request = driver.start(number, prompt[:-1], 2)
        driver.prefill(request, 64)
        request.tokens.append(prompt[-1])
        driver.prelude([request])
        for depth in range(4):
            output = driver.step(Stage.RECURRENT, loops=(driver.loop_row(request, depth),))
            logits = logits_of(worker, number)
            gate = torch.logit(torch.tensor(output.gate_scores[0].score))
            assert (logits - want[f"{layout}.logits"][number, depth]).abs().max() < tolerance
            assert abs(gate - want[f"{layout}.gate_logit"][number, depth]) < tolerance


def exit_rule(case: dict[str, Any]) -> Callable[[Request, list[float]], bool]:
    match case["exit_mode"]:
        case "trace":
            return lambda request, hazards: (
                len(hazards) == DATA["traces"][request.slot][len(request.tokens)]
            )
        case "ouro":
            return ouro_exit(case["exit_threshold"], case["min_loops"], case["max_loops"] or 4)
        case "ouro_delayed":
            cap = case["max_loops"] or 4
            signal = ouro_exit(case["exit_threshold"], case["min_loops"], cap)
            return lambda request, hazards: (
                len(hazards) == cap or (len(hazards) > 1 and signal(request, hazards[:-1]))
            )
        case other:
            raise ValueError(other)


def generate(
    worker: Worker, case: dict[str, Any], numbers: list[int], chunk: int, together: bool
) -> list[Request]:
    driver = driver_of(worker)
    leaves = exit_rule(case)
    requests = [driver.start(slot, PROMPTS[number], 24) for slot, number in enumerate(numbers)]
    for request in requests:
        driver.prefill(request, chunk)
        request.depths.append(4)
    for batch in [requests] if together else [[request] for request in requests]:
        driver.coda(batch, GREEDY)
        for _ in range(23):
            driver.decode_token(batch, leaves, GREEDY)
    return requests


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if index % 3 == 0 else pytest.mark.soak)
        for index, name in enumerate(CASES)
    ],
)
def test_batched_greedy_tokens_and_exit_depths_equal_the_reference(
    workers: dict[str, Worker], name: str
) -> None:
    case = CASES[name]
    requests = generate(workers[case["layout"]], case, list(range(12)), chunk=7, together=True)
    for request, want in zip(requests, case["outputs"], strict=True):
        assert request.tokens == want["token_ids"]
        assert request.depths == want["exit_depths"]


def test_packed_weights_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlt.kernels import linear

    monkeypatch.setattr(linear, "PACK_FROM_ELEMENTS", 0)
    case = CASES["last_exited-fixed4"]
    requests = generate(golden_worker(), case, list(range(12)), chunk=64, together=True)
    assert [request.tokens for request in requests] == [o["token_ids"] for o in case["outputs"]]


@pytest.mark.parametrize("number", [0, 3, 11])
def test_a_request_alone_gives_the_same_as_batched(worker: Worker, number: int) -> None:
    case = next(
        c
        for c in CASES.values()
        if (c["exit_mode"], c["layout"], c["exit_threshold"]) == ("ouro", "last_exited", 0.5)
    )
    [request] = generate(worker, case, [number], chunk=64, together=False)
    assert request.tokens == case["outputs"][number]["token_ids"]
    assert request.depths == case["outputs"][number]["exit_depths"]
