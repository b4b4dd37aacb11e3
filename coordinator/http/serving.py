"""The HTTP front of one service, from start to end.

Owns the order: the address is had before the service says that it is ready, and the server stops
after the service has ended what ran, so that every stream hears how it ended.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.routing import BaseRoute

from ...runtime.errors import ConfigError
from ..config import CoordinatorConfig
from ..service import CoordinatorService
from ..text import CheckpointTokenizer
from .app import build_app
from .front import Front
from .server import HttpServer
from .status import status_routes

logger = logging.getLogger(__name__)


@asynccontextmanager
async def http_front(
    service: CoordinatorService,
    config: CoordinatorConfig,
    tokenizer: CheckpointTokenizer | None,
    extra_routes: Sequence[BaseRoute] = (),
) -> AsyncIterator[None]:
    """config.http is an address. Raises ConfigError before anything is served."""
    assert config.http is not None
    front = Front(service, config, tokenizer)
    routes = [*status_routes(service), *extra_routes]
    app = build_app(front, token=read_token(config.http_token_file), extra_routes=routes)
    server = HttpServer()
    try:
        service.http_address = server.bind(config.http)
        logger.info("HTTP at %s", service.http_address)
        server.start(app)
        yield
    finally:
        await server.close()


def read_token(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"http_token_file {path} cannot be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"http_token_file {path} must hold one word of printable ASCII characters"
        )
    return token
