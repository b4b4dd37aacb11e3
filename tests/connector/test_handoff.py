"""The handoff's two state machines, driven by events: orders, duplicates, losses, cancels."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.connector import ended_sends, receiver, sender
from rlt.connector.handoff import ClosedGenerations, coverage_fault
from rlt.connector.messages import Ack, ChunkSpec, Commit, Stop, WriterEnded
from rlt.connector.receiver import Receiver
from rlt.connector.sender import Sender
from rlt.runtime.errors import ProtocolError
from rlt.runtime.events import Reservation
from rlt.runtime.interfaces import (
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
    SendEnded,
)
from rlt.runtime.plans import (
    Arrival,
    FinishedRange,
    SendFailure,
    SendOrder,
    SendProgress,
    TransferFeedback,
)
from rlt.runtime.types import AllocationId, Generation, KVGeometry, Stamp, TokenRange

from .clock import ManualClock

GEOMETRY = KVGeometry(
    num_layers=2,
    num_depths=3,
    num_kv_heads=2,
    head_dim=4,
    hidden_size=8,
    block_size=4,
    dtype="float32",
)
G = Generation(7)
P, D = "prefill-0-aa", "decode-0-bb"
PROMPT = 10


def reservation(prompt: int = PROMPT, cached: int = 0) -> Reservation:
    blocks = GEOMETRY.plane_blocks(prompt)
    tables = tuple(tuple(range(d * blocks, (d + 1) * blocks)) for d in range(3))
    return Reservation(
        allocation=AllocationId(5), tables=tables, hidden_slot=1, cached_tokens=cached
    )


def tables(prompt: int = PROMPT) -> tuple[tuple[int, ...], ...]:
    blocks = GEOMETRY.plane_blocks(prompt)
    return tuple(tuple(100 + d * blocks + i for i in range(blocks)) for d in range(3))


def finished(depth: int, start: int, stop: int, *, hidden: bool = False) -> FinishedRange:
    return FinishedRange(G, depth, TokenRange(start, stop), hidden, 1.0)


def posted(sequence: int) -> TransferFeedback:
    return TransferFeedback(posted=(SendProgress(G, sequence, 64, 1.0),))


def sent(sequence: int) -> TransferFeedback:
    return TransferFeedback(sent=(SendProgress(G, sequence, 64, 1.0),))


def arrived(sequence: int, allocation: int = 5) -> TransferFeedback:
    return TransferFeedback(arrived=(Arrival(G, allocation, sequence, 1.0, P),))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dropped() -> list[Generation]:
    return []


@pytest.fixture
def p(clock: ManualClock, dropped: list[Generation]) -> Sender:
    def drop(generation: Generation) -> tuple[int, ...]:
        dropped.append(generation)
        return ()

    machine = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=drop)
    machine.open(G, D, reservation(), PROMPT)
    return machine


@pytest.fixture
def d(clock: ManualClock) -> Receiver:
    machine = Receiver(GEOMETRY, clock, worker="decode-0")
    machine.open(G, P, reservation(), PROMPT)
    return machine


def one_chunk_prompt(p: Sender) -> list[SendOrder]:
    p.on_prefill_admitted(G, tables(), 3)
    for depth in range(3):
        p.on_ranges_finished([finished(depth, 0, PROMPT, hidden=depth == 2)])
    return p.take_orders()


def full_commit(**changes: object) -> Commit:
    chunks = tuple(ChunkSpec(depth, depth, TokenRange(0, PROMPT)) for depth in range(3))
    hidden = ChunkSpec(3, None, TokenRange(PROMPT - 1, PROMPT))
    fields = {"generation": G, "allocation": 5, "chunks": (*chunks, hidden), **changes}
    return Commit(**fields)  # type: ignore[arg-type]


# Sender


def test_a_depth_leaves_as_soon_as_its_loop_is_done(p: Sender) -> None:
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, PROMPT)])
    [order] = p.take_orders()
    assert (order.sequence, order.depth, order.range) == (0, 0, TokenRange(0, PROMPT))
    assert order.blocks == tables()[0] and order.peer_blocks == reservation().tables[0]
    assert (order.peer, order.allocation) == (D, 5)


def test_blocks_of_a_later_chunk_start_at_the_block_that_holds_its_first_position(
    p: Sender,
) -> None:
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(1, 6, 10)])
    [order] = p.take_orders()
    assert order.blocks == tables()[1][1:] and order.peer_blocks == reservation().tables[1][1:]


def test_positions_that_d_holds_already_are_not_sent(clock: ManualClock) -> None:
    p = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=lambda _: ())
    p.open(G, D, reservation(cached=8), PROMPT)
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, 4), finished(0, 4, 10)])
    [order] = p.take_orders()
    assert order.range == TokenRange(8, 10) and order.peer_blocks == reservation().tables[0][2:]


def test_layout_shared_sends_its_one_plane_block_by_block(clock: ManualClock) -> None:
    """Positions finish one at a time; WRITEs of single positions would be all overhead."""
    shared = msgspec.structs.replace(GEOMETRY, layout="shared")
    p = Sender(shared, clock, worker="prefill-0", drop_queued=lambda _: ())
    plane = Reservation(allocation=AllocationId(5), tables=((7, 8, 9),), hidden_slot=1)
    p.open(G, D, plane, PROMPT)
    p.on_prefill_admitted(G, ((1, 2, 3),), 3)
    for position in range(PROMPT):
        p.on_ranges_finished([finished(0, position, position + 1, hidden=position == PROMPT - 1)])
    orders = p.take_orders()
    assert [(o.depth, o.range, o.blocks, o.peer_blocks) for o in orders[:-1]] == [
        (0, TokenRange(0, 4), (1,), (7,)),
        (0, TokenRange(4, 8), (2,), (8,)),
        (0, TokenRange(8, 10), (3,), (9,)),
    ]
    assert orders[-1].depth is None
    chunks = [ChunkSpec(o.sequence, o.depth, o.range) for o in orders]
    assert coverage_fault(chunks, shared.num_planes, TokenRange(0, PROMPT)) is None


def test_a_prefix_that_p_had_cached_is_sent_as_far_as_d_lacks_it(clock: ManualClock) -> None:
    p = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=lambda _: ())
    p.open(G, D, reservation(cached=4), PROMPT)
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(depth, 0, 8) for depth in range(3)])
    p.on_ranges_finished([finished(depth, 8, 10, hidden=depth == 2) for depth in range(3)])
    orders = p.take_orders()
    assert [(o.depth, o.range) for o in orders[:3]] == [(d, TokenRange(4, 8)) for d in range(3)]
    chunks = [ChunkSpec(o.sequence, o.depth, o.range) for o in orders]
    assert coverage_fault(chunks, 3, TokenRange(4, PROMPT)) is None


def test_commit_follows_only_when_every_chunk_is_posted(p: Sender) -> None:
    orders = one_chunk_prompt(p)
    assert [order.depth for order in orders] == [0, 1, 2, None]
    for sequence in range(3):
        p.on_feedback(posted(sequence))
    assert not any(isinstance(m, Commit) for _, m in p.take_messages())
    p.on_feedback(posted(3))
    commits = [m for _, m in p.take_messages() if isinstance(m, Commit)]
    assert [c.chunks for c in commits] == [full_commit().chunks]


def test_source_blocks_come_back_after_ack_and_every_handle_never_after_one_alone(
    p: Sender,
) -> None:
    one_chunk_prompt(p)
    for sequence in range(4):
        p.on_feedback(posted(sequence))
    for sequence in range(3):
        p.on_feedback(sent(sequence))
    p.on_ack(D, G)
    assert p.take_events() == []
    p.on_feedback(sent(3))
    assert p.take_events() == [SendEnded(G, None)]
    assert p.live() == ()


def test_an_unanswered_commit_is_repeated(p: Sender, clock: ManualClock) -> None:
    one_chunk_prompt(p)
    for sequence in range(4):
        p.on_feedback(posted(sequence))
    p.take_messages()
    p.tick()
    assert p.take_messages() == []
    clock.advance(sender.REPEAT_S)
    p.tick()
    assert [type(m) for _, m in p.take_messages()] == [Commit]


def test_a_cancel_posts_nothing_more_and_ends_when_handles_are_terminal(
    p: Sender, dropped: list[Generation]
) -> None:
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, PROMPT)])
    p.take_orders()
    p.on_feedback(posted(0))
    p.on_ranges_finished([finished(1, 0, PROMPT)])
    p.cancel(G)
    assert p.take_orders() == [] and dropped == [G]
    p.on_ranges_finished([finished(2, 0, PROMPT, hidden=True)])
    assert p.take_orders() == [] and p.take_events() == []
    p.on_feedback(sent(0))
    assert p.take_events() == [SendEnded(G, None)]
    assert p.take_messages()[-1] == (D, WriterEnded(generation=G, posted=1))


def test_a_repeated_stop_gets_the_same_answer_after_the_end(p: Sender) -> None:
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, PROMPT)])
    p.on_feedback(posted(0))
    p.on_stop(D, G)
    p.on_feedback(sent(0))
    first = p.take_messages()[-1]
    p.on_stop(D, G)
    assert p.take_messages() == [first] == [(D, WriterEnded(generation=G, posted=1))]


def test_a_prefill_that_comes_after_its_stop_is_refused(clock: ManualClock) -> None:
    p = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=lambda _: ())
    p.on_stop(D, G)
    assert p.take_messages() == [(D, WriterEnded(generation=G, posted=0))]
    assert p.is_over(D, G)
    with pytest.raises(ProtocolError):
        p.open(G, D, reservation(), PROMPT)
    assert not p.is_over("decode-9-zz", G), "nobody stops what goes to another"
    p.open(G, "decode-9-zz", reservation(), PROMPT)


def test_what_was_handed_over_counts_as_posted_though_nobody_said_so_yet(p: Sender) -> None:
    """Its WRITE may run already: a Stop that comes in between must not be told that nothing was."""
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, PROMPT)])
    p.take_orders()
    p.on_stop(D, G)
    assert p.take_events() == [] and p.take_messages() == []
    p.on_feedback(posted(0))
    p.on_feedback(sent(0))
    assert p.take_events() == [SendEnded(G, "stopped by the decode worker")]
    assert p.take_messages() == [(D, WriterEnded(generation=G, posted=1))]


def test_what_was_taken_back_before_it_was_posted_is_not_waited_for(clock: ManualClock) -> None:
    p = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=lambda _: (1, 2, 3))
    p.open(G, D, reservation(), PROMPT)
    one_chunk_prompt(p)
    p.on_feedback(posted(0))
    p.cancel(G)
    p.on_feedback(sent(0))
    assert p.take_messages()[-1] == (D, WriterEnded(generation=G, posted=1))


def test_nothing_waits_for_handles_to_a_decode_worker_that_is_gone(p: Sender) -> None:
    one_chunk_prompt(p)
    p.on_feedback(posted(0))
    assert p.on_peer_gone("decode-9-zz") == []
    assert p.on_peer_gone(D) == [G]
    assert p.take_events() == [SendEnded(G, f"decode worker {D} is gone")] and p.live() == ()
    assert not any(isinstance(m, WriterEnded) for _, m in p.take_messages()), "they may run still"
    p.on_feedback(sent(0))
    p.on_feedback(TransferFeedback(failed=(SendFailure(G, 1, "disconnected", True),)))
    assert p.late == 2 and p.take_events() == [] and p.take_broken() == []


def test_a_commit_unanswered_for_too_long_breaks_the_pair(p: Sender, clock: ManualClock) -> None:
    one_chunk_prompt(p)
    for sequence in range(4):
        p.on_feedback(posted(sequence))
        p.on_feedback(sent(sequence))
    for _ in range(int(sender.ACK_TIMEOUT_S)):
        assert p.take_broken() == []
        clock.advance(1.0)
        p.tick()
    [(peer, reason)] = p.take_broken()
    assert peer == D and "commit" in reason
    assert p.take_failures() == [(G, reason)] and p.take_events() == [SendEnded(G, reason)]
    assert p.take_messages()[-1] == (D, WriterEnded(generation=G, posted=4))


def test_a_prefill_worker_that_stood_still_itself_blames_nobody(
    p: Sender, clock: ManualClock
) -> None:
    """The Ack waits in its socket, and is read after this tick."""
    one_chunk_prompt(p)
    for sequence in range(4):
        p.on_feedback(posted(sequence))
    clock.advance(2 * sender.ACK_TIMEOUT_S)
    p.tick()
    assert p.take_broken() == []
    p.on_ack(D, G)


def test_a_failed_write_stops_everything_on_its_way_there_and_nothing_else(p: Sender) -> None:
    waits, elsewhere = Generation(8), Generation(9)
    p.open(waits, D, reservation(), PROMPT)
    p.open(elsewhere, "decode-9-zz", reservation(), PROMPT)
    one_chunk_prompt(p)
    p.on_feedback(posted(0))
    p.on_feedback(TransferFeedback(failed=(SendFailure(G, 0, "cut", True),)))
    assert p.take_broken() == [(D, "cut")]
    assert sorted(p.take_failures()) == [(G, "cut"), (waits, "cut")]
    assert p.live() == (G, elsewhere), "what was handed over of G may be posted"
    p.on_feedback(TransferFeedback(failed=tuple(SendFailure(G, n, "x", True) for n in (1, 2, 3))))
    assert sorted(p.take_events(), key=lambda event: event.generation) == [
        SendEnded(G, "cut"),
        SendEnded(waits, "cut"),
    ]
    assert p.take_failures() == [] and p.phase(elsewhere) is sender.Phase.WAITING


def test_a_decode_worker_cannot_fill_the_memory_with_what_it_stops(clock: ManualClock) -> None:
    """What is not noted is not answered, so that it proves nothing; the others go on."""
    p = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=lambda _: ())
    most = ended_sends.MOST_EARLY
    for number in range(most + 50):
        p.on_stop(D, Generation(number))
    assert p.refused == 50 and len(p.take_messages()) == most and len(p.closed) == 0
    p.on_stop(D, Generation(0))
    assert p.take_messages() == [(D, WriterEnded(generation=Generation(0), posted=0))]
    p.on_stop("decode-9-zz", G)
    assert p.take_messages() == [("decode-9-zz", WriterEnded(generation=G, posted=0))]
    p.forget_below(Generation(most))
    p.on_stop(D, Generation(most + 1))
    assert len(p.take_messages()) == 1 and p.is_over(D, Generation(3))


def test_a_stop_is_answered_long_after_the_coordinator_has_forgotten(p: Sender) -> None:
    """The link was cut meanwhile: D's memory is withdrawn until it hears this."""
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, PROMPT)])
    p.take_orders()
    p.on_feedback(posted(0))
    p.on_feedback(sent(0))
    p.cancel(G)
    p.forget_below(Generation(1 << 40))
    p.take_messages()
    p.on_stop(D, G)
    never_came = Generation(G + 1)
    p.on_stop(D, never_came)
    assert p.take_messages() == [
        (D, WriterEnded(generation=G, posted=1)),
        (D, WriterEnded(generation=never_came, posted=0)),
    ]


