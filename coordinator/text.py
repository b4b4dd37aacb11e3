"""Text to token IDs and back, from a checkpoint's own tokenizer files.

Owns nothing that changes except each stream's few pending tokens. Never imports transformers or
torch. A stream never gives out half a character; special tokens (EOS) are no part of the text.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from ..runtime.errors import CheckpointError, InvalidRequest
from ..runtime.interfaces import ChatMessage
from .token_bytes import ByteTable

_CONTEXT_TOKENS = 6  # shown tokens that stay in the window: decoders look a little back
_MAX_PENDING_TOKENS = 32  # bytes that still form no character after so many never will
_BROKEN = "\ufffd"


class CheckpointTokenizer:
    """tokenizer.json plus the chat template of a Hugging Face checkpoint folder."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._bytes = ByteTable(byte_level="ByteLevel" in str(self._tokenizer.decoder))
        settings = _read_json(Path(folder) / "tokenizer_config.json")
        self._special = {
            name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token")
        }
        self._template = _compile(_template_source(Path(folder), settings))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """special: with what the tokenizer itself puts around a text. Other threads run on."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The chat template over `messages`, open for the assistant's answer."""
        if self._template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template: send text or prompt_token_ids"
            )
        try:
            text = self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=True,
                **self._special,
            )
        except Exception as error:  # the template is the checkpoint's code: it may raise anything
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, special=False)

    def decoder(self) -> "TokenStream":
        return TokenStream(self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are shown."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """What this token alone stands for; a character may be spread over several."""
        return self._bytes.of(self._tokenizer.id_to_token(token_id) or "")

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())


class TokenStream:
    """Text of one output, piece by piece."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # some shown tokens, then those not wholly shown
        self._shown = 0  # characters of the window's text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; what may be half a character waits."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        whole = text.rstrip(_BROKEN)
        if text != whole and len(self._window) > _CONTEXT_TOKENS + _MAX_PENDING_TOKENS:
            whole = text
        piece = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if whole == text and len(self._window) > 2 * _CONTEXT_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._shown = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """What is still pending, broken or not. Nothing may be pushed afterwards."""
        piece = self._decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def load_tokenizer(folder: str | Path | None) -> CheckpointTokenizer | None:
    """None if there is no folder or no tokenizer in it: token IDs still work then."""
    if folder is None or not (Path(folder) / "tokenizer.json").exists():
        return None
    return CheckpointTokenizer(folder)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _token_text(value: Any) -> str:
    """A special token stands as text or as an object with its text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile(source: str | None) -> jinja2.Template | None:
    if source is None:
        return None
    # A checkpoint is data: its template runs in a sandbox that cannot reach or change anything.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template cannot be compiled: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
