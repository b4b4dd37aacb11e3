"""One request's whole output, put together from its deltas."""

from collections.abc import Sequence

import msgspec

from .interfaces import Delta
from .types import FinishReason, RequestId, Stamp, TokenLogprobs


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """error_code and error are set exactly when finish_reason is ERROR."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    error_code: str | None
    error: str | None
    timeline: tuple[Stamp, ...]


def joined(deltas: Sequence[Delta]) -> Result:
    """deltas: all of one request, in order."""
    last = deltas[-1]
    assert last.finish_reason is not None and last.num_prompt_tokens is not None
    return Result(
        request_id=last.request_id,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        exit_depths=tuple(depth for delta in deltas for depth in delta.exit_depths),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        error_code=last.error_code,
        error=last.error,
        timeline=last.timeline,
    )
