"""How output looks: one class per endpoint, each for a whole answer and for a stream's chunks.

Owns what a stream has said so far of each choice (the role, the text's length). Pure.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.interfaces import Delta
from ...runtime.types import FinishReason
from .answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessageOut,
    Completion,
    CompletionChoice,
    Event,
    FinishWord,
    Own,
    Usage,
)
from .asked import Call
from .fields import Shared
from .logprobs import ChatLogprobsShape, CompletionLogprobsShape
from .token_names import TokenNames


class Shape(Protocol):
    def whole(self, outputs: Sequence[Delta], usage: Usage) -> msgspec.Struct: ...
    def chunk(self, index: int, delta: Delta, usage: Usage) -> msgspec.Struct | None:
        """None: nothing of it is to be shown yet. usage: so far."""
        ...

    def last(self, usage: Usage) -> msgspec.Struct:
        """The chunk that tells the usage."""
        ...


class _Shape:
    def __init__(self, call: Call, asked: Shared, model: str) -> None:
        self._asked = asked
        self._head: dict[str, Any] = {"id": call.id, "created": int(time.time()), "model": model}
        self._call = call
        self._logprobs = call.requests[0].sampling.logprobs is not None
        self._shows_tokens = self._logprobs or asked.return_token_ids or asked.return_exit_depths

    def _is_shown(self, delta: Delta) -> bool:
        shown_tokens = self._shows_tokens and bool(delta.token_ids)
        return bool(delta.text) or shown_tokens or delta.finish_reason is not None

    def _so_far(self, usage: Usage) -> Usage | UnsetType | None:
        if self._call.usage_so_far:
            return usage
        return None if self._call.include_usage else UNSET

    def _own(self, delta: Delta) -> dict[str, Any]:
        asked, ended = self._asked, delta.finish_reason is not None
        own = Own(
            token_ids=delta.token_ids if asked.return_token_ids else UNSET,
            exit_depths=delta.exit_depths if asked.return_exit_depths else UNSET,
            timeline=tuple(map(Event.of, delta.timeline))
            if asked.return_timeline and ended
            else UNSET,
        )
        return msgspec.structs.asdict(own)


class CompletionShape(_Shape):
    def __init__(self, call: Call, asked: Shared, model: str, names: TokenNames) -> None:
        super().__init__(call, asked, model)
        self._offsets = [CompletionLogprobsShape(names) for _ in call.requests]

    def whole(self, outputs: Sequence[Delta], usage: Usage) -> Completion:
        choices = tuple(self._choice(index, delta) for index, delta in enumerate(outputs))
        return Completion(**self._head, choices=choices, usage=usage)

    def chunk(self, index: int, delta: Delta, usage: Usage) -> Completion | None:
        if not self._is_shown(delta):
            return None
        choices = (self._choice(index, delta),)
        return Completion(**self._head, choices=choices, usage=self._so_far(usage))

    def last(self, usage: Usage) -> Completion:
        return Completion(**self._head, choices=(), usage=usage)

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        logprobs = self._offsets[index].of(delta) if self._logprobs else None
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=finish_word(delta.finish_reason),
            **self._own(delta),
        )


class ChatShape(_Shape):
    def __init__(self, call: Call, asked: Shared, model: str, names: TokenNames) -> None:
        super().__init__(call, asked, model)
        self._names = ChatLogprobsShape(names)
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[Delta], usage: Usage) -> ChatCompletion:
        choices = tuple(self._choice(index, delta) for index, delta in enumerate(outputs))
        return ChatCompletion(**self._head, choices=choices, usage=usage)

    def chunk(self, index: int, delta: Delta, usage: Usage) -> ChatChunk | None:
        """The first one of a choice tells the role."""
        if not self._is_shown(delta) and index in self._begun:
            return None
        role: Literal["assistant"] | UnsetType = UNSET if index in self._begun else "assistant"
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(role=role, content=delta.text),
            logprobs=self._names.of(delta) if self._logprobs else None,
            finish_reason=finish_word(delta.finish_reason),
            **self._own(delta),
        )
        return ChatChunk(**self._head, choices=(choice,), usage=self._so_far(usage))

    def last(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._head, choices=(), usage=usage)

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        word = finish_word(delta.finish_reason)
        assert word is not None
        return ChatChoice(
            index=index,
            message=ChatMessageOut(content=delta.text),
            logprobs=self._names.of(delta) if self._logprobs else None,
            finish_reason=word,
            **self._own(delta),
        )


def finish_word(reason: FinishReason | None) -> FinishWord | None:
    match reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return "length"
        case _:
            return "stop"
