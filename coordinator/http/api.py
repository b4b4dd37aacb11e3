"""The endpoints of the API, each a few lines: read, check, answer.

Owns nothing but the front. What takes long happens in the response (generation.py).
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.interfaces import GenerateRequest
from ...runtime.types import RequestId
from .asked import chat_call, chat_messages, completion_call
from .body import read_json
from .errors import ApiError, bad_field
from .fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .front import Front
from .generation import Generation
from .shapes import ChatShape, CompletionShape
from .small_answers import Detokenized, Health, Model, Models, Tokenized


class Api:
    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
        ]

    async def completions(self, request: Request) -> Response:
        asked = await read_json(request, CompletionRequest, self._front.max_body_bytes)
        call = await completion_call(asked, self._front)
        shape = CompletionShape(call, asked, self._front.model, self._front.names)
        return Generation(self._front, call, shape)

    async def chat(self, request: Request) -> Response:
        asked = await read_json(request, ChatRequest, self._front.max_body_bytes)
        call = await chat_call(asked, self._front)
        shape = ChatShape(call, asked, self._front.model, self._front.names)
        return Generation(self._front, call, shape)

    async def models(self, request: Request) -> Response:
        return _json(Models(data=(self._model(),) if self._front.model else ()))

    async def model(self, request: Request) -> Response:
        self._front.check_model(request.path_params["model"])
        return _json(self._model())

    def _model(self) -> Model:
        front = self._front
        return Model(id=front.model, created=front.started_s, max_model_len=front.max_positions)

    async def tokenize(self, request: Request) -> Response:
        asked = await read_json(request, TokenizeRequest, self._front.max_body_bytes)
        self._front.check_model(asked.model)
        if (asked.prompt is None) is (asked.messages is None):
            raise bad_field("prompt", "give exactly one of prompt and messages")
        messages = None if asked.messages is None else chat_messages(asked.messages)
        plain = GenerateRequest(request_id=RequestId(""), text=asked.prompt, messages=messages)
        tokens = (await self._front.tokenized(plain)).prompt_token_ids or ()
        return _json(
            Tokenized(count=len(tokens), max_model_len=self._front.max_positions, tokens=tokens)
        )

    async def detokenize(self, request: Request) -> Response:
        asked = await read_json(request, DetokenizeRequest, self._front.max_body_bytes)
        self._front.check_model(asked.model)
        tokenizer = self._front.tokenizer
        for place, token in enumerate(asked.tokens):
            if token >= tokenizer.vocab_size:
                limit = tokenizer.vocab_size - 1
                raise bad_field("tokens", f"tokens[{place}] is {token}; the highest is {limit}")
        return _json(Detokenized(prompt=await self._front.decoded(asked.tokens)))

    async def health(self, request: Request) -> Response:
        """200 only while a pair of workers can serve."""
        missing = self._front.not_ready
        if missing is not None:
            code, reason = missing
            raise ApiError(503, code, reason)
        return _json(Health())


def _json(record: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")