def test_what_was_forgotten_is_not_guessed() -> None:
    ended = ended_sends.EndedSends()
    for number in range(ended_sends.MOST_ENDED + 2):
        ended.end(D, Generation(number), number)
    assert ended.posted(D, Generation(1)) is None and ended.posted("decode-9-zz", G) == 0
    assert ended.posted(D, Generation(2)) == 2


def test_a_failed_write_fails_the_generation_and_keeps_blocks_until_it_is_terminal(
    p: Sender,
) -> None:
    p.on_prefill_admitted(G, tables(), 3)
    p.on_ranges_finished([finished(0, 0, PROMPT)])
    p.take_orders()
    p.on_feedback(posted(0))
    p.on_feedback(TransferFeedback(failed=(SendFailure(G, 0, "timed out", False),)))
    assert p.take_failures() == [(G, "timed out")] and p.take_events() == []
    p.on_feedback(TransferFeedback(failed=(SendFailure(G, 0, "cut", True),)))
    assert p.take_events() == [SendEnded(G, "timed out")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tables": reservation(4).tables}, "too short"),
        ({"tables": ()}, "0 planes"),
        ({"tables": reservation().tables[:2]}, "2 planes"),
        ({"tables": (*reservation().tables, (1, 2, 3))}, "4 planes"),
        ({"cached_tokens": PROMPT}, "cached"),
        ({"cached_tokens": -1}, "cached"),
        ({"allocation": -1}, "allocation"),
        ({"allocation": 1 << 64}, "allocation"),
    ],
)
def test_a_reservation_that_cannot_take_the_prompt_is_refused_before_anything_is_sent(
    clock: ManualClock, changes: dict[str, object], words: str
) -> None:
    p = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=lambda _: ())
    with pytest.raises(ProtocolError, match=words):
        p.open(G, D, msgspec.structs.replace(reservation(), **changes), PROMPT)
    p.open(G, D, reservation(), PROMPT)


