"""Queue, bound, deadlines and feedback of the worker side, over a transport the test drives."""

from collections.abc import Iterable

import pytest

from rlt.connector.nixl_transport import describe
from rlt.connector.transport import Notice, Notification, pack_notice
from rlt.connector.worker_connector import WorkerConnector
from rlt.runtime.errors import ProtocolError
from rlt.runtime.events import Reservation
from rlt.runtime.plans import Arrival, SendOrder, TransferFeedback
from rlt.runtime.types import AllocationId, Generation, TokenRange

from .clock import ManualClock
from .pools import block_bytes, canary_pools, geometry, random_pools
from .scripted_transport import ScriptedTransport, Wire

SHAPE = geometry()
BLOCK = SHAPE.block_bytes
TIMEOUT_S = 5.0


class Pair:
    """One sending and one receiving connector; the sender's WRITEs are held unless told."""

    def __init__(self, *, held: bool = True, max_inflight_bytes: int = 1 << 20) -> None:
        self.clock = ManualClock()
        self.source = random_pools(SHAPE, blocks=16, rows=4)
        self.sink = canary_pools(SHAPE, blocks=32, rows=8)
        wire = Wire()
        mine, theirs = (
            describe(pools.kv, pools.hidden, SHAPE) for pools in (self.source, self.sink)
        )
        self.wire = ScriptedTransport(wire, mine, "p", held=held)
        self.far_wire = ScriptedTransport(wire, theirs, "d")
        self.p, self.d = (
            WorkerConnector(
                transport,
                clock=self.clock,
                max_inflight_bytes=max_inflight_bytes,
                transfer_timeout_s=TIMEOUT_S,
            )
            for transport in (self.wire, self.far_wire)
        )
        metadata = self.d.accept_peer("p", self.p.agent_metadata(), self.p.pool)
        self.p.add_peer("d", metadata, self.d.pool)
        self._hub = wire

    def add_second_target(self) -> None:
        """Another decode worker, "e", with a pool of its own."""
        sink = canary_pools(SHAPE, blocks=32, rows=8)
        far = ScriptedTransport(self._hub, describe(sink.kv, sink.hidden, SHAPE), "e")
        target = WorkerConnector(
            far, clock=self.clock, max_inflight_bytes=1 << 20, transfer_timeout_s=TIMEOUT_S
        )
        metadata = target.accept_peer("p", self.p.agent_metadata(), self.p.pool)
        self.p.add_peer("e", metadata, target.pool)

    def finish_all(self) -> None:
        for ticket in list(self.wire.running):
            self.wire.finish(ticket)

    def running(self) -> list[int]:
        """First source block of each running WRITE, oldest first."""
        return [write.local[0] for write in self.wire.running.values()]


def order(
    sequence: int,
    blocks: Iterable[int] = (0,),
    *,
    generation: int = 1,
    peer: str = "d",
    peer_blocks: Iterable[int] | None = None,
) -> SendOrder:
    table = tuple(blocks)
    return SendOrder(
        generation=Generation(generation),
        peer=peer,
        sequence=sequence,
        depth=0,
        range=TokenRange(0, len(table) * SHAPE.block_size),
        blocks=table,
        peer_blocks=table if peer_blocks is None else tuple(peer_blocks),
        hidden_slot=0,
        peer_hidden_slot=0,
        allocation=9,
    )


def hidden_order(sequence: int, row: int, peer_row: int) -> SendOrder:
    return SendOrder(
        generation=Generation(1),
        peer="d",
        sequence=sequence,
        depth=None,
        range=TokenRange(6, 7),
        blocks=(),
        peer_blocks=(),
        hidden_slot=row,
        peer_hidden_slot=peer_row,
        allocation=9,
    )


def failures(feedback: TransferFeedback) -> list[tuple[int, bool]]:
    return [(failure.sequence, failure.terminal) for failure in feedback.failed]


def test_a_chunk_is_reported_posted_then_sent_and_arrives_with_its_allocation() -> None:
    pair = Pair()
    pair.p.post([order(0, [3, 4], peer_blocks=[20, 21]), hidden_order(1, 2, 7)])
    posted = pair.p.poll()
    assert [(p.sequence, p.num_bytes) for p in posted.posted] == [
        (0, 2 * BLOCK),
        (1, SHAPE.hidden_bytes),
    ]
    assert not posted.sent and not pair.d.poll()
    pair.finish_all()
    assert [s.sequence for s in pair.p.poll().sent] == [0, 1]
    at_s = pair.clock.wall_s()
    assert pair.d.poll().arrived == (
        Arrival(Generation(1), 9, 0, at_s, "p"),
        Arrival(Generation(1), 9, 1, at_s, "p"),
    )
    assert block_bytes(pair.sink, 21) == block_bytes(pair.source, 4)
    assert not pair.p.outstanding()


