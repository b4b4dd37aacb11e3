"""How a token is named in log-probabilities.

Owns nothing: the bytes come from the checkpoint's tokenizer. A token that is no whole character is
shown by its bytes, as OpenAI does; without a tokenizer, by its ID.
"""

from ..text import CheckpointTokenizer


class TokenNames:
    def __init__(self, tokenizer: CheckpointTokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        spelt = self.bytes_of(token_id)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
