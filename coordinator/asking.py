"""What a caller of the client library writes, turned into one GenerateRequest, and the result back.

Shared by both clients. Checks only what has no other place; ranges are the service's business.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from ..runtime.errors import InvalidRequest, error_from
from ..runtime.interfaces import ChatMessage, Delta, GenerateRequest
from ..runtime.types import (
    ExitMode,
    ExitParams,
    FinishReason,
    RequestId,
    SamplingParams,
    Stamp,
    TokenLogprobs,
)

Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole output of one request. exit_depths: loops that each token ran."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    text: str
    exit_depths: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    timeline: tuple[Stamp, ...]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of generate(). What is not given, or None, takes the default of the
    service or of the model."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    exit_mode: ExitMode | None
    trace: Sequence[int] | None
    exit_threshold: float | None
    min_loops: int | None
    max_loops: int | None
    priority: int | None
    deadline_s: float | None
    request_id: str | None


def make_request(prompt: Prompt, options: GenerateOptions) -> GenerateRequest:
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"generate() knows no option {unknown[0]!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in ("stop", "stop_token_ids", "trace"):
        if name in given:
            given[name] = tuple(given[name])

    def some(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {name: given[name] for name in kind.__struct_fields__ if name in given}

    return GenerateRequest(
        request_id=RequestId(given.get("request_id", uuid.uuid4().hex)),
        sampling=SamplingParams(**some(SamplingParams)),
        exit=ExitParams(**some(ExitParams)),
        stop=given.get("stop", ()),
        priority=given.get("priority", 0),
        deadline_s=given.get("deadline_s"),
        **_prompt_fields(prompt),
    )


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(
            f"a prompt is text, a list of token IDs or a list of messages, not {type(prompt)}"
        )
    if prompt and isinstance(prompt[0], Mapping | ChatMessage):
        try:
            messages = msgspec.convert(
                [dict(m) if isinstance(m, Mapping) else m for m in prompt],
                type=tuple[ChatMessage, ...],
            )
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise InvalidRequest(f"a message has a role and a content: {error}") from error
        return {"messages": messages}
    return {"prompt_token_ids": tuple(prompt)}


class Collector:
    """Joins one request's deltas."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def result(self) -> Result:
        deltas, last = self._deltas, self._deltas[-1]
        assert last.finish_reason is not None
        return Result(
            request_id=last.request_id,
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            text="".join(delta.text for delta in deltas),
            exit_depths=tuple(depth for delta in deltas for depth in delta.exit_depths),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish_reason=last.finish_reason,
            num_prompt_tokens=last.num_prompt_tokens or 0,
            timeline=last.timeline,
        )


def raise_if_failed(delta: Delta) -> None:
    """A request that ended with an error raises it."""
    if delta.finish_reason is FinishReason.ERROR:
        raise error_from(delta.error_code or "internal", delta.error or "no reason given")
