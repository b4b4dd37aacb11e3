"""From what a user sent (text, chat messages or token IDs) to token IDs.

Owns nothing; the tokenizer comes from outside and is only named by its Protocol here.
Exactly one form is accepted: which one was meant is never guessed.
"""

from collections.abc import Sequence
from typing import Protocol

from .errors import InvalidRequest
from .interfaces import ChatMessage, GenerateRequest


class TextDecoder(Protocol):
    """Turns one output's token IDs into text, never ending in half a character."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> Sequence[int]: ...
    def render(self, messages: Sequence[ChatMessage]) -> Sequence[int]: ...
    def decoder(self) -> TextDecoder: ...


def prompt_token_ids(request: GenerateRequest, tokenizer: Tokenizer | None) -> Sequence[int]:
    forms = (request.text, request.messages, request.prompt_token_ids)
    given = sum(form is not None for form in forms)
    if given != 1:
        raise InvalidRequest(
            f"{given} of text, messages and prompt_token_ids are given; give exactly one"
        )
    if request.stop and tokenizer is None:
        raise InvalidRequest("stop strings need a tokenizer, and this engine has none")
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if tokenizer is None:
        raise InvalidRequest(
            "this engine has no tokenizer: send prompt_token_ids, or start it with a tokenizer"
        )
    if request.text is not None:
        return tokenizer.encode(request.text)
    return tokenizer.render(request.messages or ())