def test_a_decode_worker_cannot_stop_what_goes_to_another(p: Sender) -> None:
    one_chunk_prompt(p)
    assert not p.on_stop("decode-9-zz", G)
    assert p.phase(G) is sender.Phase.SENDING and p.take_messages() == []
    assert p.on_stop(D, G)


# Receiver


def test_everything_in_whatever_order_means_received(d: Receiver) -> None:
    for order in ([0, "c", 3, 1, 2], ["c", 3, 2, 1, 0], [3, 1, 0, 2, "c"]):
        machine = Receiver(GEOMETRY, ManualClock(), worker="decode-0")
        machine.open(G, P, reservation(), PROMPT)
        for step, event in enumerate(order):
            assert machine.take_events() == [], f"too early, at step {step} of {order}"
            if event == "c":
                machine.on_commit(P, full_commit())
            else:
                machine.on_feedback(arrived(int(event)))
        assert machine.take_events() == [ReceiveComplete(G)]
        assert machine.take_messages() == [(P, Ack(generation=G))]


def test_a_sequence_notified_twice_does_not_stand_for_another(d: Receiver) -> None:
    d.on_commit(P, full_commit())
    for sequence in (0, 1, 1, 2, 2):
        d.on_feedback(arrived(sequence))
    assert d.take_events() == []


