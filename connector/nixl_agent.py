"""One NIXL agent with both pools registered: how it is made, what it may raise, how it ends.

Owns the agent's configuration and its registrations. Knows no peer and no transfer. Metadata
carries a digest: NIXL and UCX believe what they load, and damaged bytes can end the process.
No progress thread: it spins at a full core, idle or not. Whoever waits for something polls.
"""

import hashlib
import logging
from typing import Any

from nixl import _bindings  # type: ignore[import-untyped]
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-untyped]

from ..runtime.errors import ProtocolError, TransportError
from .geometry import PoolDescription

DIGEST_BYTES = 16

NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for kind in vars(_bindings).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
)
MISMATCHES = (  # what was loaded or described does not fit: no other try can change that
    _bindings.nixlInvalidParamError,
    _bindings.nixlMismatchError,
    _bindings.nixlNotFoundError,
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
        """Raises TransportError: this worker has no agent to give, perhaps later."""
        self.name = name
        regions = (
            (pool.kv_base, pool.kv_bytes, pool.device_id, ""),
            (pool.hidden_base, pool.hidden_pool_bytes, pool.device_id, ""),
        )
        try:
            self.nixl: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
            self._registered = self.nixl.register_memory(list(regions), pool.memory)
        except NIXL_ERRORS as error:
            raise TransportError(f"cannot make agent {name}: {why(error)}") from error

    def metadata(self) -> bytes:
        """For another agent's load()."""
        metadata = bytes(self.nixl.get_agent_metadata())
        return _digest(metadata) + metadata

    def load(self, sealed: bytes) -> str:
        """Make another agent known; its name. Raises ProtocolError for bytes that are none or do
        not fit, TransportError if it may work later."""
        digest, metadata = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
        if digest != _digest(metadata):
            raise ProtocolError("damaged agent metadata")
        try:
            name = self.nixl.add_remote_agent(metadata)
        except MISMATCHES as error:
            raise ProtocolError(f"bad agent metadata: {error}") from error
        except NIXL_ERRORS as error:
            raise TransportError(f"its agent cannot be reached: {why(error)}") from error
        return text(name)

    def destroy(self) -> None:
        """The last step: handles, prepared lists and remote agents are gone already."""
        self.nixl.deregister_memory(self._registered)
        del self.nixl, self._registered  # the last reference: its destructor ends the agent


def text(name: bytes | str) -> str:
    """NIXL gives names as either; a stranger's may be any bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _digest(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=DIGEST_BYTES).digest()
