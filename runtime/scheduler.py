"""Decides what runs next and moves every request through its phases. The one writer of requests.

schedule() turns requests into a frozen plan; update_from_output() is the only way a result or a
handoff event changes a request. Never touches a tensor, a socket or a thread.
One pass is in flight at a time; a result that no planned row asked for is dropped and counted.
"""

from collections import Counter
from dataclasses import fields
from typing import assert_never

from .admission import MAX_BYPASS, WaitingQueue
from .errors import InvariantBroken
from .events import EngineEvent, Refuse, Reservation, Wait
from .handoff_results import HandoffResults
from .intake import Intake, PrefillAdmitted
from .interfaces import AdmissionLimits, Clock, HandoffEvent, Quarantined
from .kv_manager import KVManager, Lease
from .pass_results import Counters, PassResults
from .passes import (
    choose_stage,
    coda_rows,
    finalize_rows,
    generations,
    loop_rows,
    prefill_rows,
    prelude_rows,
)
from .plans import FinishedRange, ModelRunnerOutput, SchedulerOutput, Stage
from .request import Phase, Request, Role
from .request_book import RequestBook, Slots
from .types import EngineRequest, Generation, KVGeometry


class Scheduler:
    def __init__(
        self,
        *,
        kv: KVManager,
        slots: Slots,
        geometry: KVGeometry,
        limits: AdmissionLimits,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        chunk_tokens: int,
        max_waiting: int,
        max_bypass: int = MAX_BYPASS,
    ) -> None:
        self._kv = kv
        self._slots = slots
        self._geometry = geometry
        self._limits = limits
        self._chunk_tokens = chunk_tokens
        self._book = RequestBook(kv, slots)
        self._intake = Intake(
            book=self._book,
            kv=kv,
            slots=slots,
            clock=clock,
            max_positions=limits.max_positions,
            waiting=WaitingQueue(max_waiting, max_bypass),
        )
        self._in_flight: SchedulerOutput | None = None
        self._sequence = 0
        self._prefill_turn = True
        self._counters = Counters()
        self._handoff = HandoffResults(book=self._book, kv=kv, received=self._intake.received)
        self._results = PassResults(
            book=self._book,
            kv=kv,
            slots=slots,
            clock=clock,
            eos_token_ids=eos_token_ids,
            num_loops=geometry.num_depths,
            counters=self._counters,
        )

    # Requests come and go.

    def add(self, spec: EngineRequest, role: Role) -> None:
        """Queue a prompt. Raises TooLong (it can never fit) or Overloaded (the queue is full)."""
        self._intake.add(spec, role)

    def reserve(self, spec: EngineRequest) -> Reservation | Wait | Refuse:
        """Blocks for prompt and output, and a receive slot. Asked again: the same answer."""
        return self._intake.reserve(spec)

    def cancel(self, generation: Generation) -> bool:
        """Nothing more is produced; Released follows when everything is back. False if unknown."""
        return self._intake.cancel(generation)

    def admit(self) -> list[PrefillAdmitted]:
        """Let requests in while blocks and slots last; returns prompts that are to be sent."""
        return self._intake.admit()

    def live(self) -> dict[Generation, str]:
        return {request.generation: request.phase.value for request in self._book.live()}

    # What runs.

    def schedule(self) -> SchedulerOutput | None:
        """The next pass, or None: one is in flight, or nothing can run."""
        if self._in_flight is not None:
            return None
        stage = choose_stage(self._book.executing(), self._prefill_turn)
        if stage is None:
            return None
        self._sequence += 1
        plan = self._plan(stage)
        for generation in generations(plan):
            self._kv.lease(generation, Lease.PASS)
        self._in_flight = plan
        self._counters.passes += 1
        return plan

    def _plan(self, stage: Stage) -> SchedulerOutput:
        sequence, kv, loops = self._sequence, self._kv, self._geometry.num_depths
        match stage:
            case Stage.PREFILL:
                self._prefill_turn = False
                prompts = self._book.executing()
                rows = prefill_rows(prompts, kv, chunk_tokens=self._chunk_tokens, num_loops=loops)
                return SchedulerOutput(sequence=sequence, stage=stage, prefill=rows)
            case Stage.PRELUDE:
                ready = self._in_phase(Phase.NEEDS_PRELUDE)
                return SchedulerOutput(sequence=sequence, stage=stage, prelude=prelude_rows(ready))
            case Stage.RECURRENT:
                self._prefill_turn = True
                ready = self._in_phase(Phase.NEEDS_LOOP)
                return SchedulerOutput(sequence=sequence, stage=stage, loops=loop_rows(ready, kv))
            case Stage.CODA:
                ready = self._in_phase(Phase.NEEDS_CODA)
                size = self._geometry.block_size
                finalize = finalize_rows(ready, kv, block_size=size, num_loops=loops)
                return SchedulerOutput(
                    sequence=sequence, stage=stage, finalize=finalize, coda=coda_rows(ready)
                )
            case _:
                assert_never(stage)

    def _in_phase(self, phase: Phase) -> list[Request]:
        return [request for request in self._book.executing() if request.phase is phase]

    # What came out.

    def update_from_output(self, output: ModelRunnerOutput | HandoffEvent) -> list[EngineEvent]:
        if not isinstance(output, ModelRunnerOutput):
            self._handoff.apply(output)
            if isinstance(output, Quarantined):
                self._intake.fail_hopeless()
        elif self._in_flight is None or self._in_flight.sequence != output.sequence:
            self._counters.dropped_results += _result_count(output)
        else:
            plan, self._in_flight = self._in_flight, None
            self._results.apply(plan, output)
        return self._book.take_events()

    def take_events(self) -> list[EngineEvent]:
        """Events that did not come from a result: activations, cancels."""
        return self._book.take_events()

    def take_ranges_to_send(self) -> list[FinishedRange]:
        """Ranges of prompts that are to be sent, finished since the last call."""
        return self._results.take_ranges_to_send()

    # What the owner can tell.

    def statistics(self) -> dict[str, int]:
        usage, capacity = self._kv.usage(), self._slots.capacity()
        phases = Counter(request.phase for request in self._book.live())
        return {
            "blocks_total": usage.blocks_total,
            "blocks_free": usage.blocks_free,
            "blocks_quarantined": usage.blocks_quarantined,
            "allocations": usage.allocations,
            **{f"leases_{reason}": count for reason, count in usage.leases.items()},
            "slots_free": capacity.free_slots,
            "receive_slots_free": capacity.free_receive_slots,
            "slots_withdrawn": self._book.withdrawn_slots,
            "live": len(self._book),
            "running": len(self._book.executing()),
            **{f"phase_{phase}": phases[phase] for phase in Phase if phase is not Phase.ENDED},
            "bypasses": self._intake.bypasses,
            "late_handoff_events": self._handoff.late_events,
            **{field.name: getattr(self._counters, field.name) for field in fields(Counters)},
        }

    def check(self) -> None:
        """Blocks, leases, phases and slots add up."""
        self._kv.check()
        self._book.check()
        self._check_slots()
        flying = set(generations(self._in_flight)) if self._in_flight else set()
        for request in self._book.live():
            if (Lease.PASS in self._kv.leases(request.generation)) != (
                request.generation in flying
            ):
                raise InvariantBroken(
                    f"generation {request.generation}: PASS lease and pass in flight disagree"
                )

    def _check_slots(self) -> None:
        capacity, live = self._slots.capacity(), self._book.live()
        held = sum(request.slot is not None for request in live)
        receiving = sum(request.receive_slot is not None for request in live)
        total = self._limits.num_slots + self._limits.num_receive_slots
        known = capacity.free_slots + capacity.free_receive_slots + held + receiving
        if known + self._book.withdrawn_slots != total:
            raise InvariantBroken(
                f"{total} slots: {capacity}, {held} and {receiving} held, "
                f"{self._book.withdrawn_slots} withdrawn"
            )


def _result_count(output: ModelRunnerOutput) -> int:
    return len(output.finished_ranges) + len(output.finished_loops) + len(output.tokens)
