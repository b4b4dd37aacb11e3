"""The wire: NIXL WRITEs between registered pools (DRAM over UCX here; VRAM where tensors are).

Owns agents, prepared lists and transfer handles. Decides nothing: no queue, no deadline.
A handle is released only when it is terminal: a running one, released, may still write.

One agent writes to all targets: the pool is registered once, one call drives all progress, and a
lost target fails only its own handles. Each source gets an agent of its own, because destroying it
is part of the fence that makes memory reusable after that source is dead.
"""

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..runtime.errors import ProtocolError, TransportError
from ..runtime.types import KVGeometry
from .geometry import PoolDescription, strides
from .nixl_agent import MISMATCHES, NIXL_ERRORS, PoolAgent, text, why
from .transport import Finished, Notification, Ticket, Write

logger = logging.getLogger(__name__)

_STILL_WRITING: set[object] = set()  # closed, but collecting them would release running handles


@dataclass(frozen=True)
class Target:
    agent: str
    entries: Any  # prepared list of its pool


@dataclass
class Running:
    handle: Any
    error: str | None = None  # set: failed, but could not be released yet


class NixlTransport:
    """The Transport Protocol."""

    def __init__(self, kv: Tensor, hidden: Tensor, geometry: KVGeometry, *, name: str) -> None:
        """kv: [num_blocks, layers, K|V, block_size, kv_heads, head_dim]; hidden: [rows,
        hidden_size]; both contiguous. name: this worker's incarnation."""
        self._tensors = (kv, hidden)  # registered memory stays alive as long as this does
        self._pool = describe(kv, hidden, geometry)
        self._name = name
        self._writer: PoolAgent | None = None
        self._entries: Any = None  # prepared list of this pool, on the writing agent
        self._targets: dict[str, Target] = {}
        self._sources: dict[str, PoolAgent] = {}
        self._running: dict[Ticket, Running] = {}
        self._ended: list[Finished] = []
        self._tickets = itertools.count(1)

    @property
    def pool(self) -> PoolDescription:
        return self._pool

    def agent_metadata(self) -> bytes:
        return self._writing().metadata()

    def add_target(self, target: str, metadata: bytes, pool: PoolDescription) -> None:
        agent = self._writing().load(metadata)
        try:
            self._targets[target] = Target(agent, self._entries_of(target, agent, pool))
        except (ProtocolError, TransportError):
            if all(agent != known.agent for known in self._targets.values()):
                _forget(self._writing().nixl, agent)
            raise

    def _entries_of(self, target: str, agent: str, pool: PoolDescription) -> Any:
        misfit = f"worker {target}: its agent metadata and pool description do not fit"
        if agent != _facing(target, self._name):
            raise ProtocolError(f"{misfit}: it is of agent {agent!r}")
        try:
            return self._writing().nixl.prep_xfer_dlist(agent, _entry_list(pool), pool.memory)
        except MISMATCHES as error:
            raise ProtocolError(f"{misfit}: {error}") from error
        except NIXL_ERRORS as error:
            raise TransportError(f"worker {target} cannot be written to: {why(error)}") from error

    def remove_target(self, target: str) -> None:
        gone = self._targets.pop(target)
        nixl = self._writing().nixl
        nixl.release_dlist_handle(gone.entries)
        _forget(nixl, gone.agent)

    def add_source(self, source: str, metadata: bytes) -> bytes:
        agent = PoolAgent(_facing(self._name, source), self._pool)
        try:
            name = agent.load(metadata)
        except (ProtocolError, TransportError) as error:
            agent.destroy()
            raise type(error)(f"worker {source}: {error}") from error
        if name != source:
            _forget(agent.nixl, name)
            agent.destroy()
            raise ProtocolError(f"worker {source} sent the metadata of agent {name!r}")
        self._sources[source] = agent
        return agent.metadata()

    def remove_source(self, source: str) -> None:
        agent = self._sources.pop(source)
        _forget(agent.nixl, source)
        agent.destroy()

    def write(self, write: Write) -> Ticket:
        ticket = Ticket(next(self._tickets))
        nixl = self._writing().nixl
        target = self._targets[write.target]
        try:
            handle = nixl.make_prepped_xfer(
                "WRITE", self._entries, write.local, target.entries, write.remote, write.notice
            )
        except NIXL_ERRORS as error:
            self._ended.append(Finished(ticket, why(error)))
            return ticket
        running = self._running[ticket] = Running(handle)
        self._look(ticket, running, nixl.transfer)
        return ticket

    def poll_finished(self) -> list[Finished]:
        if self._writer is not None:
            nixl = self._writer.nixl
            nixl.get_new_notifs()  # progress, also when nothing runs: a last notification may wait
            for ticket, running in list(self._running.items()):
                self._look(ticket, running, nixl.check_xfer_state)
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        return [
            Notification(source, text(sender), payload)
            for source, agent in self._sources.items()
            for sender, payloads in agent.nixl.get_new_notifs().items()
            for payload in payloads
        ]

    def close(self) -> None:
        """Handles, prepared lists, remote agents, registrations. While handles still run, their
        agent stays: call again once they have ended, or leave them to the process's end."""
        for source in list(self._sources):
            self.remove_source(source)
        self.poll_finished()
        if self._running:
            logger.warning("%d transfers still run; their agent is kept", len(self._running))
            _STILL_WRITING.add(self)
            return
        _STILL_WRITING.discard(self)
        if self._writer is not None:
            for target in list(self._targets):
                self.remove_target(target)
            self._writer.nixl.release_dlist_handle(self._entries)
            self._writer.destroy()
            self._entries = self._writer = None

    def _writing(self) -> PoolAgent:
        if self._writer is None:
            writer = PoolAgent(self._name, self._pool)
            try:
                self._entries = writer.nixl.prep_xfer_dlist(
                    "", _entry_list(self._pool), self._pool.memory
                )
            except NIXL_ERRORS as error:
                writer.destroy()
                raise TransportError(f"cannot list this pool: {why(error)}") from error
            self._writer = writer
        return self._writer

    def _look(self, ticket: Ticket, running: Running, ask: Any) -> None:
        """Post or check one handle; when it has ended, release it and say so."""
        if running.error is None:
            try:
                status = ask(running.handle)
            except NIXL_ERRORS as error:
                running.error = why(error)
            else:
                if status == "PROC":
                    return
                running.error = None if status == "DONE" else f"NIXL says {status}"
        try:
            running.handle.release()
        except NIXL_ERRORS as error:
            logger.warning("transfer %d (%s) cannot end yet: %s", ticket, running.error, error)
            running.error = running.error or why(error)
            return
        del self._running[ticket]
        self._ended.append(Finished(ticket, running.error))


