"""What is refused, in which words, and which defaults are filled in."""

from typing import Any

import pytest

from rlt.runtime.errors import InvalidRequest, TooLong
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import (
    EngineRequest,
    ExitParams,
    ExitSettings,
    Generation,
    ModelDescription,
    RequestId,
    SamplingParams,
)
from rlt.runtime.validate import resolve_request

MODEL = ModelDescription(
    name="m",
    fingerprint="f",
    vocab_size=100,
    max_positions=64,
    num_loops=4,
    eos_token_ids=(0,),
    default_exit_threshold=0.7,
)


def resolve(
    prompt: Any = (1, 2),
    sampling: dict[str, Any] | None = None,
    exit: dict[str, Any] | None = None,
    deadline_s: Any = None,
    pool_tokens: int | None = None,
    priority: Any = 0,
) -> EngineRequest:
    request = GenerateRequest(
        request_id=RequestId("r"),
        sampling=SamplingParams(**({"max_tokens": 5} | (sampling or {}))),
        exit=ExitParams(**(exit or {})),
        deadline_s=deadline_s,
        priority=priority,
    )
    return resolve_request(
        request, prompt, generation=Generation(9), seed=11, model=MODEL, pool_tokens=pool_tokens
    )


def test_defaults_come_from_the_model_and_the_seed_from_the_caller() -> None:
    resolved = resolve()
    assert resolved.exit == ExitSettings(0.7, 2, 4)
    assert (resolved.generation, resolved.sampling.seed, resolved.prompt) == (9, 11, (1, 2))
    assert resolved.capacity_tokens == 6


def test_the_default_of_min_loops_is_never_above_max_loops() -> None:
    assert resolve(exit={"max_loops": 1}).exit == ExitSettings(0.7, 1, 1)


def test_a_given_seed_stays_even_when_it_is_zero() -> None:
    assert resolve(sampling={"seed": 0}).sampling.seed == 0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, 100)}, r"prompt_token_ids\[1\] is 100; it must be from 0 to 99"),
        ({"prompt": (-1,)}, r"prompt_token_ids\[0\] is -1"),
        ({"prompt": (1.0,)}, "whole number"),
        ({"prompt": (True,)}, "whole number"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens is 0; it must be at least 1"),
        ({"sampling": {"temperature": -0.1}}, "temperature is -0.1; it must be at least 0"),
        ({"sampling": {"temperature": float("nan")}}, "temperature is nan"),
        ({"sampling": {"temperature": float("inf")}}, "temperature is inf"),
        ({"sampling": {"top_p": 0.0}}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"sampling": {"top_p": 1.1}}, "top_p is 1.1"),
        ({"sampling": {"top_k": -1}}, "top_k is -1; it must be at least 0"),
        ({"sampling": {"logprobs": 21}}, "logprobs is 21; it must be from 0 to 20"),
        ({"sampling": {"seed": -1}}, "seed is -1"),
        ({"sampling": {"stop_token_ids": (100,)}}, r"stop_token_ids\[0\] is 100"),
        ({"exit": {"exit_threshold": 1.5}}, "exit_threshold is 1.5; it must be from 0.0 to 1.0"),
        ({"exit": {"exit_threshold": float("nan")}}, "exit_threshold is nan"),
        ({"exit": {"min_loops": 0}}, "min_loops is 0; it must be from 1 to 4"),
        ({"exit": {"max_loops": 5}}, "max_loops is 5; it must be from 1 to 4"),
        ({"exit": {"min_loops": 3, "max_loops": 2}}, "min_loops must not be above max_loops"),
        ({"deadline_s": -1.0}, "deadline_s is -1.0"),
        ({"priority": 1.5}, "priority is 1.5; it must be a whole number"),
        ({"priority": 2_000_000}, "priority is 2000000; it must be from -1000000 to 1000000"),
        ({"exit": {"exit_mode": "late"}}, "exit_mode is 'late'; it must be one of ouro, ouro_del"),
        ({"exit": {"exit_mode": "trace"}}, "exit.trace has 0 entries; .*max_tokens 5 outputs"),
        ({"exit": {"exit_mode": "trace", "trace": (4, 1, 1, 1)}}, "exit.trace has 4 entries"),
        ({"exit": {"trace": (4, 1, 1, 1, 1)}}, "a trace goes with exit_mode 'trace' alone"),
        (
            {"exit": {"exit_mode": "trace", "trace": (3, 1, 1, 1, 1)}},
            r"exit.trace\[0\] is 3; it must be 4",
        ),
        (
            {"exit": {"exit_mode": "trace", "trace": (4, 1, 5, 1, 1)}},
            r"exit.trace\[2\] is 5; it must be from 1 to 4",
        ),
        (
            {"exit": {"exit_mode": "trace", "trace": (4, 1, 2, 2, 2), "min_loops": 2}},
            r"exit.trace\[1\] is 1; it must be from 2 to 4",
        ),
        (
            {"exit": {"exit_mode": "trace", "trace": (4, 1, 2, 2, True)}},
            r"exit.trace\[4\] is True; it must be a whole number",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_range(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        resolve(**bad)


def test_a_trace_keeps_one_depth_per_output_and_its_bounds_default_to_every_loop() -> None:
    resolved = resolve(exit={"exit_mode": "trace", "trace": (4, 1, 4, 2, 3, 9)})
    assert resolved.exit == ExitSettings(0.7, 1, 4, "trace", (4, 1, 4, 2, 3))


def test_the_first_entry_of_a_trace_is_every_loop_even_above_max_loops() -> None:
    asked = {"exit_mode": "trace", "trace": (4, 2, 2, 2, 2), "max_loops": 2}
    assert resolve(exit=asked).exit.trace == (4, 2, 2, 2, 2)


@pytest.mark.parametrize("mode", ["ouro", "ouro_delayed", "random_lookahead"])
def test_mode_and_priority_reach_the_engine(mode: str) -> None:
    resolved = resolve(exit={"exit_mode": mode, "exit_threshold": 1.0}, priority=-3)
    assert (resolved.exit.mode, resolved.exit.threshold, resolved.priority) == (mode, 1.0, -3)


def test_the_longest_request_that_fits_is_taken_and_one_more_token_is_too_long() -> None:
    assert resolve(prompt=(1,) * 60).capacity_tokens == 64
    with pytest.raises(TooLong, match=r"61 prompt tokens .* 5 need 65 positions; the model has 64"):
        resolve(prompt=(1,) * 61)


def test_a_pool_that_is_too_small_is_named() -> None:
    assert resolve(pool_tokens=6)
    with pytest.raises(TooLong, match="the KV pool holds 5"):
        resolve(pool_tokens=5)
