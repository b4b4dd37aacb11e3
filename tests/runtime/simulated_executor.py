"""An Executor without a model: made-up deterministic scores and tokens, and every read checked.

Each K/V entry carries (generation, position) and a number made from what a real model would have
read; a row that reads a position of another generation, or one never written, raises at once. So
outputs depend on the whole history of a request and on nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rlt.runtime.interfaces import AdmissionLimits, Capabilities, Capacity
from rlt.runtime.plans import (
    CodaRow,
    FinalizeRow,
    FinishedLoop,
    FinishedRange,
    GateScore,
    LoopRow,
    ModelRunnerOutput,
    PrefillRow,
    PreludeRow,
    SampledToken,
    SchedulerOutput,
)
from rlt.runtime.types import (
    Generation,
    KVGeometry,
    KVLayout,
    ModelDescription,
    TokenLogprobs,
    TokenRange,
)

VOCAB = 20
EOS = 7
Entry = tuple[Generation, int, int]  # whose, position, value


def mix(*values: int) -> int:
    """A 64-bit hash that changes with every argument and their order."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state


class Clock:
    def now_s(self) -> float:
        return 0.0

    def wall_s(self) -> float:
        return 0.0


@dataclass
class Memory:
    """The device side's state: what a transfer may copy from and to."""

    kv: dict[tuple[int, int], Entry] = field(default_factory=dict)  # (block, offset)
    hidden: dict[int, tuple[Generation, int]] = field(default_factory=dict)  # slot
    tokens: dict[int, tuple[Generation, int, int]] = field(default_factory=dict)  # output index