def describe(kv: Tensor, hidden: Tensor, geometry: KVGeometry) -> PoolDescription:
    pool = PoolDescription(
        kv_base=kv.data_ptr(),
        hidden_base=hidden.data_ptr(),
        num_blocks=kv.shape[0],
        hidden_rows=hidden.shape[0],
        geometry=geometry,
        memory="VRAM" if kv.is_cuda else "DRAM",
        device_id=max(kv.get_device(), 0),
    )
    if not (kv.is_contiguous() and hidden.is_contiguous() and kv.device == hidden.device):
        raise ProtocolError("pools must be contiguous and on one device")
    if kv.nbytes != pool.kv_bytes or hidden.nbytes != pool.hidden_pool_bytes:
        raise ProtocolError(f"pools of {kv.nbytes} and {hidden.nbytes} bytes are not of {geometry}")
    return pool


def _entry_list(pool: PoolDescription) -> NDArray[np.uint64]:
    """NIXL's strided form: address, length, device, stride, count."""
    rows = [[s.base, s.entry_bytes, pool.device_id, s.entry_bytes, s.count] for s in strides(pool)]
    return np.array(rows, dtype=np.uint64)


def _facing(worker: str, source: str) -> str:
    """The name of the agent with which a worker faces one source."""
    return f"{worker}<{source}"


def _forget(nixl: Any, agent: str) -> None:
    """A remote agent whose process is dead may be gone already."""
    try:
        nixl.remove_remote_agent(agent)
    except NIXL_ERRORS as error:
        logger.warning("forgetting agent %s: %s", agent, why(error))
