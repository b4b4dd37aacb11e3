"""Log-probabilities in the two shapes that OpenAI's endpoints have.

Owns the running text offset of one choice (completions). Pure.
"""

from typing import Any

from ...runtime.interfaces import Delta
from .answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from .token_names import TokenNames


class CompletionLogprobsShape:
    """Of one choice: text_offset counts from its first token."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def of(self, delta: Delta) -> CompletionLogprobs:
        tokens = [self._names.text_of(token) for token in delta.token_ids]
        offsets = []
        for token in delta.token_ids:
            offsets.append(self._offset)
            self._offset += len(self._names.bytes_of(token).decode(errors="ignore"))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[entry.chosen for entry in delta.logprobs],
            top_logprobs=[
                {self._names.text_of(token): value for token, value in entry.top}
                | {chosen: entry.chosen}
                for chosen, entry in zip(tokens, delta.logprobs, strict=True)
            ],
            text_offset=offsets,
        )


class ChatLogprobsShape:
    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def of(self, delta: Delta) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._named(token, entry.chosen),
                    top_logprobs=[TopLogprob(**self._named(*top)) for top in entry.top],
                )
                for token, entry in zip(delta.token_ids, delta.logprobs, strict=True)
            ]
        )

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        spelt = self._names.bytes_of(token)
        return {"token": self._names.text_of(token), "logprob": logprob, "bytes": list(spelt)}
