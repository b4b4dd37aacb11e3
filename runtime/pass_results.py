"""What a finished pass changes: the half of update_from_output that reads device results.

The Scheduler's helper, called by it alone; matches each result with the row that asked for it.
A result without a row or without a live request is dropped and counted; a live row without a result
fails its request.
"""

from dataclasses import dataclass

from .errors import PassFailed, ReplayMismatch
from .events import PrefillFinished, TokensProduced
from .interfaces import Clock
from .kv_manager import KVManager, Lease
from .passes import generations
from .plans import (
    CodaRow,
    FinishedRange,
    LoopRow,
    ModelRunnerOutput,
    PrefillRow,
    SampledToken,
    SchedulerOutput,
)
from .progress import Progress
from .replay import TIES
from .request import Phase, Request, Role
from .request_book import RequestBook, Slots
from .types import Generation, KVGeometry, Stamp, TokenRange


@dataclass(slots=True, kw_only=True)
class Counters:
    passes: int = 0
    failed_passes: int = 0
    prefill_tokens: int = 0  # positions, once each, not once per loop
    recurrent_loops: int = 0
    output_tokens: int = 0
    replay_ties: int = 0  # a delivered token did not come out again, by less than rounding
    dropped_results: int = 0


class PassResults:
    def __init__(
        self,
        *,
        book: RequestBook,
        kv: KVManager,
        slots: Slots,
        clock: Clock,
        eos_token_ids: tuple[int, ...],
        geometry: KVGeometry,
        progress: Progress,
        counters: Counters,
    ) -> None:
        self._book = book
        self._kv = kv
        self._slots = slots
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._geometry = geometry
        self._progress = progress
        self._counters = counters
        self._ranges_to_send: list[FinishedRange] = []

    def take_ranges_to_send(self) -> list[FinishedRange]:
        ranges, self._ranges_to_send = self._ranges_to_send, []
        return ranges

    def apply(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The pass is no longer in flight: end its leases, then apply each result once.

        A request that has ended meanwhile gets nothing: what ran for it is dropped and counted.
        """
        running = self._end_pass(plan)
        reasons = {row.generation: row.reason for row in output.failed}
        if output.error is not None:
            self._counters.failed_passes += 1
            message = f"the {plan.stage} pass failed: {output.error}"
        else:
            message = f"the {plan.stage} pass gave no result"
            ran = {g: request for g, request in running.items() if g not in reasons}
            for generation in self._apply_results(plan, output, ran):
                del running[generation]
        for generation, request in running.items():
            self._book.fail(request, PassFailed.code, reasons.get(generation, message))

    def _end_pass(self, plan: SchedulerOutput) -> dict[Generation, Request]:
        running: dict[Generation, Request] = {}
        for generation in generations(plan):
            self._kv.end_lease(generation, Lease.PASS)
            request = self._book.get(generation)
            if request is not None and request.over:
                self._book.settle(request)
            elif request is not None:
                running[generation] = request
        return running

    def _apply_results(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, running: dict[Generation, Request]
    ) -> set[Generation]:
        """Returns whose row was answered."""
        answered: set[Generation] = set()
        waiting = dict(running)
        for row in plan.prelude:  # a prelude row has no result of its own
            if waiting.pop(row.generation, None) is not None:
                answered.add(row.generation)
        prompts = {row.generation: row for row in plan.prefill}
        for finished in output.finished_ranges:
            prompt = prompts.get(finished.generation)
            if prompt and (prompt.depth, prompt.range) == (finished.depth, finished.range):
                if (request := self._claim(waiting, answered, finished.generation)) is not None:
                    self._on_range(request, prompt, finished)
            else:
                self._counters.dropped_results += 1
        self._apply_loops(plan, output, waiting, answered)
        codas = {row.generation: row for row in plan.coda}
        exits = {row.generation for row in plan.finalize}
        for sampled in output.tokens:
            coda = codas.get(sampled.generation)
            if coda and coda.output_index == sampled.output_index:
                if (request := self._claim(waiting, answered, sampled.generation)) is not None:
                    self._on_token(request, coda, sampled, sampled.generation in exits)
            else:
                self._counters.dropped_results += 1
        return answered

    def _apply_loops(
        self,
        plan: SchedulerOutput,
        output: ModelRunnerOutput,
        waiting: dict[Generation, Request],
        answered: set[Generation],
    ) -> None:
        rows = {(row.generation, row.position, row.depth): row for row in plan.loops}
        scores = {(s.generation, s.position, s.depth): s.score for s in output.gate_scores}
        for finished in output.finished_loops:
            key = finished.generation, finished.position, finished.depth
            row, score = rows.get(key), scores.pop(key, None)
            if row is None or (row.want_score and score is None):
                self._counters.dropped_results += 1
            elif (request := self._claim(waiting, answered, finished.generation)) is not None:
                self._on_loop(request, row, score)
        self._counters.dropped_results += len(scores)

    def _claim(
        self, waiting: dict[Generation, Request], answered: set[Generation], generation: Generation
    ) -> Request | None:
        """The request that still waits for this result; each row is answered once."""
        request = waiting.pop(generation, None)
        if request is None:
            self._counters.dropped_results += 1
        else:
            answered.add(generation)
        return request

    def _on_range(self, request: Request, row: PrefillRow, finished: FinishedRange) -> None:
        if row.depth == 0:
            request.prefill_tokens += len(row.range)
            self._counters.prefill_tokens += len(row.range)
        if self._geometry.layout == "last_exited" or row.last_loop:
            self._on_plane_written(request, row, finished)
        if row.keep_hidden:
            request.stamps.append(Stamp("prefill_done", finished.at_s))
            if request.role is Role.PREFILL:
                self._book.move(request, Phase.SENDING)
                self._book.emit(PrefillFinished(request.generation, tuple(request.stamps)))

    def _on_plane_written(self, request: Request, row: PrefillRow, finished: FinishedRange) -> None:
        """No later loop changes this plane's K/V of these positions."""
        plane = self._geometry.plane(row.depth)
        self._kv.mark_valid(request.generation, plane, row.range)
        if row.last_loop:
            self._kv.publish(request.generation, row.range.stop)
        if request.role is Role.PREFILL:
            self._ranges_to_send.append(
                FinishedRange(
                    request.generation, plane, row.range, finished.hidden_ready, finished.at_s
                )
            )

    def _on_loop(self, request: Request, row: LoopRow, score: float | None) -> None:
        if self._geometry.layout == "last_exited":
            span = TokenRange(row.position, row.position + 1)
            self._kv.mark_valid(request.generation, row.depth, span)
        request.recurrent_loops += 1
        self._counters.recurrent_loops += 1
        if score is not None:
            self._progress.scored(request, row, score)

    def _on_token(
        self, request: Request, row: CodaRow, sampled: SampledToken, finalized: bool
    ) -> None:
        if request.receive_slot is not None:
            self._slots.end_receive(request.generation)
            request.receive_slot = None
        if row.expected is not None:
            self._on_replayed(request, row.expected, sampled)
            return
        if row.output_index:
            self._on_exit(request, row, finalized)
        request.outputs.append(sampled.token)
        self._counters.output_tokens += 1
        finish = request.finish_reason(self._eos_token_ids)
        self._book.emit(
            TokensProduced(
                generation=request.generation,
                start_index=row.output_index,
                token_ids=(sampled.token,),
                exit_depths=(row.exit_depth,),
                logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
                finish_reason=finish,
            )
        )
        if finish is not None:
            request.completed = True
            self._book.let_go(request)

    def _on_replayed(self, request: Request, expected: int, sampled: SampledToken) -> None:
        """The client has this output already: it must come out again, and is not told."""
        if sampled.token == expected:
            return
        if sampled.gap is not None and sampled.gap < TIES[self._geometry.dtype]:
            self._counters.replay_ties += 1
            return
        message = (
            f"output {sampled.output_index} was delivered as token {expected}, and its replay on "
            f"this worker gives {sampled.token}"
        )
        self._book.fail(request, ReplayMismatch.code, message)

    def _on_exit(self, request: Request, row: CodaRow, finalized: bool) -> None:
        """The position that the token ran at stands in every plane that a later token reads."""
        position = len(request.spec.prompt) + row.output_index - 1
        span = TokenRange(position, position + 1)
        if self._geometry.layout == "shared":
            self._kv.mark_valid(request.generation, 0, span)
        elif finalized:
            for depth in range(row.exit_depth, self._geometry.num_depths):
                self._kv.mark_valid(request.generation, depth, span)
