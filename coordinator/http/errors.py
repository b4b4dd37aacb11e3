"""Errors as OpenAI's API shapes them, with the status code that each deserves.

Owns the table from rlt's error codes to status codes. A 500 says that rlt itself is at fault, never
that a caller was wrong.
"""

import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.errors import RltError

STATUS = {
    "invalid_request": 400,
    "too_long": 400,
    "duplicate_request": 400,
    "overloaded": 429,
    "no_prefill_worker": 503,
    "no_decode_worker": 503,
    "worker_lost": 503,
    "transfer_failed": 503,
    "slow_client": 503,
    "shutting_down": 503,
    "deadline_exceeded": 504,
}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_FIELD = re.compile(r"^(?:the )?([a-z_]+)(?:\[\d+\])? (?:is|has) ")
RETRY_AFTER_S = "1"


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """Ends one HTTP request. param: the field that is to blame."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(
            ErrorDetail(
                message=message, type=_KINDS.get(status, "server_error"), param=param, code=code
            )
        )

    def response(self) -> Response:
        headers = {"retry-after": RETRY_AFTER_S} if self.status == 429 else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(
            msgspec.json.encode(self.body), self.status, headers, media_type="application/json"
        )


def bad_field(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_request", message, param)


def api_error(error: RltError) -> ApiError:
    """rlt's own errors name fields as its records do; here they have no prefix."""
    message = re.sub(r"\b(?:sampling|exit)\.(?=[a-z])", "", str(error))
    message = message.replace("prompt_token_ids", "prompt")
    return ApiError(STATUS.get(error.code, 500), error.code, message, _param(error.code, message))


def _param(code: str, message: str) -> str | None:
    if code == "too_long":
        return "max_tokens" if "max_tokens" in message else "prompt"
    field = _FIELD.match(message) if code == "invalid_request" else None
    return field[1] if field is not None else None


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_rlt_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RltError)
    return api_error(error).response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(status, _HTTP_CODES.get(status, "invalid_request"), message).response()
    response.headers.update(error.headers or {})
    return response


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The caller left while it was still asking: nobody hears this."""
    return Response(status_code=400)


async def on_fault(request: Request, error: Exception) -> Response:
    """A fault of rlt's own. The server logs it with its trace."""
    return ApiError(500, "internal", "the server failed; its log says more").response()
