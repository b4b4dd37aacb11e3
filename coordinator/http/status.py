"""The status page, the figures it polls, and /metrics.

Answers from snapshots and changes nothing. The page's own files hold no secret and stand open; the
page asks its reader for the token, if the figures need one. Nothing comes from elsewhere: the
content policy forbids it.
"""

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...runtime.types import Stamp
from ..history import Story
from ..service import CoordinatorService
from ..spans import Part, Span, handoff_spans, request_parts

PAGE_FILES = {  # path: (file, content type)
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status/page.css": ("page.css", "text/css; charset=utf-8"),
    "/status/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/status/timeline.js": ("timeline.js", "text/javascript; charset=utf-8"),
}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FIGURE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the page draws it. now_s: by the clock of the stamps, for what still lasts."""

    now_s: float
    number: int
    request_id: str
    exit_depths: tuple[int, ...]
    parts: tuple[Part, ...]
    spans: tuple[Span, ...]
    stamps: tuple[Stamp, ...]


def status_routes(service: CoordinatorService) -> list[BaseRoute]:
    return [*page_routes(), *figure_routes(service)]


def page_routes() -> list[BaseRoute]:
    folder = files(__package__) / "page"
    return [
        Route(path, _file((folder / name).read_bytes(), content_type))
        for path, (name, content_type) in PAGE_FILES.items()
    ]


def figure_routes(service: CoordinatorService) -> list[BaseRoute]:
    async def status(_: Request) -> Response:
        return _json(service.snapshot())

    async def one_request(request: Request) -> Response:
        number = request.path_params["number"]
        story = service.state.story(number)
        if story is None:
            return _json({"error": {"message": f"request {number} is not kept"}}, 404)
        return _json(timeline_of(story))

    async def metrics(request: Request) -> Response:
        text, content_type = service.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={**FIGURE_HEADERS, "Content-Type": content_type})

    return [
        Route("/status.json", status),
        Route("/status/requests/{number:int}", one_request),
        Route("/metrics", metrics),
    ]


def timeline_of(story: Story) -> RequestTimeline:
    return RequestTimeline(
        now_s=time.time(),
        number=story.number,
        request_id=story.request_id,
        exit_depths=story.exit_depths,
        parts=request_parts(story.stamps),
        spans=handoff_spans(story.stamps),
        stamps=story.stamps,
    )


def _file(content: bytes, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(content, headers={**PAGE_HEADERS, "Content-Type": content_type})

    return serve


def _json(value: object, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(value), status, media_type="application/json", headers=FIGURE_HEADERS
    )
