"""Both ends over a channel that loses, doubles and reorders; memory may be written late."""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.connector.handoff import ClosedGenerations, coverage_fault
from rlt.connector.messages import Ack, ChunkSpec, Commit, Stop, WriterEnded
from rlt.connector.receiver import Receiver
from rlt.connector.sender import Sender
from rlt.runtime.interfaces import (
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
    SendEnded,
)
from rlt.runtime.plans import (
    FinishedRange,
    SendOrder,
)
from rlt.runtime.types import Generation, TokenRange

from .clock import ManualClock
from .handoff_parts import (
    GEOMETRY,
    D,
    G,
    P,
    arrived,
    posted,
    reservation,
    sent,
    tables,
)


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
