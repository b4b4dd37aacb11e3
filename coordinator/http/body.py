"""Reads a JSON body within its limits and checks it against a record.

Never reads past the limit. A complaint names the field that is to blame.
"""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from .errors import ApiError, bad_field
from .fields import LACKING

READ_S = 60.0

T = TypeVar("T", bound=msgspec.Struct)
_AT = re.compile(r" - at `\$\.?([A-Za-z_0-9]*)")
_NAMED = re.compile(r"(?:unknown|required) field `([^`]*)`")


async def read_json(request: Request, kind: type[T], max_bytes: int) -> T:
    """Raises ApiError."""
    content = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if content.lower() != "application/json":
        raise ApiError(
            415, "unsupported_media_type", f"content-type is {content}; send application/json"
        )
    try:
        async with asyncio.timeout(READ_S):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, "timeout", f"the body did not come within {READ_S:g} s") from None
    return decode(body, kind)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {max_bytes} bytes")


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at = _NAMED.search(message) or _AT.search(message)
        param = at[1] if at is not None and at[1] else None
        if message.startswith("Object contains unknown field") and " - at " not in message:
            message = f"{param} is not a field that this service knows"
        elif param in LACKING:
            message = f"{param} has a value that this service does not support: leave it out"
        elif param is not None and not _NAMED.search(message):
            message = f"{param}: {message}"
        if param is None:
            raise ApiError(400, "invalid_request", message) from error
        raise bad_field(param, message) from error
    except RecursionError as error:
        raise ApiError(400, "invalid_request", "the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_request", f"the body is not JSON: {error}") from error