def test_notifications_of_another_allocation_are_no_evidence(d: Receiver) -> None:
    d.on_commit(P, full_commit())
    for sequence in range(4):
        d.on_feedback(arrived(sequence, allocation=4))
    assert d.take_events() == [] and d.late == 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gap", lambda c: (c[0], c[1], ChunkSpec(2, 2, TokenRange(0, 9)), c[3])),
        ("overlap", lambda c: (*c, ChunkSpec(4, 1, TokenRange(3, 5)))),
        ("no hidden state", lambda c: c[:3]),
        ("unknown depth", lambda c: (c[0], c[1], ChunkSpec(2, 9, TokenRange(0, 10)), c[3])),
        ("sequence twice", lambda c: (c[0], c[1], c[2], ChunkSpec(0, None, TokenRange(9, 10)))),
        ("beyond the prompt", lambda c: (c[0], c[1], ChunkSpec(2, 2, TokenRange(0, 11)), c[3])),
    ],
)
def test_a_commit_that_does_not_cover_exactly_the_reservation_fails(
    d: Receiver, name: str, change: Callable[..., tuple[ChunkSpec, ...]]
) -> None:
    for sequence in range(5):
        d.on_feedback(arrived(sequence))
    d.on_commit(P, full_commit(chunks=change(full_commit().chunks)))
    assert ReceiveComplete(G) not in d.take_events(), name
    assert [g for g, _ in d.take_failures()] == [G]


