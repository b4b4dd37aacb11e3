"""Lets in who knows the token; stands before every route but /health and the page's files.

Takes `Authorization: Bearer TOKEN`; compares in constant time and never logs what was sent.
"""

import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .status import PAGE_FILES

OPEN_PATHS = ("/health", *PAGE_FILES)  # the page holds nothing until its reader gives the token


class TokenGuard:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = _given(Request(scope).headers.get("authorization", ""))
            if not secrets.compare_digest(given, self._token):
                error = ApiError(
                    401,
                    "unauthorized",
                    "send this service's token as `Authorization: Bearer TOKEN`",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""
