"""Drives a ModelRunner with hand-made plans, one request at a time or batched by loop.

Stands in for the Scheduler: bump allocation of blocks, no reuse. Keeps the raw numbers for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlt.runtime.plans import (
    CodaRow,
    FinalizeRow,
    LoopRow,
    ModelRunnerOutput,
    PrefillRow,
    PreludeRow,
    SchedulerOutput,
    Stage,
)
from rlt.runtime.types import Generation, KVGeometry, SamplingParams, TokenRange

Run = Callable[[SchedulerOutput], ModelRunnerOutput]


@dataclass
class Request:
    """One request as the driver sees it: its tokens, depths and blocks per plane."""

    generation: Generation
    slot: int
    prompt: Sequence[int]
    blocks: list[tuple[int, ...]]
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the last token stands when it is run."""
        return len(self.prompt) + len(self.tokens) - 1


class Driver:
    def __init__(self, run: Run, geometry: KVGeometry, num_blocks: int) -> None:
        self._run = run
        self.geometry = geometry
        # Taken from the end, one per plane in turn: no plane has consecutive blocks.
        self._free = list(range(num_blocks))
        self._sequence = 0
        self.outputs: list[ModelRunnerOutput] = []

    def step(self, stage: Stage, **rows: object) -> ModelRunnerOutput:
        self._sequence += 1
        plan = SchedulerOutput(sequence=self._sequence, stage=stage, **rows)  # type: ignore[arg-type]
        output = self._run(plan)
        assert output.error is None, output.error
        assert output.sequence == self._sequence
        self.outputs.append(output)
        return output

    def start(self, slot: int, prompt: Sequence[int], max_tokens: int) -> Request:
        need = self.geometry.plane_blocks(len(prompt) + max_tokens)
        rows = [[self._free.pop() for _ in range(self.geometry.num_planes)] for _ in range(need)]
        planes = [tuple(row[plane] for row in rows) for plane in range(self.geometry.num_planes)]
        return Request(Generation(slot + 1), slot, prompt, planes)

    def prefill(self, seq: Request, chunk: int) -> None:
        """Every loop of every chunk of the prompt, one loop per pass."""
        chunk = chunk if self.geometry.layout == "last_exited" else 1
        for start in range(0, len(seq.prompt), chunk):
            for depth in range(self.geometry.num_depths):
                self.step(Stage.PREFILL, prefill=(self.prefill_row(seq, start, chunk, depth),))

    def prefill_row(self, seq: Request, start: int, chunk: int, depth: int) -> PrefillRow:
        stop = min(start + chunk, len(seq.prompt))
        last = depth == self.geometry.num_depths - 1
        return PrefillRow(
            generation=seq.generation,
            slot=seq.slot,
            depth=depth,
            range=TokenRange(start, stop),
            tokens=tuple(seq.prompt[start:stop]) if depth == 0 else (),
            blocks=self._row(seq, depth, stop),
            last_loop=last,
            keep_hidden=last and stop == len(seq.prompt),
        )

    def coda(self, seqs: Sequence[Request], sampling: SamplingParams) -> None:
        rows = tuple(CodaRow(s.generation, s.slot, len(s.tokens), sampling) for s in seqs)
        output = self.step(Stage.CODA, coda=rows)
        by_generation = {s.generation: s for s in seqs}
        for sampled in output.tokens:
            by_generation[sampled.generation].tokens.append(sampled.token)

    def prelude(self, seqs: Sequence[Request]) -> None:
        rows = tuple(PreludeRow(s.generation, s.slot, s.tokens[-1], len(s.tokens)) for s in seqs)
        self.step(Stage.PRELUDE, prelude=rows)

    def loop_row(
        self, seq: Request, depth: int, want_score: bool = True, random_head: bool = False
    ) -> LoopRow:
        blocks = self._row(seq, depth, seq.position + 1)
        return LoopRow(
            seq.generation, seq.slot, seq.position, depth, blocks, want_score, random_head
        )

    def _row(self, seq: Request, depth: int, positions: int) -> tuple[int, ...]:
        plane = seq.blocks[self.geometry.plane(depth)]
        return plane[: self.geometry.plane_blocks(positions)]

    def finalize_row(self, seq: Request, exit_depth: int) -> FinalizeRow:
        """For the token that stands at seq.position."""
        index, offset = divmod(seq.position, self.geometry.block_size)
        targets = tuple(plane[index] for plane in seq.blocks[exit_depth:])
        return FinalizeRow(seq.generation, offset, seq.blocks[exit_depth - 1][index], targets)

    def decode_token(
        self,
        seqs: Sequence[Request],
        leaves: Callable[[Request, list[float]], bool],
        sampling: SamplingParams,
    ) -> None:
        """One token for every sequence: PRELUDE, loops until each row leaves, CODA."""
        self.prelude(seqs)
        hazards: dict[Generation, list[float]] = {s.generation: [] for s in seqs}
        finalize: list[FinalizeRow] = []
        running = list(seqs)
        for depth in range(self.geometry.num_depths):
            output = self.step(
                Stage.RECURRENT, loops=tuple(self.loop_row(s, depth) for s in running)
            )
            for score in output.gate_scores:
                hazards[score.generation].append(score.score)
            left = [s for s in running if leaves(s, hazards[s.generation])]
            if self.geometry.layout == "last_exited":
                finalize += [self.finalize_row(s, depth + 1) for s in left]
            for s in left:
                s.depths.append(depth + 1)
            running = [s for s in running if s not in left]
            if not running:
                break
        if finalize:
            self.step(Stage.RECURRENT, finalize=tuple(finalize))
        self.coda(seqs, sampling)


def ouro_exit(
    threshold: float, min_loops: int, max_loops: int
) -> Callable[[Request, list[float]], bool]:
    def leaves(_: Request, hazards: list[float]) -> bool:
        survival = 1.0
        for hazard in hazards:
            survival *= 1.0 - hazard
        loops = len(hazards)
        early = threshold < 1.0 and loops >= min_loops and 1.0 - survival >= threshold
        return early or loops >= max_loops

    return leaves
