"""Checks what a user asked against a model and a pool, and fills in every default.

Pure and shared by the local engine and the coordinator, so that both refuse the same requests with
the same words. Every refusal names the field, the value and what is allowed.
"""

import math
from collections.abc import Sequence
from typing import get_args

import msgspec

from .errors import InvalidRequest, TooLong
from .interfaces import GenerateRequest
from .types import (
    EngineRequest,
    ExitMode,
    ExitParams,
    ExitSettings,
    Generation,
    ModelDescription,
    SamplingParams,
)

DEFAULT_MIN_LOOPS = 2
MAX_LOGPROBS = 20
MAX_GENERATION = 2**63 - 1
MAX_PRIORITY = 1_000_000
MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
EXIT_MODES = get_args(ExitMode)


def resolve_request(
    request: GenerateRequest,
    prompt: Sequence[int],
    *,
    generation: Generation,
    seed: int,
    model: ModelDescription,
    pool_tokens: int | None = None,
) -> EngineRequest:
    """The request as an engine is given it. Raises InvalidRequest or TooLong.

    prompt: its token IDs, whatever form it came in. seed: used where the request has none.
    pool_tokens: positions that one request may take of the KV pool, None for no bound.
    """
    tokens = _checked_prompt(prompt, model)
    sampling = _checked_sampling(request.sampling, seed, model)
    resolved = EngineRequest(
        generation=generation,
        prompt=tokens,
        sampling=sampling,
        exit=_resolved_exit(request.exit, model, sampling.max_tokens),
        priority=request.priority,
    )
    _whole("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_stops(request.stop)
    _check_length(resolved, model, pool_tokens)
    if request.deadline_s is not None:
        _number("deadline_s", request.deadline_s, 0.0, None)
    return resolved


def engine_request_fault(request: EngineRequest, model: ModelDescription) -> str | None:
    """What in a resolved request no coordinator can have resolved, or None. Whether it is too long
    is for the engine's own pool to say."""
    exit, traced = request.exit, request.exit.mode == "trace"
    asked = ExitParams(
        exit_mode=exit.mode,
        trace=exit.trace if traced or exit.trace else None,
        exit_threshold=exit.threshold,
        min_loops=exit.min_loops,
        max_loops=exit.max_loops,
    )
    try:
        _whole("generation", request.generation, 0, MAX_GENERATION)
        _checked_prompt(request.prompt, model)
        _whole("sampling.seed", request.sampling.seed, 0, MAX_SEED)
        _checked_sampling(request.sampling, 0, model)
        _resolved_exit(asked, model, request.sampling.max_tokens)
        _whole("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    except InvalidRequest as error:
        return f"generation {request.generation}: {error}"
    return None


def _checked_prompt(prompt: Sequence[int], model: ModelDescription) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token")
    tokens = tuple(prompt)
    plain = all(type(token) is int for token in tokens)
    if not plain or min(tokens) < 0 or max(tokens) >= model.vocab_size:
        for index, token in enumerate(tokens):
            _whole(f"prompt_token_ids[{index}]", token, 0, model.vocab_size - 1)
    return tokens


def _checked_sampling(
    sampling: SamplingParams, seed: int, model: ModelDescription
) -> SamplingParams:
    _whole("sampling.max_tokens", sampling.max_tokens, 1, None)
    _number("sampling.temperature", sampling.temperature, 0.0, None)
    _whole("sampling.top_k", sampling.top_k, 0, None)
    _number("sampling.top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise InvalidRequest("sampling.top_p is 0.0; it must be above 0 and at most 1")
    if sampling.logprobs is not None:
        _whole("sampling.logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    for index, token in enumerate(sampling.stop_token_ids):
        _whole(f"sampling.stop_token_ids[{index}]", token, 0, model.vocab_size - 1)
    if sampling.seed is None:
        return msgspec.structs.replace(sampling, seed=seed)
    _whole("sampling.seed", sampling.seed, 0, MAX_SEED)
    return sampling


def _resolved_exit(asked: ExitParams, model: ModelDescription, max_tokens: int) -> ExitSettings:
    if asked.exit_mode not in EXIT_MODES:
        raise InvalidRequest(
            f"exit.exit_mode is {asked.exit_mode!r}; it must be one of {', '.join(EXIT_MODES)}"
        )
    threshold, loops = asked.exit_threshold, model.num_loops
    if threshold is None:
        threshold = model.default_exit_threshold
    _number("exit.exit_threshold", threshold, 0.0, 1.0)
    max_loops = loops if asked.max_loops is None else asked.max_loops
    _whole("exit.max_loops", max_loops, 1, loops)
    min_loops = asked.min_loops
    if min_loops is None:
        min_loops = 1 if asked.exit_mode == "trace" else min(DEFAULT_MIN_LOOPS, max_loops)
    _whole("exit.min_loops", min_loops, 1, loops)
    if min_loops > max_loops:
        raise InvalidRequest(
            f"exit.min_loops is {min_loops} and exit.max_loops is {max_loops}; "
            "min_loops must not be above max_loops"
        )
    settings = ExitSettings(float(threshold), min_loops, max_loops, asked.exit_mode)
    trace = _checked_trace(asked, settings, loops, max_tokens)
    return msgspec.structs.replace(settings, trace=trace)


def _checked_trace(
    asked: ExitParams, bounds: ExitSettings, num_loops: int, max_tokens: int
) -> tuple[int, ...]:
    """As many entries as the request can have outputs; the first one is the prompt's."""
    if asked.exit_mode != "trace":
        if asked.trace is not None:
            raise InvalidRequest(
                f"exit.trace is given and exit.exit_mode is {asked.exit_mode!r}; "
                "a trace goes with exit_mode 'trace' alone"
            )
        return ()
    if asked.trace is None or len(asked.trace) < max_tokens:
        raise InvalidRequest(
            f"exit.trace has {len(asked.trace or ())} entries; exit_mode 'trace' needs one for "
            f"each of sampling.max_tokens {max_tokens} outputs"
        )
    _whole("exit.trace[0]", asked.trace[0], num_loops, num_loops)
    for index, depth in enumerate(asked.trace[1:max_tokens], start=1):
        _whole(f"exit.trace[{index}]", depth, bounds.min_loops, bounds.max_loops)
    return tuple(asked.trace[:max_tokens])


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are taken")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop[{index}] has {len(stop)} characters; it must have from 1 to "
                f"{MAX_STOP_CHARACTERS}"
            )


def _check_length(request: EngineRequest, model: ModelDescription, pool_tokens: int | None) -> None:
    prompt, output = len(request.prompt), request.sampling.max_tokens
    need = request.capacity_tokens
    asked = f"{prompt} prompt tokens and sampling.max_tokens {output} need {need} positions"
    if need > model.max_positions:
        raise TooLong(f"{asked}; the model has {model.max_positions}: ask for less")
    if pool_tokens is not None and need > pool_tokens:
        raise TooLong(
            f"{asked}; the KV pool holds {pool_tokens} of one request: ask for less, or start the "
            "workers with a higher --num-blocks"
        )


def _whole(field: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} is {value!r}; it must be a whole number")
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{field} is {value}; it must be {_range(low, high)}")


def _number(field: str, value: object, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{field} is {value!r}; it must be a number")
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise InvalidRequest(f"{field} is {value}; it must be {_range(low, high)}")


def _range(low: float, high: float | None) -> str:
    if low == high:
        return f"{low}"
    return f"at least {low}" if high is None else f"from {low} to {high}"
