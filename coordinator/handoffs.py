"""What workers say about generations, turned into steps of the attempts.

Owns the count of late messages. Every message may come twice, late or never: what does not fit the
attempt as it stands now is counted and dropped, and never moves another attempt.
"""

from collections import Counter
from collections.abc import Callable
from typing import assert_never

from ..connector.messages import (
    Cancel,
    GenerationFailed,
    GenerationReleased,
    Heartbeat,
    LiveGeneration,
    MustWait,
    Output,
    OutputRow,
    PrefillAccepted,
    PrefillComplete,
    Refused,
    RequestActivated,
    RequestReceived,
    Reserved,
)
from ..runtime.errors import ProtocolError
from .attempt import Attempt, Leg, Phase
from .attempts import AttemptOwner, Attempts
from .effects import ConfirmOutput, Effect, SendWorker
from .now import Now
from .observer import Observer
from .output_rows import row_fault
from .registry import Registry, Worker

# D's words for where a generation is:
UNCONFIRMED = "unconfirmed"  # released, but the last Confirm has not come
NOT_RECEIVED = ("receiving", "cancelling")

RECEIVED_S = 5.0  # how far a worker's messages may lie behind another's

Single = (
    Reserved
    | MustWait
    | Refused
    | PrefillAccepted
    | PrefillComplete
    | RequestReceived
    | RequestActivated
    | GenerationFailed
    | GenerationReleased
)


def _fits(attempt: Attempt, leg: Leg, message: Single) -> bool:
    """Whether this leg may say this at all: each role has its messages, and none of those that
    follow a transfer can come before P was asked to start."""
    match message:
        case Reserved() | MustWait():
            return leg.role == "decode"
        case RequestReceived() | RequestActivated():
            return leg.role == "decode" and not attempt.writer_never_started
        case PrefillAccepted() | PrefillComplete():
            return leg.role == "prefill" and leg.asked
        case Refused() | GenerationFailed() | GenerationReleased():
            return leg.asked
        case _:
            assert_never(message)


