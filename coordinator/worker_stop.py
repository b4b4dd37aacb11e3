"""Tells workers to stop and waits until they have: prefill workers first, then decode workers.

Writers end before those whose memory they write. Who has no supervisor has nobody to say that it is
gone, so each is told again and again until it is known to be reaped, or its connection is closed
and, where that shows, its process is gone.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable

from ..connector.channel import SendResult
from ..connector.messages import Shutdown
from .registry import Worker

logger = logging.getLogger(__name__)

POLL_S = 0.05


async def stop_workers(
    workers: Iterable[Worker],
    send: Callable[[str, Shutdown], SendResult],
    *,
    reaped: Callable[[str], bool],
    local: bool,
    bound_s: float,
) -> None:
    """reaped: whether a supervisor has said so of an incarnation. local: their processes are of
    this machine, so that it can be seen whether they live."""
    waiting = {worker.incarnation: worker for worker in workers}
    end_s = time.monotonic() + bound_s
    while waiting:
        for incarnation, worker in list(waiting.items()):
            closed = send(incarnation, Shutdown()) is SendResult.GONE
            if reaped(incarnation) or (closed and not (local and _runs(worker.pid))):
                del waiting[incarnation]
        if time.monotonic() > end_s:
            break
        await asyncio.sleep(POLL_S)
    for worker in waiting.values():
        logger.warning("%s worker %s has not stopped", worker.role, worker.name)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
