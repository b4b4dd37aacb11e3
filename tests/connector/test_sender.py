"""P's end of the handoff: what is ordered, committed and repeated, and when blocks come back."""

import msgspec
import pytest

from rlt.connector import ended_sends, sender
from rlt.connector.handoff import coverage_fault
from rlt.connector.messages import ChunkSpec, Commit, WriterEnded
from rlt.connector.sender import Sender
from rlt.runtime.errors import ProtocolError
from rlt.runtime.events import Reservation
from rlt.runtime.interfaces import (
    SendEnded,
)
from rlt.runtime.plans import (
    SendFailure,
    TransferFeedback,
)
from rlt.runtime.types import AllocationId, Generation, TokenRange

from .clock import ManualClock
from .handoff_parts import (
    GEOMETRY,
    PROMPT,
    D,
    G,
    finished,
    full_commit,
    one_chunk_prompt,
    posted,
    reservation,
    sent,
    tables,
)


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