def test_a_commit_from_a_stranger_is_not_believed(d: Receiver) -> None:
    for sequence in range(4):
        d.on_feedback(arrived(sequence))
    d.on_commit("prefill-9-zz", full_commit())
    assert d.take_events() == [] and d.take_messages() == [] and d.late == 1
    d.on_writer_ended("prefill-9-zz", WriterEnded(generation=G, posted=0))
    stolen = Arrival(G, 5, 0, 1.0, "prefill-9-zz")
    d.on_feedback(TransferFeedback(arrived=(stolen,)))
    assert d.late == 3 and d.phase(G) is receiver.Phase.RECEIVING


def test_a_repeated_commit_after_the_end_is_acknowledged_again(d: Receiver) -> None:
    for sequence in range(4):
        d.on_feedback(arrived(sequence))
    d.on_commit(P, full_commit())
    d.take_messages()
    d.on_commit(P, full_commit())
    assert d.take_messages() == [(P, Ack(generation=G))]


def test_cancelled_blocks_come_back_only_when_the_writer_ended_and_all_it_posted_arrived(
    d: Receiver, clock: ManualClock
) -> None:
    d.on_feedback(arrived(0))
    d.cancel(G, writer_never_started=False)
    assert d.take_messages() == [(P, Stop(generation=G))] and d.take_events() == []
    clock.advance(receiver.REPEAT_S)
    d.tick()
    assert d.take_messages() == [(P, Stop(generation=G))]
    d.on_writer_ended(P, WriterEnded(generation=G, posted=2))
    assert d.take_events() == []
    d.on_feedback(arrived(1))
    assert d.take_events() == [ReceiveEnded(G)]


def test_a_cancel_before_any_prefill_was_sent_frees_at_once(d: Receiver) -> None:
    d.cancel(G, writer_never_started=True)
    assert d.take_events() == [ReceiveEnded(G)] and d.take_messages() == []


def test_a_writer_that_ended_without_its_bytes_ever_arriving_leads_to_quarantine(
    d: Receiver, clock: ManualClock
) -> None:
    d.on_writer_ended(P, WriterEnded(generation=G, posted=1))
    assert [g for g, _ in d.take_failures()] == [G]
    clock.advance(receiver.SETTLE_S)
    d.tick()
    assert d.take_events() == [Quarantined(G)]