def test_a_write_that_ends_at_once_is_posted_and_sent_in_one_poll() -> None:
    pair = Pair(held=False)
    pair.p.post([order(0)])
    feedback = pair.p.poll()
    assert len(feedback.posted) == len(feedback.sent) == 1
    assert not pair.p.outstanding()


def test_writes_end_in_any_order_and_each_is_told_by_its_own_sequence() -> None:
    pair = Pair()
    pair.p.post([order(0, [0]), order(1, [1]), order(2, [2])])
    first, second, third = pair.wire.running
    for ticket in (third, first):
        pair.wire.finish(ticket)
    assert [s.sequence for s in pair.p.poll().sent] == [2, 0]
    assert [a.sequence for a in pair.d.poll().arrived] == [2, 0]
    pair.wire.finish(second)
    assert [s.sequence for s in pair.p.poll().sent] == [1]


def test_bytes_in_flight_stay_within_the_bound_and_orders_keep_their_order() -> None:
    pair = Pair(max_inflight_bytes=3 * BLOCK)
    pair.p.post([order(0, [0, 1]), order(1, [2]), order(2, [3]), order(3, [4])])
    assert pair.running() == [0, 2]
    assert pair.p.statistics()["bytes_in_flight"] == 3 * BLOCK
    pair.wire.finish(next(iter(pair.wire.running)))
    pair.p.poll()
    assert pair.running() == [2, 3, 4]
    assert pair.p.statistics()["writes_queued"] == 0


def test_a_small_order_does_not_pass_a_large_one_that_waits() -> None:
    pair = Pair(max_inflight_bytes=3 * BLOCK)
    pair.p.post([order(0, [0, 1]), order(1, [2, 3]), order(2, [4])])
    assert pair.running() == [0]


def test_a_target_that_takes_nothing_holds_up_only_itself() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.add_second_target()
    pair.p.post([order(0, [0]), order(1, [1])])
    pair.p.post([order(0, [2], generation=2, peer="e"), order(1, [3], generation=2, peer="e")])
    assert pair.running() == [0, 2]
    last = list(pair.wire.running)[-1]
    pair.wire.finish(last)
    pair.p.poll()
    assert pair.running() == [0, 3]


def test_a_reservation_outside_the_targets_pool_is_refused_before_it_is_used() -> None:
    pair = Pair()
    inside = Reservation(allocation=AllocationId(1), tables=((0, 1), (2, 31)), hidden_slot=7)
    pair.p.check_reservation("d", inside)
    for tables, slot in ((((0, 32),), 0), (((-1,),), 0), (((3,), (3,)), 0), (((3,),), 8)):
        with pytest.raises(ProtocolError):
            pair.p.check_reservation(
                "d", Reservation(allocation=AllocationId(1), tables=tables, hidden_slot=slot)
            )


def test_a_chunk_larger_than_the_bound_goes_alone() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0, [0]), order(1, [1, 2, 3]), order(2, [4])])
    seen = []
    while pair.p.outstanding():
        seen.append(pair.running())
        pair.finish_all()
        pair.p.poll()
    assert seen == [[0], [1], [4]]


@pytest.mark.parametrize(
    "bad",
    [
        order(1, [16]),
        order(1, [1], peer_blocks=[32]),
        order(1, [1], peer_blocks=[-1]),
        order(1, [1, 2], peer_blocks=[5, 5]),
        order(1, [1, 2], peer_blocks=[5]),
        hidden_order(1, 4, 0),
        hidden_order(1, 0, 8),
        order(0),
    ],
)
def test_a_wrong_order_is_refused_before_anything_of_its_batch_is_posted(bad: SendOrder) -> None:
    pair = Pair()
    with pytest.raises(ProtocolError):
        pair.p.post([order(0), bad])
    assert not pair.wire.running and not pair.p.outstanding()
    pair.p.post([order(0)])
    assert pair.running() == [0]


def test_a_sequence_is_never_posted_twice_not_even_when_it_was_dropped() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0), order(1)])
    assert pair.p.drop_queued(Generation(1)) == (1,)
    for sequence in (0, 1):
        with pytest.raises(ProtocolError, match="before"):
            pair.p.post([order(sequence)])
    pair.p.post([order(0, generation=2)])


def test_dropped_orders_are_never_posted_and_posted_ones_run_to_their_end() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0), order(1), order(0, [7], generation=2), order(2)])
    assert pair.p.drop_queued(Generation(1)) == (1, 2)
    assert pair.p.in_flight(Generation(1)) == 1
    pair.finish_all()
    assert [s.sequence for s in pair.p.poll().sent] == [0]
    assert pair.p.in_flight(Generation(1)) == 0
    assert pair.running() == [7]


