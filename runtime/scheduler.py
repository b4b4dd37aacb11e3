"""Decides what runs next and moves every request through its phases. The one writer of requests.

schedule() turns requests into a frozen plan; update_from_output() is the only way a result or a
handoff event changes a request. Never touches a tensor, a socket or a thread.
Passes in flight are bounded and their results applied in order of sequence; a result that no row
asked for is dropped and counted.
"""

from collections import Counter, deque
from dataclasses import fields
from typing import assert_never

from .admission import MAX_BYPASS, ReservationLine, WaitingQueue
from .config import SchedulerConfig
from .errors import InvariantBroken
from .events import EngineEvent, Refuse, Reservation, Wait
from .handoff_results import HandoffResults
from .intake import Intake, PrefillAdmitted
from .interfaces import AdmissionLimits, Clock, HandoffEvent
from .kv_manager import KVManager, Lease
from .pass_results import Counters, PassResults
from .passes import (
    coda_rows,
    finalize_rows,
    generations,
    loop_rows,
    prefill_rows,
    prelude_rows,
    replayed_rows,
)
from .plans import (
    FinalizeRow,
    FinishedRange,
    ModelRunnerOutput,
    PrefillRow,
    SchedulerOutput,
    Stage,
)
from .progress import Progress
from .request import Phase, Role
from .request_book import RequestBook, Slots
from .room import MIN_SLOTS, Room
from .turns import Ready, Turns, by_phase
from .types import EngineRequest, Generation, KVGeometry


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        kv: KVManager,
        slots: Slots,
        geometry: KVGeometry,
        limits: AdmissionLimits,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        max_bypass: int = MAX_BYPASS,
    ) -> None:
        self._config = config
        self._kv = kv
        self._slots = slots
        self._geometry = geometry
        self._limits = limits
        self._book = RequestBook(kv, slots)
        self._room = Room(
            book=self._book,
            kv=kv,
            slots=slots,
            geometry=geometry,
            incremental=config.admission == "incremental" and limits.num_slots >= MIN_SLOTS,
            watermark=config.watermark,
            snapshot_bytes=limits.snapshot_bytes,
            chunk_tokens=config.chunk_tokens,
        )
        self._intake = Intake(
            book=self._book,
            kv=kv,
            slots=slots,
            room=self._room,
            clock=clock,
            max_positions=limits.max_positions,
            waiting=WaitingQueue(config.max_waiting, max_bypass),
            line=ReservationLine(max_bypass),
        )
        self._in_flight: deque[SchedulerOutput] = deque()
        self._sequence = 0
        self._turns = Turns(config)
        self._progress = Progress(self._book)
        self._counters = Counters()
        self._handoff = HandoffResults(book=self._book, kv=kv, received=self._intake.received)
        self._results = PassResults(
            book=self._book,
            kv=kv,
            slots=slots,
            clock=clock,
            eos_token_ids=eos_token_ids,
            geometry=geometry,
            progress=self._progress,
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

    def cancel_all(self) -> None:
        self._intake.cancel_all()

    def admit(self) -> list[PrefillAdmitted]:
        """Let requests in while blocks and slots last; returns prompts that are to be sent."""
        return self._intake.admit()

    def take_made_room(self) -> bool:
        """Whether a request was suspended since the last call: others may be let in now."""
        return self._room.take_made_room()

    def idle(self) -> bool:
        return not len(self._book)

    def live(self) -> dict[Generation, str]:
        return {request.generation: request.phase.value for request in self._book.live()}

    # What runs.

    def schedule(self) -> SchedulerOutput | None:
        """The next pass, or None: enough are in flight, or nothing can run now.

        Whoever was planned is moved past it at once: the pass counts as submitted.
        """
        if len(self._in_flight) >= self._config.max_in_flight:
            return None
        ready = self._room.ready(by_phase(self._book.executing()))
        stage = self._turns.choose(ready)
        if stage is None:
            return None
        self._sequence += 1
        plan = self._plan(stage, ready)
        for generation in generations(plan):
            self._kv.lease(generation, Lease.PASS)
        self._progress.submitted(plan)
        self._turns.ran(stage)
        self._in_flight.append(plan)
        self._counters.passes += 1
        return plan

    def _plan(self, stage: Stage, ready: Ready) -> SchedulerOutput:
        sequence, kv, geometry = self._sequence, self._kv, self._geometry
        match stage:
            case Stage.PREFILL:
                ended, prefill = self._prompts(ready)
                return SchedulerOutput(
                    sequence=sequence, stage=stage, finalize=ended, prefill=prefill
                )
            case Stage.PRELUDE:
                rows = prelude_rows(ready[Phase.NEEDS_PRELUDE])
                return SchedulerOutput(sequence=sequence, stage=stage, prelude=rows)
            case Stage.RECURRENT:
                loops = loop_rows(ready[Phase.NEEDS_LOOP], kv)
                ended, prefill = self._prompts(ready) if self._turns.mixes(ready) else ((), ())
                return SchedulerOutput(
                    sequence=sequence, stage=stage, finalize=ended, loops=loops, prefill=prefill
                )
            case Stage.CODA:
                exited = ready[Phase.NEEDS_CODA]
                ahead = self._config.max_in_flight > 1
                return SchedulerOutput(
                    sequence=sequence,
                    stage=stage,
                    finalize=finalize_rows(exited, kv, geometry),
                    coda=coda_rows(exited, num_loops=geometry.num_depths, keep_tokens=ahead),
                )
            case Stage.VERIFY:
                raise InvariantBroken("a VERIFY pass is not the scheduler's to plan")
            case _:
                assert_never(stage)

    def _prompts(self, ready: Ready) -> tuple[tuple[FinalizeRow, ...], tuple[PrefillRow, ...]]:
        size, prompts = self._config.chunk_tokens, ready[Phase.PREFILLING]
        for request in prompts:
            request.passed_over += 1  # set to 0 again for those that take part
        rows = prefill_rows(prompts, self._kv, self._geometry, chunk_tokens=size)
        return replayed_rows(rows, prompts, self._kv, self._geometry), rows

    # What came out.

    def update_from_output(self, output: ModelRunnerOutput | HandoffEvent) -> list[EngineEvent]:
        if not isinstance(output, ModelRunnerOutput):
            self._handoff.apply(output)
        elif not self._in_flight or self._in_flight[0].sequence != output.sequence:
            self._counters.dropped_results += _result_count(output)
        else:
            self._results.apply(self._in_flight.popleft(), output)
        return self._book.take_events()

    def take_events(self) -> list[EngineEvent]:
        """Events that did not come from a result: activations, cancels."""
        return self._book.take_events()

    def take_ranges_to_send(self) -> list[FinishedRange]:
        """Ranges of prompts that are to be sent, finished since the last call."""
        return self._results.take_ranges_to_send()

    # What the owner can tell.

    def withdrawn_share(self) -> float:
        blocks, slots = self._limits.num_blocks, self._limits.num_receive_slots
        withdrawn = (blocks - self._kv.usable_blocks()) / blocks
        return max(withdrawn, self._book.withdrawn_slots / max(slots, 1))

    def statistics(self) -> dict[str, int]:
        usage, capacity = self._kv.usage(), self._slots.capacity()
        phases = Counter(request.phase for request in self._book.live())
        return {
            "blocks_total": usage.blocks_total,
            "blocks_free": usage.blocks_free,
            "blocks_quarantined": usage.blocks_quarantined,
            "blocks_cached": usage.blocks_cached,
            "prefix_hits": usage.prefix_hits,
            "prefix_hit_tokens": usage.prefix_hit_tokens,
            "prefix_evictions": usage.prefix_evictions,
            "allocations": usage.allocations,
            **{f"leases_{reason}": count for reason, count in usage.leases.items()},
            "slots_free": capacity.free_slots,
            "receive_slots_free": capacity.free_receive_slots,
            "slots_withdrawn": self._book.withdrawn_slots,
            "live": len(self._book),
            "running": len(self._book.executing()),
            **{f"phase_{phase}": phases[phase] for phase in Phase if phase is not Phase.ENDED},
            "bypasses": self._intake.bypasses,
            **self._room.statistics(),
            "late_handoff_events": self._handoff.late_events,
            **{field.name: getattr(self._counters, field.name) for field in fields(Counters)},
        }

    def check(self) -> None:
        """Blocks, leases, phases and slots add up."""
        self._kv.check()
        self._book.check()
        self._check_slots()
        flying = {generation for plan in self._in_flight for generation in generations(plan)}
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
