"""What the endpoints answer, in OpenAI's shape with our own fields added on request.

Records only. A field that is UNSET is left out.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.types import Stamp


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records here."""


class Event(Answer, frozen=True, kw_only=True):
    """at_s: wall-clock time. depth: the loop's KV plane, from 0."""

    event: str
    at_s: float
    worker: str
    depth: int | None
    num_bytes: int | None

    @classmethod
    def of(cls, stamp: Stamp) -> "Event":
        return cls(
            event=stamp.event,
            at_s=stamp.at_s,
            worker=stamp.worker,
            depth=stamp.depth,
            num_bytes=stamp.num_bytes,
        )


class Usage(Answer, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Own(Answer, frozen=True, kw_only=True):
    """Comes back when asked for: return_token_ids, return_exit_depths, return_timeline."""

    token_ids: tuple[int, ...] | UnsetType = UNSET
    exit_depths: tuple[int, ...] | UnsetType = UNSET
    timeline: tuple[Event, ...] | UnsetType = UNSET


FinishWord = Literal["stop", "length"]


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Own, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishWord | None = None


class Completion(Answer, frozen=True, kw_only=True):
    """Also a chunk of a stream, which has a usage in its last chunk alone."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Answer, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Answer, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessageOut(Answer, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Own, frozen=True, kw_only=True):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord


class ChatCompletion(Answer, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class ChatDelta(Answer, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Own, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None


class ChatChunk(Answer, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET
