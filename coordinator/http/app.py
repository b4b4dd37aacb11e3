"""The application: every route, what stands before them, and how errors look.

`build_app` is the one place where routes come together. Routes that are not part of the API (the
metrics, the status page) are given to it; they stand behind the same token.
"""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from ...runtime.errors import RltError
from .api import Api
from .auth import TokenGuard
from .counted import CountAnswers
from .errors import ApiError, on_api_error, on_disconnect, on_fault, on_http_exception, on_rlt_error
from .front import Front
from .openapi import openapi_route


def build_app(
    front: Front, *, token: str | None = None, extra_routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """token: None lets everybody in."""
    before = [Middleware(CountAnswers, metrics=front.service.metrics)]
    if token is not None:
        before.append(Middleware(TokenGuard, token=token))
    return Starlette(
        routes=[*Api(front).routes(), openapi_route(), *extra_routes],
        middleware=before,
        exception_handlers={
            ApiError: on_api_error,
            RltError: on_rlt_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
            Exception: on_fault,
        },
    )
