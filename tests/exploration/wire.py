"""One worker's end of the NIXL wire: what it posts and hears, with nothing between the ends.

Owns which agents face which sources. What a WRITE does, and when, is decided outside: a worker's
memory is written by land(), and its tickets end when it is told.
"""

import msgspec

from rlt.connector.geometry import PoolDescription
from rlt.connector.transport import Finished, Notification, Ticket, Write, unpack_notice
from rlt.runtime.errors import ProtocolError


class Posted(msgspec.Struct, frozen=True):
    """A WRITE was posted. place: entries of the pools, as pairs (mine, theirs)."""

    target: str
    ticket: int
    place: tuple[tuple[int, int], ...]
    notice: bytes


class WireEnd:
    """The Transport Protocol."""

    def __init__(self, pool: PoolDescription, name: str) -> None:
        self._pool = pool
        self._name = name
        self.targets: set[str] = set()
        self.sources: set[str] = set()
        self.posted: list[Posted] = []  # to be taken by the world
        self.running: dict[int, str] = {}
        self._ended: list[Finished] = []
        self._told: list[Notification] = []

    @property
    def pool(self) -> PoolDescription:
        return self._pool

    def agent_metadata(self) -> bytes:
        return self._name.encode()

    def add_target(self, target: str, metadata: bytes, pool: PoolDescription) -> None:
        if metadata != f"{target}<{self._name}".encode():
            raise ProtocolError(f"worker {target}: metadata does not fit")
        self.targets.add(target)

    def remove_target(self, target: str) -> None:
        assert target not in self.running.values(), "its prepared list must outlive its WRITEs"
        self.targets.remove(target)

    def add_source(self, source: str, metadata: bytes) -> bytes:
        if metadata != source.encode():
            raise ProtocolError(f"worker {source} sent the metadata of {metadata!r}")
        self.sources.add(source)
        return f"{self._name}<{source}".encode()

    def remove_source(self, source: str) -> None:
        self.sources.remove(source)

    def write(self, write: Write) -> Ticket:
        notice = unpack_notice(write.notice)
        assert notice is not None and write.target in self.targets
        ticket = (notice.generation % 4096) * 64 + notice.sequence  # the same in every history
        assert ticket not in self.running, "posted twice"
        self.running[ticket] = write.target
        place = tuple(zip(write.local, write.remote, strict=True))
        self.posted.append(Posted(write.target, ticket, place, write.notice))
        return Ticket(ticket)

    def end(self, ticket: int, error: str | None) -> None:
        del self.running[ticket]
        self._ended.append(Finished(Ticket(ticket), error))

    def notify(self, source: str, notice: bytes) -> None:
        if source in self.sources:
            self._told.append(Notification(source, source, notice))

    def poll_finished(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        told, self._told = self._told, []
        return told

    def close(self) -> None: ...
