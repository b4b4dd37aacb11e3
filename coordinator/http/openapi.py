"""The OpenAPI document, made from the records that check the requests and shape the answers.

Pure. Served at /openapi.json.
"""

from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answers import ChatChunk, ChatCompletion, Completion
from .errors import ErrorBody
from .fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .small_answers import Detokenized, Health, Model, Models, Tokenized

REF = "#/components/schemas/{name}"

EVENT: dict[str, Any] = {
    "type": "object",
    "description": "data: a chunk as JSON, [DONE], or an object with an error, which is last",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


class Operation(NamedTuple):
    path: str
    method: str
    summary: str
    body: type[msgspec.Struct] | None
    answer: type[msgspec.Struct]
    chunk: type[msgspec.Struct] | None
    errors: tuple[int, ...]


_BODY = (400, 401, 404, 408, 413, 415)
_GENERATION = (*_BODY, 429, 500, 503, 504)
OPERATIONS = (
    Operation(
        "/v1/completions", "post", "Continue a text or token IDs",
        CompletionRequest, Completion, Completion, _GENERATION,
    ),
    Operation(
        "/v1/chat/completions", "post", "Answer a conversation",
        ChatRequest, ChatCompletion, ChatChunk, _GENERATION,
    ),
    Operation("/v1/models", "get", "The one model served", None, Models, None, (401,)),
    Operation("/v1/models/{model}", "get", "A model by name", None, Model, None, (401, 404)),
    Operation(
        "/tokenize", "post", "Token IDs of a text or of messages",
        TokenizeRequest, Tokenized, None, (*_BODY, 429, 500),
    ),
    Operation(
        "/detokenize", "post", "The text of token IDs",
        DetokenizeRequest, Detokenized, None, (*_BODY, 500),
    ),
    Operation("/health", "get", "Whether a pair of workers can serve", None, Health, None, (503,)),
)  # fmt: skip


def openapi_route() -> Route:
    return Route("/openapi.json", _serve, methods=["GET"])


async def _serve(request: Request) -> Response:
    return Response(msgspec.json.encode(document()), media_type="application/json")


@cache
def document() -> dict[str, Any]:
    records: set[type[msgspec.Struct]] = {
        r for o in OPERATIONS for r in (o.body, o.answer, o.chunk) if r is not None
    }
    ordered = sorted(records | {ErrorBody}, key=lambda record: record.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rlt", "version": version("rlt")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": EVENT}
    error = {"application/json": {"schema": _ref(ErrorBody)}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "OK", "content": content},
            **{
                str(status): {"description": "error", "content": error}
                for status in operation.errors
            },
        },
    }
    if operation.body is not None:
        schema = {"application/json": {"schema": _ref(operation.body)}}
        described["requestBody"] = {"required": True, "content": schema}
    if 401 in operation.errors:
        described["security"] = [{}, {"token": []}]
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described


def _ref(record: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=record.__name__)}
