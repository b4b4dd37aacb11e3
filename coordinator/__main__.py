"""`python -P -m rlt.coordinator '<CoordinatorConfig as JSON>'`: the coordinator's process.

Exit codes: 0 told to stop, 1 failed while serving, 2 could not start.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from ..runtime.errors import CheckpointError, ConfigError, RltError, ServiceError
from .config import CoordinatorConfig
from .predecessor import in_place_of_predecessor
from .runtime_dir import held_runtime_dir
from .service import CoordinatorService
from .text import CheckpointTokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    try:
        config = msgspec.json.decode(arguments[0], type=CoordinatorConfig)
    except (IndexError, msgspec.MsgspecError, RltError) as error:
        print(f"error: bad coordinator configuration: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s coordinator %(message)s"
    )
    try:
        with held_runtime_dir(config.runtime_dir) as folder:
            config = in_place_of_predecessor(config, folder)
            tokenizer = load_tokenizer(config.model)
            if tokenizer is None:
                logger.warning("no tokenizer in %s: token IDs only", config.model)
            uvloop.run(serve(config, folder, tokenizer))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:
        logger.error("%s", error)
        return 1
    return 0


async def serve(
    config: CoordinatorConfig, runtime_dir: Path, tokenizer: CheckpointTokenizer | None
) -> None:
    """Run one service until SIGTERM or SIGINT, or until a fault."""
    loop = asyncio.get_running_loop()
    fault: asyncio.Future[None] = loop.create_future()
    loop.set_exception_handler(lambda _, context: _note_fault(fault, context))
    service = CoordinatorService(config, runtime_dir, tokenizer)
    with contextlib.closing(service):
        service.bind()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        async with _front(service, config, tokenizer):
            await _run_or_fail(service.run(), fault)


def _front(
    service: CoordinatorService, config: CoordinatorConfig, tokenizer: CheckpointTokenizer | None
) -> AbstractAsyncContextManager[None]:
    if config.http is None:
        return contextlib.nullcontext()
    try:
        from .http.serving import http_front  # needs packages that a service without it does not
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the HTTP front needs {error.name}: install rlt[serve], or give --no-http"
        ) from error
    return http_front(service, config, tokenizer)


async def _run_or_fail(run: Coroutine[Any, Any, None], fault: "asyncio.Future[None]") -> None:
    task = asyncio.ensure_future(run)
    await asyncio.wait([task, fault], return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for ended in (fault, task):
        if ended.done() and not ended.cancelled():
            ended.result()


def _note_fault(fault: "asyncio.Future[None]", context: dict[str, Any]) -> None:
    error = context.get("exception")
    if "transport" in context or "protocol" in context:  # one HTTP connection's, not the service's
        logger.warning("%s", context.get("message"), exc_info=error)
        return
    logger.error("%s", context.get("message"), exc_info=error)
    if not fault.done():
        fault.set_exception(ServiceError(f"{context.get('message')}: {error!r}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
