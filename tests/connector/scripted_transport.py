"""A Transport whose WRITEs end when the test says so: held, reordered, failed, or never.

Copies real memory, entry by entry, so a test can compare bytes. Not held, a WRITE ends at the next
poll, as NIXL's would.
"""

import ctypes
import itertools

from rlt.connector.geometry import PoolDescription, segment_of
from rlt.connector.transport import Finished, Notification, Ticket, Write
from rlt.runtime.errors import ProtocolError, RltError


class Wire:
    """Which ends there are, and which agent faces which."""

    def __init__(self) -> None:
        self.ends: dict[str, ScriptedTransport] = {}


class ScriptedTransport:
    def __init__(self, wire: Wire, pool: PoolDescription, name: str, *, held: bool = False) -> None:
        self._wire = wire
        self._pool = pool
        self._name = name
        self.held = held
        self.running: dict[Ticket, Write] = {}
        self.targets: dict[str, PoolDescription] = {}
        self.sources: set[str] = set()
        self.inbox: list[Notification] = []
        self._ended: list[Finished] = []
        self._tickets = itertools.count(1)
        self.closed = False
        self.fault: RltError | None = None  # of the next pairing
        wire.ends[name] = self

    @property
    def pool(self) -> PoolDescription:
        return self._pool

    def agent_metadata(self) -> bytes:
        return self._name.encode()

    def add_target(self, target: str, metadata: bytes, pool: PoolDescription) -> None:
        self._maybe_fail()
        end = self._wire.ends.get(target)
        if metadata != f"{target}<{self._name}".encode() or end is None or end.pool != pool:
            raise ProtocolError(f"worker {target}: metadata and pool do not fit")
        self.targets[target] = pool

    def remove_target(self, target: str) -> None:
        assert all(write.target != target for write in self.running.values())
        del self.targets[target]

    def add_source(self, source: str, metadata: bytes) -> bytes:
        self._maybe_fail()
        if metadata != source.encode():
            raise ProtocolError(f"worker {source} sent the metadata of {metadata!r}")
        self.sources.add(source)
        return f"{self._name}<{source}".encode()

    def _maybe_fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def remove_source(self, source: str) -> None:
        self.sources.remove(source)

    def write(self, write: Write) -> Ticket:
        ticket = Ticket(next(self._tickets))
        self.running[ticket] = write
        if not self.held:
            self.finish(ticket)
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """The bytes land and the target hears of it."""
        write = self.running[ticket]
        end = self._wire.ends[write.target]
        try:
            for mine, theirs in zip(write.local, write.remote, strict=True):
                source, sink = segment_of(self._pool, mine), segment_of(end.pool, theirs)
                assert source.num_bytes == sink.num_bytes
                ctypes.memmove(sink.address, source.address, source.num_bytes)
        except ProtocolError as error:
            self.fail(ticket, str(error))
            return
        del self.running[ticket]
        self._ended.append(Finished(ticket, None))
        if self._name in end.sources:
            end.inbox.append(Notification(self._name, self._name, write.notice))

    def fail(self, ticket: Ticket, error: str) -> None:
        del self.running[ticket]
        self._ended.append(Finished(ticket, error))

    def poll_finished(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        told, self.inbox = self.inbox, []
        return told

    def close(self) -> None:
        self.closed = True