def test_memory_of_a_dead_writer_is_withdrawn_until_it_is_fenced(d: Receiver) -> None:
    d.on_feedback(arrived(0))
    d.on_peer_gone(P)
    assert d.take_events() == [Quarantined(G)] and d.quarantined_from() == (P,)
    assert [g for g, _ in d.take_failures()] == [G]
    assert d.take_messages() == [] and not d.expecting(), "nobody is left to be asked or heard"
    assert d.phase(G) is receiver.Phase.QUARANTINED and G in d.closed
    d.on_writer_dead("prefill-9-zz")
    assert d.take_events() == []
    d.on_writer_dead(P)
    assert d.take_events() == [QuarantineEnded(G)] and d.quarantined_from() == ()
    assert d.phase(G) is None and G in d.closed
    d.on_writer_dead(P)
    d.on_peer_gone(P)
    assert d.take_events() == []


def test_a_reaped_writer_is_no_fence_while_the_agent_that_faced_it_lives(d: Receiver) -> None:
    """Its last bytes may wait in a socket, and would land at the next progress call."""
    d.on_writer_dead(P)
    assert d.take_events() == [] and d.phase(G) is receiver.Phase.RECEIVING
    d.on_peer_gone(P)
    assert d.take_events() == [ReceiveEnded(G)]
    assert [g for g, _ in d.take_failures()] == [G]


def test_an_unproved_stop_lets_the_request_go_and_is_repeated_until_it_heals(
    d: Receiver, clock: ManualClock
) -> None:
    d.cancel(G, writer_never_started=False)
    clock.advance(receiver.SETTLE_S)
    d.tick()
    assert d.take_events() == [Quarantined(G)] and d.take_failures() == []
    assert d.expecting(), "the writer lives: it may still be heard"
    d.take_messages()
    clock.advance(receiver.REPEAT_S)
    d.tick()
    assert d.take_messages() == [(P, Stop(generation=G))]
    d.on_writer_ended(P, WriterEnded(generation=G, posted=1))
    assert d.take_events() == []
    d.on_feedback(arrived(0))
    assert d.take_events() == [QuarantineEnded(G)]
    assert d.statistics()["quarantines"] == 1 and d.statistics()["quarantines_live"] == 0


def test_a_quarantine_ends_when_the_commit_and_everything_in_it_has_come(
    d: Receiver, clock: ManualClock
) -> None:
    d.cancel(G, writer_never_started=False)
    clock.advance(receiver.SETTLE_S)
    d.tick()
    d.take_events()
    d.on_commit(P, full_commit())
    for sequence in range(4):
        assert d.take_events() == []
        d.on_feedback(arrived(sequence))
    assert d.take_events() == [QuarantineEnded(G)], "and nothing is activated"
    d.take_messages()
    d.on_commit(P, full_commit())
    assert d.take_messages() == [(P, Stop(generation=G))]


def test_a_quarantine_ends_when_the_writer_never_started(d: Receiver) -> None:
    d.on_peer_gone(P)
    d.take_events()
    d.cancel(G, writer_never_started=True)
    assert d.take_events() == [QuarantineEnded(G)]


def test_a_writer_that_is_listed_again_is_asked_again_and_must_be_fenced_again(
    d: Receiver, clock: ManualClock
) -> None:
    d.on_peer_gone(P)
    d.on_peer_back(P)
    clock.advance(receiver.REPEAT_S)
    d.tick()
    assert d.take_messages() == [(P, Stop(generation=G))]
    d.on_writer_dead(P)
    assert d.take_events() == [Quarantined(G)]
    d.on_peer_gone(P)
    assert d.take_events() == [QuarantineEnded(G)]


def test_figures_that_no_honest_peer_sends_are_counted_and_prove_nothing(d: Receiver) -> None:
    d.cancel(G, writer_never_started=False)
    d.on_feedback(arrived(3))
    most = 3 * PROMPT + 1
    for posted in (-1, 0, most + 1, 1 << 63):
        d.on_writer_ended(P, WriterEnded(generation=G, posted=posted))
    for sequence in (most, 1 << 31):
        d.on_feedback(arrived(sequence))
    assert d.refused == 6 and d.take_events() == []
    chunks = tuple(ChunkSpec(n, 0, TokenRange(0, 1)) for n in range(most + 1))
    d.on_commit(P, full_commit(chunks=chunks))
    d.on_commit(P, full_commit(stamps=(Stamp("x" * 1000, 1.0),)))
    assert d.refused == 8 and d.phase(G) is receiver.Phase.STOPPING


