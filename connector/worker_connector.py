"""Worker-side half of a connector: pairs, orders turned into WRITEs, notifications into arrivals.

Owns the peers' pools. Never touches a tensor or a message; which chunks make a request complete is
the scheduler side's business.
A block number becomes an address only after it was checked against the pool it is meant for.
"""

from collections.abc import Sequence

from ..runtime.errors import ProtocolError
from ..runtime.events import Reservation
from ..runtime.interfaces import Clock
from ..runtime.plans import Arrival, SendOrder, TransferFeedback
from ..runtime.types import Generation
from .geometry import (
    PoolDescription,
    check_blocks,
    check_compatible,
    hidden_entry,
    kv_bytes,
    kv_entries,
)
from .outbox import Outbox, Outgoing
from .transport import Notice, Transport, Write, pack_notice, unpack_notice


class WorkerConnector:
    """The WorkerConnector Protocol, for both roles: a target is a worker that this one writes to,
    a source one that writes here."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Clock,
        max_inflight_bytes: int,
        transfer_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._outbox = Outbox(
            transport,
            clock=clock,
            max_inflight_bytes=max_inflight_bytes,
            transfer_timeout_s=transfer_timeout_s,
        )
        self._targets: dict[str, PoolDescription] = {}
        self._leaving: set[str] = set()  # removed targets whose handles have not all ended
        self._sources: dict[str, bytes] = {}  # metadata of the agent that faces each
        self._notifications_received = 0
        self._notifications_malformed = 0

    @property
    def pool(self) -> PoolDescription:
        return self._transport.pool

    def agent_metadata(self) -> bytes:
        """Of the agent that writes from here: what a target needs to accept this worker."""
        return self._transport.agent_metadata()

    def add_peer(self, incarnation: str, metadata: bytes, pool: PoolDescription) -> None:
        """Pair with a target. metadata: what its accept_peer answered."""
        check_compatible(self.pool, pool)
        if incarnation in self._leaving:
            raise ProtocolError(f"decode worker {incarnation} was removed and is not drained yet")
        if incarnation not in self._targets:
            self._transport.add_target(incarnation, metadata, pool)
            self._targets[incarnation] = pool

    def check_reservation(self, incarnation: str, reservation: Reservation) -> None:
        """Refuse what a target promised if it lies outside its own pool."""
        pool = self._targets[incarnation]
        check_blocks(pool, [block for row in reservation.tables for block in row])
        hidden_entry(pool, reservation.hidden_slot)

    def accept_peer(self, incarnation: str, metadata: bytes, pool: PoolDescription) -> bytes:
        """Pair with a source; the metadata of the agent made for it. Asked again, same answer."""
        check_compatible(self.pool, pool)
        if incarnation not in self._sources:
            self._sources[incarnation] = self._transport.add_source(incarnation, metadata)
        return self._sources[incarnation]

    def remove_peer(self, incarnation: str) -> None:
        """Queued orders to it fail; posted ones run to their end, counted, though nobody may wait
        for it. An agent that faced it is gone when this returns."""
        if self._sources.pop(incarnation, None) is not None:
            self._transport.remove_source(incarnation)
        if self._targets.pop(incarnation, None) is not None:
            self._outbox.fail_queued(incarnation, f"decode worker {incarnation} is gone")
            self._leaving.add(incarnation)
            self._let_targets_go()

    def draining(self, incarnation: str) -> bool:
        """Whether WRITEs to a target that was removed still run: it cannot be added before."""
        return incarnation in self._leaving

    def post(self, orders: Sequence[SendOrder]) -> None:
        """Queue orders and start what the bound allows. A wrong block number or a repeated sequence
        raises before any of them is queued; a peer that has gone fails its orders."""
        items = [self._checked(order) for order in orders if order.peer in self._targets]
        self._outbox.claim_sequences(orders)
        self._outbox.queue(items)
        for order in orders:
            if order.peer not in self._targets:
                self._outbox.fail_unposted(order, f"no pair with decode worker {order.peer}")
        self._outbox.start_queued()

    def poll(self) -> TransferFeedback:
        self._outbox.collect()
        self._let_targets_go()
        self._outbox.start_queued()
        arrived = self._arrivals()
        told = self._outbox.take_report()
        return TransferFeedback(tuple(told.posted), tuple(told.sent), tuple(told.failed), arrived)

    def outstanding(self) -> bool:
        """Whether WRITEs are queued or posted, or feedback waits. Says nothing about receiving."""
        return self._outbox.outstanding()

    def in_flight(self, generation: Generation) -> int:
        """Posted WRITEs of this generation that have not ended, late ones included."""
        return self._outbox.in_flight(generation)

    def drop_queued(self, generation: Generation) -> tuple[int, ...]:
        """Take back what is not posted yet; posted WRITEs run to their end."""
        return self._outbox.drop_queued(generation)

    def forget(self, generation: Generation) -> None:
        """Nothing more will be ordered for this generation, which has nothing queued or posted."""
        self._outbox.forget(generation)

    def statistics(self) -> dict[str, float]:
        return {
            **self._outbox.statistics(),
            "notifications_received": self._notifications_received,
            "notifications_malformed": self._notifications_malformed,
        }

    def close(self) -> None:
        self._outbox.clear_queue()
        self._transport.close()

    def _checked(self, order: SendOrder) -> Outgoing:
        mine, theirs = self.pool, self._targets[order.peer]
        if order.depth is None:
            local = [hidden_entry(mine, order.hidden_slot)]
            remote = [hidden_entry(theirs, order.peer_hidden_slot)]
            num_bytes = mine.geometry.hidden_bytes
        else:
            local = kv_entries(mine, order.range, order.blocks)
            remote = kv_entries(theirs, order.range, order.peer_blocks)
            num_bytes = kv_bytes(mine.geometry, order.range)
        notice = pack_notice(Notice(order.generation, order.allocation, order.sequence))
        return Outgoing(order, Write(order.peer, local, remote, notice), num_bytes)

    def _let_targets_go(self) -> None:
        """A target's prepared list must outlive the WRITEs that use it."""
        for target in self._leaving - self._outbox.busy_targets():
            self._leaving.discard(target)
            self._transport.remove_target(target)

    def _arrivals(self) -> tuple[Arrival, ...]:
        arrived: list[Arrival] = []
        for told in self._transport.poll_notifications():
            notice = unpack_notice(told.payload)
            if notice is None or told.sender != told.source:
                self._notifications_malformed += 1
                continue
            self._notifications_received += 1
            arrived.append(
                Arrival(
                    notice.generation,
                    notice.allocation,
                    notice.sequence,
                    self._clock.wall_s(),
                    told.source,
                )
            )
        return tuple(arrived)