class Handoffs:
    def __init__(
        self,
        attempts: Attempts,
        owner: AttemptOwner,
        registry: Registry,
        emit: Callable[[Effect], None],
        counters: Counter[str],
        observer: Observer,
    ) -> None:
        self._attempts = attempts
        self._registry = registry
        self._owner = owner
        self._emit = emit
        self._counters = counters
        self._observer = observer

    def handle(self, worker: Worker, message: Single, now: Now) -> None:
        attempt = self._attempts.get(message.generation)
        leg = attempt.leg_at(worker.incarnation) if attempt is not None else None
        if attempt is None or leg is None or not _fits(attempt, leg, message):
            self._counters["late_messages"] += 1
            return
        match message:
            case Reserved():
                self._reserved(attempt, leg, message, worker, now)
            case MustWait():
                attempt.must_wait = attempt.phase is Phase.RESERVING
            case Refused():
                self._refused(attempt, leg, message)
            case PrefillAccepted():
                self._prefill_accepted(attempt, leg)
            case PrefillComplete():
                if not attempt.computed:
                    attempt.request.timeline.add(message.stamps, worker.name)
                    self._attempts.computed(attempt)
            case RequestReceived():
                if not attempt.received:
                    attempt.request.timeline.add(message.stamps, worker.name)
                    attempt.received = True
                    self._observer.received(message.stamps)
            case RequestActivated():
                self._activated(attempt, message, worker)
            case GenerationFailed():
                self._failed(attempt, leg, message)
            case GenerationReleased():
                self._released(attempt, leg, message, worker, now)
            case _:
                assert_never(message)

    def output(self, worker: Worker, message: Output, now: Now) -> None:
        for row in message.rows:
            attempt = self._attempts.get(row.generation)
            if attempt is None or attempt.decode.worker != worker.incarnation:
                self._counters["late_messages"] += 1
                # Nobody wants these any more: let the worker drop them.
                self._confirm(worker, row, row.start_index + len(row.token_ids))
            elif attempt.phase is Phase.FINISHED:
                self._confirm(worker, row, attempt.request.delivered)
            elif attempt.live and not attempt.writer_never_started:
                self._take_row(attempt, worker, row, now)
            else:
                self._counters["outputs_after_cancel"] += 1

    def heartbeat(self, worker: Worker, message: Heartbeat, now: Now) -> None:
        """The worker's list is complete: compare it with what it has answered."""
        listed = {live.generation for live in message.live}
        for live in message.live:
            attempt = self._attempts.get(live.generation)
            if attempt is None and live.phase == UNCONFIRMED:
                self._emit(ConfirmOutput(worker.incarnation, live.generation, live.outputs))
            elif attempt is None or attempt.leg_at(worker.incarnation) is None:
                self._counters["unknown_generations"] += 1
                self._emit(SendWorker(worker.incarnation, Cancel(generation=live.generation)))
            elif worker.role == "decode":
                self._compare_decode(attempt, worker, live, message.peers_version, now)
        for attempt in self._attempts.at(worker.incarnation):
            leg = attempt.leg_at(worker.incarnation)
            if leg is not None and leg.known and attempt.generation not in listed:
                self._attempts.leg_released(attempt, leg, now.mono_s)

    def _reserved(
        self, attempt: Attempt, leg: Leg, message: Reserved, worker: Worker, now: Now
    ) -> None:
        leg.known = True
        if attempt.phase is Phase.RESERVING:
            attempt.request.timeline.add(message.stamps, worker.name)
            self._attempts.reserved(attempt, message.reservation, now.mono_s)

    def _refused(self, attempt: Attempt, leg: Leg, message: Refused) -> None:
        if leg.known:  # the answer to a repeated ask, after the worker has closed the generation
            self._counters["late_messages"] += 1
        else:
            self._counters[f"refused.{message.code}"] += 1
            self._attempts.refused(attempt, leg, message.code, message.reason)

    def _prefill_accepted(self, attempt: Attempt, leg: Leg) -> None:
        leg.known = True
        if attempt.phase is Phase.STARTING:
            self._attempts.prefill_accepted(attempt)

    def _activated(self, attempt: Attempt, message: RequestActivated, worker: Worker) -> None:
        if attempt.activated:
            return
        attempt.request.timeline.add(message.stamps, worker.name)
        self._attempts.activated(attempt)
        self._counters["decode_prefill_tokens"] += message.prefill_tokens
        self._counters["decode_loops_before_activation"] += message.recurrent_loops

    def _failed(self, attempt: Attempt, leg: Leg, message: GenerationFailed) -> None:
        leg.known = True
        if leg.role == "prefill" and attempt.received:
            self._counters["prefill_failed_after_handoff"] += 1
        elif attempt.live:
            self._owner.attempt_failed(attempt, message.code, message.error)

    def _released(
        self, attempt: Attempt, leg: Leg, message: GenerationReleased, worker: Worker, now: Now
    ) -> None:
        if leg.released:
            return
        attempt.request.timeline.add(message.stamps, worker.name)
        attempt.request.timeline.mark("released", now.wall_s, worker.name)
        self._attempts.leg_released(attempt, leg, now.mono_s)

    def _take_row(self, attempt: Attempt, worker: Worker, row: OutputRow, now: Now) -> None:
        model = self._registry.model
        assert model is not None  # it came with the first worker
        fault = row_fault(row, attempt.engine_request, model)
        if fault is not None:
            reason = f"decode worker {worker.name} sent impossible output: {fault}"
            self._owner.attempt_failed(attempt, ProtocolError.code, reason)
            return
        attempt.received = True
        delivered = attempt.request.delivered
        if row.start_index > delivered:
            self._counters["output_gaps"] += 1
            self._attempts.ask_resend(attempt, now.mono_s)
            return
        if row.start_index + len(row.token_ids) > delivered or row.finish_reason is not None:
            self._attempts.gap_closed(attempt)
            self._owner.attempt_output(attempt, row)
        self._confirm(worker, row, attempt.request.delivered)

    def _compare_decode(
        self, attempt: Attempt, worker: Worker, live: LiveGeneration, peers_version: int, now: Now
    ) -> None:
        if attempt.live and live.phase not in NOT_RECEIVED:
            attempt.received = True
        if attempt.phase is Phase.FINISHED:  # it waits for a Confirm that was lost
            row = ConfirmOutput(worker.incarnation, live.generation, attempt.request.delivered)
            self._emit(row)
        elif attempt.live and live.outputs > attempt.request.delivered:
            self._attempts.ask_resend(attempt, now.mono_s)
        elif attempt.fate_unknown:
            if peers_version >= attempt.lost_version:  # nothing of P can come in any more
                self._owner.attempt_failed(attempt, "worker_lost", attempt.prefill_lost or "")
        elif attempt.live and not attempt.received and attempt.prefill_let_go_s is not None:
            # D tells of a receive before P hears of it: what P let go of has long been received,
            # or never will be, and P's word about that was lost.
            if now.mono_s - attempt.prefill_let_go_s > RECEIVED_S:
                error = "the prefill worker let go although the prompt was not received"
                self._owner.attempt_failed(attempt, "transfer_failed", error)

    def _confirm(self, worker: Worker, row: OutputRow, outputs: int) -> None:
        self._emit(ConfirmOutput(worker.incarnation, row.generation, outputs))