def test_a_writer_that_dies_after_everything_arrived_is_not_missed(d: Receiver) -> None:
    for sequence in range(4):
        d.on_feedback(arrived(sequence))
    d.on_commit(P, full_commit())
    d.on_peer_gone(P)
    assert d.take_events() == [ReceiveComplete(G)] and d.take_failures() == []


def test_closed_generations_are_forgotten_once_the_coordinator_is_done_with_them() -> None:
    closed: ClosedGenerations[int] = ClosedGenerations()
    for number in range(10):
        closed.close(Generation(number), number)
    closed.forget_below(Generation(8))
    assert len(closed) == 2
    assert all(Generation(number) in closed for number in range(10))
    assert closed.outcome(Generation(9)) == 9 and closed.outcome(Generation(3)) is None


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_chunks_of_any_prompt_and_chunk_size_cover_it(prompt: int, size: int, depths: int) -> None:
    spans = [TokenRange(i, min(i + size, prompt)) for i in range(0, prompt, size)]
    pieces = [(depth, span) for span in spans for depth in range(depths)]
    chunks = [ChunkSpec(i, depth, span) for i, (depth, span) in enumerate(pieces)]
    chunks.append(ChunkSpec(len(chunks), None, TokenRange(prompt - 1, prompt)))
    assert coverage_fault(chunks, depths, TokenRange(0, prompt)) is None
    for missing in range(len(chunks)):
        rest = chunks[:missing] + chunks[missing + 1 :]
        assert coverage_fault(rest, depths, TokenRange(0, prompt)) is not None


ENDINGS: list[list[object]] = [
    [ReceiveComplete(G)],
    [ReceiveEnded(G)],
    [Quarantined(G), QuarantineEnded(G)],
]

# Both, over a channel that loses, doubles and reorders, with a memory that may be written late