def test_a_failed_write_is_told_with_its_reason_and_frees_its_bytes() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0), order(1, [5])])
    pair.wire.fail(next(iter(pair.wire.running)), "nixlRemoteDisconnectError: gone")
    feedback = pair.p.poll()
    assert failures(feedback) == [(0, True)]
    assert "nixlRemoteDisconnectError" in feedback.failed[0].reason
    assert pair.running() == [5]
    assert pair.p.statistics()["writes_failed"] == 1


def test_a_write_past_its_deadline_fails_but_is_kept_until_it_ends() -> None:
    pair = Pair()
    pair.p.post([order(0)])
    pair.clock.advance(TIMEOUT_S - 0.01)
    assert not pair.p.poll().failed
    pair.clock.advance(0.02)
    assert failures(pair.p.poll()) == [(0, False)]
    assert pair.p.statistics()["handles_stuck"] == 1
    assert pair.p.in_flight(Generation(1)) == 1 and pair.p.outstanding()
    assert not pair.p.poll()
    pair.finish_all()
    feedback = pair.p.poll()
    assert failures(feedback) == [(0, True)] and not feedback.sent
    assert pair.p.statistics()["handles_stuck"] == 0
    assert pair.p.in_flight(Generation(1)) == 0 and not pair.p.outstanding()


def test_a_stuck_write_does_not_hold_back_the_others_for_ever() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0), order(0, [6], generation=2)])
    assert pair.running() == [0]
    pair.clock.advance(TIMEOUT_S)
    pair.p.poll()
    assert pair.running() == [0, 6]
    pair.finish_all()
    pair.p.poll()
    assert pair.p.statistics()["bytes_in_flight"] == 0


def test_orders_to_a_peer_that_is_not_paired_fail_by_name() -> None:
    pair = Pair()
    pair.p.post([order(0, peer="somebody"), order(0, generation=2)])
    feedback = pair.p.poll()
    assert [(f.generation, f.terminal) for f in feedback.failed] == [(1, True)]
    assert "somebody" in feedback.failed[0].reason
    assert [p.generation for p in feedback.posted] == [2]


def test_removing_a_peer_fails_its_queue_and_lets_it_go_after_its_last_write() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0), order(1)])
    pair.p.remove_peer("d")
    assert failures(pair.p.poll()) == [(1, True)]
    assert "d" in pair.wire.targets
    with pytest.raises(ProtocolError, match="drained"):
        pair.p.add_peer("d", b"", pair.d.pool)
    pair.finish_all()
    assert [s.sequence for s in pair.p.poll().sent] == [0]
    assert "d" not in pair.wire.targets


def test_pairing_again_changes_nothing_and_removing_again_neither() -> None:
    pair = Pair()
    again = pair.d.accept_peer("p", pair.p.agent_metadata(), pair.p.pool)
    assert again == pair.d.accept_peer("p", pair.p.agent_metadata(), pair.p.pool)
    pair.p.add_peer("d", again, pair.d.pool)
    for _ in range(2):
        pair.d.remove_peer("p")
        pair.p.remove_peer("d")
    assert not pair.far_wire.sources and not pair.wire.targets


def test_a_peer_of_another_shape_is_refused_on_both_sides() -> None:
    pair = Pair()
    other = canary_pools(geometry("bfloat16", block_size=8), blocks=4, rows=1)
    pool = describe(other.kv, other.hidden, other.geometry)
    with pytest.raises(ProtocolError, match="dtype"):
        pair.p.add_peer("other", b"", pool)
    with pytest.raises(ProtocolError, match="block_size"):
        pair.d.accept_peer("other", b"", pool)


def test_malformed_or_forged_notifications_are_counted_and_dropped() -> None:
    pair = Pair()
    good = pack_notice(Notice(Generation(1), 9, 0))
    pair.far_wire.inbox += [
        Notification("p", "p", b"short"),
        Notification("p", "somebody", good),
        Notification("p", "p", good),
    ]
    assert [a.sequence for a in pair.d.poll().arrived] == [0]
    assert pair.d.statistics()["notifications_malformed"] == 2
    assert pair.d.statistics()["notifications_received"] == 1


def test_counters_add_up_to_the_bytes_that_were_sent() -> None:
    pair = Pair(held=False)
    pair.p.post([order(0, [0, 1]), order(1, [2]), hidden_order(2, 0, 0)])
    while pair.p.outstanding():
        pair.p.poll()
    counted = pair.p.statistics()
    total = 3 * BLOCK + SHAPE.hidden_bytes
    assert counted["bytes_posted"] == counted["bytes_sent"] == total
    assert counted["writes_posted"] == counted["writes_done"] == 3


def test_closing_posts_nothing_of_the_queue() -> None:
    pair = Pair(max_inflight_bytes=BLOCK)
    pair.p.post([order(0), order(1)])
    pair.p.close()
    pair.finish_all()
    assert pair.wire.closed and not pair.wire.running
