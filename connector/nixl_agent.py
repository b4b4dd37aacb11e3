"""One NIXL agent with both pools registered: how it is made, what it may raise, how it ends.

Owns the agent's configuration and its registrations. Knows no peer and no transfer.
No progress thread: it spins at a full core, idle or not. Whoever waits for something polls.
"""

import logging
from typing import Any

from nixl import _bindings  # type: ignore[import-untyped]
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-untyped]

from .geometry import PoolDescription

NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for kind in vars(_bindings).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
)


def _route_logging() -> None:
    """nixl gives its logger a handler of its own on stdout and tells of every agent at INFO."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)


_route_logging()


class PoolAgent:
    def __init__(self, name: str, pool: PoolDescription) -> None:
        self.name = name
        self.nixl: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        regions = (
            (pool.kv_base, pool.kv_bytes, pool.device_id, ""),
            (pool.hidden_base, pool.hidden_pool_bytes, pool.device_id, ""),
        )
        self._registered = self.nixl.register_memory(list(regions), pool.memory)

    def metadata(self) -> bytes:
        return bytes(self.nixl.get_agent_metadata())

    def destroy(self) -> None:
        """The last step: handles, prepared lists and remote agents are gone already."""
        self.nixl.deregister_memory(self._registered)
        del self.nixl, self._registered  # the last reference: its destructor ends the agent