class SimulatedExecutor:
    """`eager`: passes are computed by collect(); otherwise the test calls finish_pass().

    `hold_readback`: passes are computed, but their results reach nobody yet. `one_by_one`: each
    collect() computes one pass at most, so that others stay in flight.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        num_slots: int = 4,
        num_receive_slots: int = 2,
        num_loops: int = 4,
        block_size: int = 2,
        max_positions: int = 64,
        eager: bool = True,
        layout: KVLayout = "last_exited",
    ) -> None:
        self.memory = Memory()
        self.eager = eager
        self.hold_readback = False
        self.one_by_one = False
        self.fail_next_pass: str | None = None
        self.gap: float | None = None  # how near every expected token is that does not come out
        self.plans: list[SchedulerOutput] = []  # everything ever submitted
        self.scores: list[GateScore] = []  # everything ever reported
        self.shut_down = False
        self._limits = AdmissionLimits(
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_receive_slots=num_receive_slots,
            max_positions=max_positions,
        )
        self._geometry = KVGeometry(
            num_layers=1,
            num_depths=num_loops,
            num_kv_heads=1,
            head_dim=1,
            hidden_size=1,
            block_size=block_size,
            dtype="float32",
            layout=layout,
        )
        self._slots: dict[Generation, int] = {}
        self._receive_slots: dict[Generation, int] = {}
        self._chunks: dict[Generation, list[int]] = {}
        self._queued: list[SchedulerOutput] = []
        self._finished: list[ModelRunnerOutput] = []
        self._lost: set[Generation] = set()  # a pass of theirs failed: their state is gone
        self._epoch = 0
        self._sink: Callable[[], None] | None = None

    def capabilities(self) -> Capabilities:
        model = ModelDescription(
            name="simulated",
            fingerprint="0",
            vocab_size=VOCAB,
            max_positions=self._limits.max_positions,
            num_loops=self._geometry.num_depths,
            eos_token_ids=(EOS,),
            default_exit_threshold=0.5,
        )
        return Capabilities(geometry=self._geometry, model=model, device="none")

    def admission_limits(self) -> AdmissionLimits:
        return self._limits

    def capacity(self) -> Capacity:
        return Capacity(
            self._epoch,
            self._limits.num_slots - len(self._slots),
            self._limits.num_receive_slots - len(self._receive_slots),
        )

    def block_watch(self) -> None:
        return None

    def admit(self, generation: Generation) -> int | None:
        return _take(self._slots, generation, range(self._limits.num_slots))

    def admit_receive(self, generation: Generation) -> int | None:
        first = self._limits.num_slots
        numbers = range(first, first + self._limits.num_receive_slots)
        return _take(self._receive_slots, generation, numbers)

    def end_receive(self, generation: Generation) -> None:
        self._receive_slots.pop(generation, None)
        self._epoch += 1

    def cancel_admission(self, generation: Generation) -> None:
        self.release(generation)

    def release(self, generation: Generation) -> None:
        assert all(generation not in _rows_of(plan) for plan in self._queued), "pass in flight"
        assert generation in self._slots, "released twice, or never admitted"
        del self._slots[generation]
        self._chunks.pop(generation, None)
        self._epoch += 1

    def complete(self, generation: Generation) -> None:
        self.release(generation)

    def export_hidden(self, generation: Generation) -> int:
        return self._slots[generation]

    def submit(self, plan: SchedulerOutput) -> None:
        assert len(_rows_of(plan)) == len(set(_rows_of(plan))) > 0
        self.plans.append(plan)
        self._queued.append(plan)
        if self.eager and self._sink is not None:
            self._sink()

    def finish_pass(self) -> None:
        plan = self._queued.pop(0)
        if self.fail_next_pass is not None:
            error, self.fail_next_pass = self.fail_next_pass, None
            failed = ModelRunnerOutput(sequence=plan.sequence, stage=plan.stage, error=error)
            self._finished.append(failed)
            self._lost.update(_rows_of(plan))
        else:
            self._finished.append(self._compute(self._without_lost(plan)))

    @property
    def pass_queued(self) -> bool:
        return bool(self._queued)

    @property
    def passes_queued(self) -> int:
        return len(self._queued)

    def collect(self) -> list[ModelRunnerOutput]:
        while self.eager and self._queued:
            self.finish_pass()
            if self.one_by_one:
                break
        if self.hold_readback:
            return []
        finished, self._finished = self._finished, []
        return finished

    def inject(self, output: ModelRunnerOutput) -> None:
        """A result that nobody asked for."""
        self._finished.append(output)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._queued or self._finished)

    def set_event_sink(self, sink: Callable[[], None] | None) -> None:
        self._sink = sink

    def memory_breakdown(self) -> dict[str, int]:
        return {}

    def warm_up(self) -> None: ...
    def synchronize(self) -> None: ...
    def shutdown(self) -> None:
        self.shut_down = True

    # The made-up model.

    def _without_lost(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Rows of requests that an earlier pass has lost give no result."""
        rows = {
            name: tuple(r for r in getattr(plan, name) if r.generation not in self._lost)
            for name in ("finalize", "prefill", "prelude", "loops", "coda")
        }
        return msgspec.structs.replace(plan, **rows) if self._lost else plan

    def _compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for finalize in plan.finalize:
            self._finalize(finalize)
        ranges = tuple(self._prefill(row) for row in plan.prefill)
        for prelude in plan.prelude:
            self._prelude(prelude)
        loops = [self._loop(row) for row in plan.loops]
        self.scores += [score for _, score in loops if score is not None]
        return ModelRunnerOutput(
            sequence=plan.sequence,
            stage=plan.stage,
            finished_ranges=ranges,
            finished_loops=tuple(finished for finished, _ in loops),
            gate_scores=tuple(score for _, score in loops if score is not None),
            tokens=tuple(self._coda(row) for row in plan.coda),
        )

    def _prefill(self, row: PrefillRow) -> FinishedRange:
        positions = range(row.range.start, row.range.stop)
        if row.depth == 0:
            self._chunks[row.generation] = [mix(token) for token in row.tokens]
        states = self._chunks[row.generation]
        active = {p for run in row.runs for p in range(run.start, run.stop)}
        for index, position in enumerate(positions):
            if position not in active:
                continue
            states[index] = self._attend(
                row.generation, row.blocks, position, row.depth, states[index]
            )
        if row.keep_hidden:
            assert self._slots[row.generation] == row.slot
            self.memory.hidden[row.slot] = (row.generation, states[-1])
        return FinishedRange(row.generation, row.depth, row.range, row.keep_hidden, 0.0)

    def _prelude(self, row: PreludeRow) -> None:
        assert self._slots[row.generation] == row.slot
        token = row.token
        if token is None:
            owner, output_index, token = self.memory.tokens[row.slot]
            assert (owner, output_index + 1) == (row.generation, row.output_index)
        self.memory.hidden[row.slot] = (row.generation, mix(token))

    def _loop(self, row: LoopRow) -> tuple[FinishedLoop, GateScore | None]:
        owner, state = self.memory.hidden[row.slot]
        assert owner == row.generation, "reads another request's hidden state"
        state = self._attend(row.generation, row.blocks, row.position, row.depth, state)
        self.memory.hidden[row.slot] = (row.generation, state)
        finished = FinishedLoop(row.generation, row.position, row.depth)
        if not row.want_score:
            return finished, None
        hazard = (mix(state, 2 if row.random_head else 1) % 1000) / 1500
        return finished, GateScore(row.generation, row.position, row.depth, hazard)

    def _coda(self, row: CodaRow) -> SampledToken:
        owner, state = self.memory.hidden[row.hidden_slot]
        assert owner == row.generation, "samples from another request's hidden state"
        draw = mix(state, row.sampling.seed or 0, row.output_index)
        logprobs = None if row.sampling.logprobs is None else TokenLogprobs(-1.0, ())
        if row.keep_slot is not None:
            assert self._slots[row.generation] == row.keep_slot
            self.memory.tokens[row.keep_slot] = (row.generation, row.output_index, draw % VOCAB)
        gap = None if row.expected in (None, draw % VOCAB) else self.gap
        return SampledToken(row.generation, row.output_index, draw % VOCAB, logprobs, gap)

    def _attend(
        self,
        generation: Generation,
        blocks: tuple[int, ...],
        position: int,
        depth: int,
        state: int,
    ) -> int:
        """Write this position's entry, then read all up to it, as attention does."""
        size = self._geometry.block_size
        column, offset = divmod(position, size)
        self.memory.kv[blocks[column], offset] = (generation, position, mix(state, depth))
        for earlier in range(position + 1):
            column, offset = divmod(earlier, size)
            owner, written_for, value = self.memory.kv[blocks[column], offset]
            assert (owner, written_for) == (generation, earlier), (
                f"generation {generation} at {position}, depth {depth} reads {earlier}: "
                f"found generation {owner}, position {written_for}"
            )
            state = mix(state, value)
        return state

    def _finalize(self, row: FinalizeRow) -> None:
        entry = self.memory.kv[row.source, row.offset]
        assert entry[0] == row.generation, "copies another request's K/V"
        for target in row.targets:
            self.memory.kv[target, row.offset] = entry


def copy_range(
    source: SimulatedExecutor,
    target: SimulatedExecutor,
    blocks: tuple[int, ...],
    peer_blocks: tuple[int, ...],
    span: TokenRange,
    block_size: int,
) -> None:
    """What a WRITE does: one plane's K/V of `span`."""
    for position in range(span.start, span.stop):
        column, offset = divmod(position, block_size)
        entry = source.memory.kv[blocks[column], offset]
        target.memory.kv[peer_blocks[column], offset] = entry


def _take(held: dict[Generation, int], generation: Generation, numbers: range) -> int | None:
    if generation not in held:
        free = [number for number in numbers if number not in held.values()]
        if not free:
            return None
        held[generation] = free[0]
    return held[generation]


def _rows_of(plan: SchedulerOutput) -> list[Generation]:
    rows = [row.generation for row in plan.prefill] + [row.generation for row in plan.loops]
    rows += [row.generation for row in plan.prelude]
    return rows + [row.generation for row in plan.coda]
