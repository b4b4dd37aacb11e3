"""What the HTTP routes may use of the coordinator: a door in, and a few things to look at.

Owns nothing. Routes never reach past it into the service or its state.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...runtime.errors import InvalidRequest, RequestError
from ...runtime.interfaces import GenerateRequest
from ..config import CoordinatorConfig
from ..local_clients import LocalClient
from ..service import CoordinatorService
from ..text import CheckpointTokenizer
from .errors import ApiError
from .token_names import TokenNames


class Front:
    def __init__(
        self,
        service: CoordinatorService,
        config: CoordinatorConfig,
        tokenizer: CheckpointTokenizer | None,
    ) -> None:
        self.service = service  # for the routes of metrics and of the status page
        self.max_body_bytes = config.http_max_body_bytes
        self.names = TokenNames(tokenizer)
        self.started_s = int(time.time())
        self._tokenizer = tokenizer
        self._folder_name = Path(config.model).resolve().name if config.model else ""

    def open(self) -> LocalClient:
        return self.service.local.open()

    async def tokenized(self, asked: GenerateRequest) -> GenerateRequest:
        """The same with token IDs for its text or messages. Raises a RequestError."""
        if asked.prompt_token_ids is not None:
            return asked
        prompt = await self.service.prompts.start(asked)
        if isinstance(prompt, RequestError):
            raise prompt
        return msgspec.structs.replace(asked, text=None, messages=None, prompt_token_ids=prompt)

    async def decoded(self, token_ids: Sequence[int]) -> str:
        return await self.service.prompts.aside(self.tokenizer.decode, token_ids)

    @property
    def tokenizer(self) -> CheckpointTokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("this service has no tokenizer: it takes and gives token IDs only")
        return self._tokenizer

    @property
    def model(self) -> str:
        return self.service.state.model_name or self._folder_name

    def check_model(self, asked: str | None) -> None:
        if asked is not None and self.model and asked != self.model:
            raise ApiError(
                404, "model_not_found", f"{asked} is not served here; {self.model} is", "model"
            )

    @property
    def max_positions(self) -> int | None:
        """Of one request's prompt and output together; None while no worker has told."""
        return self.service.state.max_positions

    @property
    def not_ready(self) -> tuple[str, str] | None:
        """Code and reason; None when something can be served."""
        return self.service.state.not_ready
