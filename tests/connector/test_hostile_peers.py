"""A registered peer that says anything: no other transfer notices, and nothing grows with it."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.connector.ended_sends import MOST_EARLY
from rlt.connector.messages import Chunk, ChunkSpec, Commit, Stop, WriterEnded
from rlt.connector.receiver import Receiver
from rlt.connector.sender import Sender
from rlt.runtime.interfaces import ReceiveComplete, SendEnded
from rlt.runtime.plans import Arrival, FinishedRange, SendProgress, TransferFeedback
from rlt.runtime.types import Generation, Stamp, TokenRange

from .clock import ManualClock
from .handoff_parts import GEOMETRY, PROMPT, D, P, reservation, tables

HONEST, HOSTILE = Generation(7), Generation(8)
STRANGER = "prefill-9-zz"
MOST = GEOMETRY.num_planes * PROMPT + 1

numbers = st.one_of(st.integers(-2, 50), st.integers(-(2**63), 2**64 - 1))
generations = st.one_of(st.sampled_from([HONEST, HOSTILE]), numbers.map(Generation))
ranges = st.builds(TokenRange, numbers, numbers)
chunks = st.lists(
    st.builds(ChunkSpec, numbers, st.one_of(st.none(), numbers), ranges), max_size=40
).map(tuple)
stamps = st.lists(st.builds(Stamp, st.text(max_size=300), st.floats()), max_size=3).map(tuple)
said = st.one_of(
    st.builds(Commit, generation=generations, allocation=numbers, chunks=chunks, stamps=stamps),
    st.builds(Commit, generation=generations, allocation=st.just(5), chunks=chunks),
    st.builds(WriterEnded, generation=generations, posted=numbers),
    st.builds(
        Chunk,
        generation=generations,
        sequence=numbers,
        depth=st.one_of(st.none(), numbers),
        range=ranges,
    ),
    st.builds(Arrival, generations, numbers, numbers, st.just(1.0), st.just(STRANGER)),
    st.builds(Arrival, generations, st.just(5), numbers, st.just(1.0), st.just(STRANGER)),
)


def hear(d: Receiver, message: object) -> None:
    match message:
        case Commit():
            d.on_commit(STRANGER, message)
        case WriterEnded():
            d.on_writer_ended(STRANGER, message)
        case Chunk():
            d.on_chunk(STRANGER, message)
        case Arrival():
            d.on_feedback(TransferFeedback(arrived=(message,)))


@settings(max_examples=200, deadline=None)
@given(before=st.lists(said, max_size=30), after=st.lists(said, max_size=30))
def test_a_hostile_prefill_worker_hurts_only_what_it_was_to_send(
    before: list[object], after: list[object]
) -> None:
    clock = ManualClock()
    d = Receiver(GEOMETRY, clock, worker="decode-0")
    d.open(HONEST, P, reservation(), PROMPT)
    d.open(HOSTILE, STRANGER, reservation(), PROMPT)

    def listen(messages: list[object]) -> None:
        for message in messages:
            hear(d, message)
            clock.advance(1.0)
            d.tick()

    listen(before)
    whole = tuple(ChunkSpec(depth, depth, TokenRange(0, PROMPT)) for depth in range(3))
    hidden = ChunkSpec(3, None, TokenRange(PROMPT - 1, PROMPT))
    d.on_commit(P, Commit(generation=HONEST, allocation=5, chunks=(*whole, hidden)))
    for sequence in range(4):
        d.on_feedback(TransferFeedback(arrived=(Arrival(HONEST, 5, sequence, 1.0, P),)))
    listen(after)
    events = d.take_events()
    assert [event for event in events if event.generation == HONEST] == [ReceiveComplete(HONEST)]
    assert {generation for generation, _ in d.take_failures()} <= {HOSTILE}
    assert all(len(record.arrived) <= MOST for record in d._records.values())
    assert len(d.closed) <= 2
    d.on_peer_gone(STRANGER)
    d.on_writer_dead(STRANGER)
    assert d.quarantined_from() == () and not d.expecting()


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.tuples(st.booleans(), generations, st.integers(0, 5)), max_size=60),
    flood=st.integers(0, 2 * MOST_EARLY),
)
def test_a_hostile_decode_worker_hurts_only_what_goes_to_it(
    words: list[tuple[bool, Generation, int]], flood: int
) -> None:
    p = Sender(GEOMETRY, ManualClock(), worker="prefill-0", drop_queued=lambda _: ())
    p.open(HONEST, D, reservation(), PROMPT)
    p.open(HOSTILE, STRANGER, reservation(), PROMPT)
    p.on_prefill_admitted(HONEST, tables(), 3)
    honest: list[Callable[[], object]] = [
        *(lambda depth=depth: p.on_ranges_finished(
            [FinishedRange(HONEST, depth, TokenRange(0, PROMPT), depth == 2, 1.0)]
        ) for depth in range(3)),
        p.take_orders,
        *(lambda n=n: p.on_feedback(
            TransferFeedback(
                posted=(SendProgress(HONEST, n, 64, 1.0),), sent=(SendProgress(HONEST, n, 64, 1.0),)
            )
        ) for n in range(4)),
        lambda: p.on_ack(D, HONEST),
    ]  # fmt: skip
    for number in range(flood):
        p.on_stop(STRANGER, Generation(1000 + number))
    for ack, generation, turns in words:
        if ack:
            p.on_ack(STRANGER, generation)
        else:
            p.on_stop(STRANGER, generation)
        for _ in range(min(turns, len(honest))):
            honest.pop(0)()
    for step in honest:
        step()
    assert SendEnded(HONEST, None) in p.take_events()
    assert not any(
        isinstance(message, Stop) or peer not in (D, STRANGER)
        for peer, message in p.take_messages()
    )
    assert len(p._ended._early.get(STRANGER, ())) <= MOST_EARLY and len(p.closed) <= 2
