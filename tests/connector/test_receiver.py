"""D's end of the handoff: what counts as received, and when memory may be used again."""

from collections.abc import Callable

import pytest

from rlt.connector import receiver
from rlt.connector.messages import Ack, ChunkSpec, Stop, WriterEnded
from rlt.connector.receiver import Receiver
from rlt.runtime.interfaces import (
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
)
from rlt.runtime.plans import (
    Arrival,
    TransferFeedback,
)
from rlt.runtime.types import Stamp, TokenRange

from .clock import ManualClock
from .handoff_parts import (
    GEOMETRY,
    PROMPT,
    G,
    P,
    arrived,
    full_commit,
    reservation,
)


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