class Handoff:
    """One generation through the product's own Sender and Receiver. Writes land when this says."""

    def __init__(self, seed: int, prompt: int, chunk: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.queued: list[SendOrder] = []
        self.flying: list[SendOrder] = []
        self.unheard: list[int] = []  # posted, and the Sender does not know it yet
        self.facts: list[Callable[[], None]] = []  # notifications and completions on their way
        self.used_after_end = False
        self.killed = False  # P's process: it runs no code, but what it posted may still land
        self.gone = False  # P is not listed at D, and the agent that faced it is destroyed
        self.to_d: list[object] = []
        self.to_p: list[object] = []
        self.p_events: list[object] = []
        self.d_events: list[object] = []
        self.p = Sender(
            GEOMETRY,
            self.clock,
            worker="prefill-0",
            drop_queued=self._drop,
            ack_timeout_s=1e9,
        )
        self.d = Receiver(GEOMETRY, self.clock, worker="decode-0")
        self.p.open(G, D, reservation(prompt), prompt)
        self.d.open(G, P, reservation(prompt), prompt)
        spans = [TokenRange(i, min(i + chunk, prompt)) for i in range(0, prompt, chunk)]
        self.passes = [
            FinishedRange(G, depth, span, depth == 2 and span.stop == prompt, 1.0)
            for span in spans
            for depth in range(3)
        ]
        self.p.on_prefill_admitted(G, tables(prompt), 0)

    def _drop(self, generation: Generation) -> tuple[int, ...]:
        gone = tuple(order.sequence for order in self.queued)
        self.queued = []
        return gone

    def pump(self) -> None:
        self.queued += self.p.take_orders()
        self.to_d += [m for _, m in self.p.take_messages()]
        self.to_p += [m for _, m in self.d.take_messages()]
        self.p_events += self.p.take_events()
        self.d_events += self.d.take_events()
        self.p.check()

    def step(self, lossy: bool) -> None:
        action = self.random.choice(["pass", "post", "hear", *"to_d to_p land learn time".split()])
        if self.killed and action in ("pass", "post", "hear", "to_p"):
            return
        if action == "pass" and self.passes:
            self.p.on_ranges_finished([self.passes.pop(0)])
        elif action == "post" and self.queued:
            order = self.queued.pop(0)
            self.flying.append(order)
            self.used_after_end |= self.freed_at_d()
            self.unheard.append(order.sequence)
        elif action == "hear":
            self._hear_posted()
        elif action == "land" and self.flying:
            order = self.flying.pop(self.random.randrange(len(self.flying)))
            self.used_after_end |= self.freed_at_d() or bool(self.p_events)
            self.facts.append(lambda: self._notify(order.sequence))
            self.facts.append(lambda: self._complete(order.sequence))
        elif action == "learn" and self.facts:
            self.facts.pop(self.random.randrange(len(self.facts)))()
        elif action == "to_d":
            self._deliver(self.to_d, lossy, to_d=True)
        elif action == "to_p":
            self._deliver(self.to_p, lossy, to_d=False)
        elif action == "time":
            self.clock.advance(0.6)
            if not self.killed:
                self.p.tick()
            self.d.tick()
        self.pump()

    def _hear_posted(self) -> None:
        for sequence in self.unheard:
            self.p.on_feedback(posted(sequence))
        self.unheard = []

    def _complete(self, sequence: int) -> None:
        self._hear_posted()
        self.p.on_feedback(sent(sequence))

    def freed_at_d(self) -> bool:
        return any(not isinstance(event, Quarantined) for event in self.d_events)

    def _notify(self, sequence: int) -> None:
        if not self.gone:
            self.d.on_feedback(arrived(sequence))

    def lose_peer(self) -> None:
        """Half of the fence. With both, nothing can land any more."""
        self.gone = True
        self.d.on_peer_gone(P)
        self._fence()

    def reap(self) -> None:
        """The other half, told to D."""
        self.killed = True
        self._fence()
        self.d.on_writer_dead(P)

    def _fence(self) -> None:
        if self.gone and self.killed:
            self.flying = []
        self.pump()

    def _deliver(self, channel: list[object], lossy: bool, *, to_d: bool) -> None:
        if not channel:
            return
        message = channel.pop(self.random.randrange(len(channel)))
        if lossy and self.random.random() < 0.3:
            return
        if lossy and self.random.random() < 0.2:
            channel.append(message)
        match message:
            case Commit():
                self.d.on_commit(P, message)
            case WriterEnded():
                self.d.on_writer_ended(P, message)
            case Ack():
                self.p.on_ack(D, message.generation)
            case Stop():
                self.p.on_stop(D, message.generation)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.integers(1, 20),
    chunk=st.integers(1, 9),
    cancel_at=st.one_of(st.none(), st.integers(0, 60)),
)
def test_any_loss_order_and_cancel_ends_both_sides_once_and_frees_nothing_early(
    seed: int, prompt: int, chunk: int, cancel_at: int | None
) -> None:
    handoff = Handoff(seed, prompt, chunk)
    for number in range(3000):
        if number == cancel_at:
            handoff.d.cancel(G, writer_never_started=False)
            handoff.pump()
        handoff.step(lossy=number < 200)
        if handoff.p_events and handoff.freed_at_d():
            break
    assert len(handoff.p_events) == 1 and handoff.freed_at_d(), "a side never ended"
    assert not handoff.used_after_end and not handoff.flying, "memory was written after its end"
    if cancel_at is None:
        assert handoff.d_events == [ReceiveComplete(G)]
        assert handoff.p_events == [SendEnded(G, None)]
    else:
        assert handoff.d_events in ENDINGS


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.integers(1, 20),
    chunk=st.integers(1, 9),
    cancel_at=st.one_of(st.none(), st.integers(0, 100)),
    lost_at=st.integers(0, 100),
    reaped_at=st.integers(0, 100),
)
def test_a_writer_that_dies_at_any_time_writes_nothing_that_was_given_back(
    seed: int, prompt: int, chunk: int, cancel_at: int | None, lost_at: int, reaped_at: int
) -> None:
    """The Peers without it and the word that it is reaped come in either order, at any time."""
    handoff = Handoff(seed, prompt, chunk)
    for number in range(101):
        if number == cancel_at:
            handoff.d.cancel(G, writer_never_started=False)
        if number == lost_at:
            handoff.lose_peer()
        if number == reaped_at:
            handoff.reap()
        handoff.pump()
        handoff.step(lossy=True)
    assert handoff.d_events in ENDINGS and not handoff.used_after_end
    assert handoff.d.quarantined_from() == () and handoff.d.phase(G) is None
    failed = [g for g, _ in handoff.d.take_failures()]
    assert len(failed) <= 1 and not (failed and ReceiveComplete(G) in handoff.d_events)
