"""What a connector asks of the wire: the Transport Protocol, its records, the notification's bytes.

Owns no state. The product has one implementation, NIXL; tests script another.
A ticket comes back from poll_finished exactly once, and only when its bytes can move no more.
"""

import struct
from typing import NewType, Protocol

import msgspec

from ..runtime.types import Generation
from .geometry import PoolDescription

Ticket = NewType("Ticket", int)  # one WRITE of one transport; never reused

_NOTICE = struct.Struct("<QQI")  # generation, allocation, sequence


class Write(msgspec.Struct, frozen=True, gc=False):
    """Copy entries `local` of this pool onto entries `remote` of the target's pool, then notify.

    Both lists were checked against the pools (geometry.py), and name equal sizes in equal order.
    """

    target: str
    local: list[int]
    remote: list[int]
    notice: bytes


class Finished(msgspec.Struct, frozen=True):
    """A WRITE reached its end. error: why it failed, or None."""

    ticket: Ticket
    error: str | None


class Notification(msgspec.Struct, frozen=True):
    """What came with a finished WRITE to the agent that faces `source`.

    sender: the writing agent's own name; a well-behaved one is called as its worker is.
    """

    source: str
    sender: str
    payload: bytes


class Notice(msgspec.Struct, frozen=True):
    """Which chunk a notification speaks of."""

    generation: Generation
    allocation: int
    sequence: int


class Transport(Protocol):
    """One worker's end of the wire. Peers are named by incarnation: a target is written to, a
    source writes. Every call is made from one thread, which also drives progress."""

    @property
    def pool(self) -> PoolDescription: ...
    def agent_metadata(self) -> bytes:
        """Of the agent that writes from here, for the targets' add_source."""
        ...

    def add_target(self, target: str, metadata: bytes, pool: PoolDescription) -> None:
        """Prepare to write to a peer. metadata: what its add_source gave for this worker. Raises
        ProtocolError if the two do not match, TransportError if it may work later."""
        ...

    def remove_target(self, target: str) -> None:
        """Forget a target. None of its tickets may be unfinished."""
        ...

    def add_source(self, source: str, metadata: bytes) -> bytes:
        """Let a peer write here, through an agent of its own; that agent's metadata. Raises as
        add_target does."""
        ...

    def remove_source(self, source: str) -> None:
        """Destroy the agent that faces this source. The other agents go on."""
        ...

    def write(self, write: Write) -> Ticket:
        """Start one WRITE. A failure, even an immediate one, is told by poll_finished. Over shared
        memory the copy itself may happen inside this call."""
        ...

    def poll_finished(self) -> list[Finished]:
        """Drive progress and tell which WRITEs have ended since the last call."""
        ...

    def poll_notifications(self) -> list[Notification]:
        """Drive progress and hand out what has been notified since the last call."""
        ...

    def close(self) -> None: ...


def pack_notice(notice: Notice) -> bytes:
    return _NOTICE.pack(notice.generation, notice.allocation, notice.sequence)


def unpack_notice(payload: bytes) -> Notice | None:
    """None when the bytes are no notice."""
    if len(payload) != _NOTICE.size:
        return None
    generation, allocation, sequence = _NOTICE.unpack(payload)
    return Notice(Generation(generation), allocation, sequence)
