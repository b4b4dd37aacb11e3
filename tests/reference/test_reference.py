"""The dense reference is proved by outputs that other implementations made."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlt.runtime.rng import Purpose
from rlt.runtime.rng import uniform as engine_uniform
from rlt.runtime.sampling import choose
from rlt.runtime.types import SamplingParams

from .answer import Answer, Ask, Gaps, answer
from .dense import DenseModel
from .draw import draw, uniform

GOLDEN = Path(__file__).parents[1] / "golden"
DATA: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
CASES = {f"{case['name']}-{case['layout']}": case for case in DATA["cases"]}


@pytest.fixture(scope="module")
def model() -> Iterator[DenseModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield DenseModel(GOLDEN / "ckpt")
    torch.set_num_threads(threads)


def ask_of(case: dict[str, Any], number: int, **changes: Any) -> Ask:
    return Ask(
        prompt=tuple(DATA["prompts"][number]),
        max_tokens=24,
        layout=case["layout"],
        mode=case["exit_mode"],
        threshold=case["exit_threshold"],
        min_loops=case["min_loops"],
        max_loops=case.get("max_loops"),
        trace=tuple(DATA["traces"][number]) if case["exit_mode"] == "trace" else (),
        **changes,
    )


@pytest.mark.parametrize("name", CASES)
def test_tokens_depths_and_gaps_of_every_golden_case(model: DenseModel, name: str) -> None:
    case = CASES[name]
    for number, want in enumerate(case["outputs"]):
        got = answer(model, ask_of(case, number))
        assert (got.tokens, got.depths) == (want["token_ids"], want["exit_depths"]), number
        gaps = got.smallest()
        assert gaps.logit == pytest.approx(case["min_logit_margin"][number], abs=2e-4)
        if case["min_exit_gap"][number] is not None:
            assert gaps.exit == pytest.approx(case["min_exit_gap"][number], abs=2e-5)


@pytest.mark.parametrize("case", DATA["eos"], ids=lambda case: f"eos-{case['exit_mode']}")
def test_eos_ends_a_request_and_is_part_of_it(model: DenseModel, case: dict[str, Any]) -> None:
    for number, want in enumerate(case["outputs"]):
        got = answer(model, ask_of(case, number, stop=(case["eos_token_id"],)))
        expected = (want["token_ids"], want["exit_depths"], want["finish_reason"])
        assert (got.tokens, got.depths, got.finish) == expected


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_logits_and_gate_of_the_last_prompt_token_after_each_loop(
    model: DenseModel, layout: str
) -> None:
    want = load_file(GOLDEN / "prefill_logits.safetensors")
    for number, prompt in enumerate(DATA["prompts"]):
        memory = model.memory(layout)
        for position, token in enumerate(prompt):
            hidden, states = model.embed(token), []
            for depth in range(4):
                hidden = model.loop(hidden, memory, position, depth)
                states.append(hidden)
        for depth, state in enumerate(states):
            logits = want[f"{layout}.logits"][number, depth]
            gate = want[f"{layout}.gate_logit"][number, depth]
            assert (model.logits(state) - logits).abs().max() < 1e-4
            assert abs(model.gate_logit(state) - gate) < 1e-4


def test_every_position_has_the_logits_of_the_hugging_face_model(model: DenseModel) -> None:
    want = load_file(GOLDEN / "hf_logits.safetensors")
    for number, prompt in enumerate(DATA["prompts"]):
        memory = model.memory("last_exited")
        for position, token in enumerate(prompt):
            hidden = model.embed(token)
            for depth in range(4):
                hidden = model.loop(hidden, memory, position, depth)
            logits = model.logits(hidden)
            assert (logits - want[f"prompt{number:02d}"][position]).abs().max() < 1e-4


def test_the_uniform_draw_equals_numpys_philox() -> None:
    for seed in (0, 1, 17, 2**63 - 1):
        for index in (0, 1, 2, 250, 2**40):
            key = np.array([seed, 1], dtype=np.uint64)
            bits = int(np.random.Philox(key=key, counter=index).random_raw())
            assert uniform(seed, index) == (bits >> 11) / 2**53
            assert uniform(seed, index) == engine_uniform(seed, Purpose.SAMPLE, index)


def test_a_frozen_head_gives_scores_and_exits_one_loop_later(model: DenseModel) -> None:
    weight = torch.zeros(model.hidden_size)
    for bias, min_loops, depth in ((9.0, 1, 2), (9.0, 2, 3), (9.0, 4, 4), (-9.0, 1, 4)):
        ask = Ask(
            prompt=(5, 6),
            max_tokens=3,
            mode="random_lookahead",
            threshold=0.5,
            min_loops=min_loops,
            head=(weight, bias),
        )
        assert answer(model, ask).depths == [4, depth, depth]


SAMPLINGS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, seed=seed)
    for t in (0.0, 0.3, 1.0, 2.5)
    for k in (0, 1, 5, 50, 200)
    for p in (1.0, 0.9, 0.3, 0.01)
    for seed in (0, 9)
]


def test_every_filter_chooses_what_the_engines_sampler_chooses() -> None:
    generator = np.random.default_rng(3)
    compared = 0
    for index, params in enumerate(SAMPLINGS):
        logits = generator.normal(0, 3, 100)
        choice = draw(
            logits.tolist(),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed or 0,
            index=index,
        )
        if choice.gap > 1e-9:
            compared += 1
            assert choice.token == choose(logits, params, index), params
    assert compared > 0.98 * len(SAMPLINGS)


def test_equal_logits_rank_by_token_id() -> None:
    for params in SAMPLINGS:
        logits = [1.0, 2.0, 2.0, 2.0]
        choice = draw(
            logits,
            temperature=params.temperature,
            top_k=2,
            top_p=params.top_p,
            seed=params.seed or 0,
            index=4,
        )
        assert choice.token in (1, 2)


def test_the_first_tie_is_told() -> None:
    far, near = Gaps(0.1, 0.2), Gaps(0.1, 5e-5)
    assert Answer([1, 2], [4, 4], "length", [far, near]).first_tie() == 1
    assert Answer([1, 2], [4, 4], "length", [far, far]).first_tie() is None
    assert Answer([1, 2], [4, 4], "length", [far, near]).smallest().exit == 5e-5
