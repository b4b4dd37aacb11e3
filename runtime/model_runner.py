"""Runs one SchedulerOutput on the model: finalize first, then the rows that are there.

Owns the hidden states of prompt chunks between their loops. Never decides what runs, and never
looks at requests: a plan's rows say everything. Prompt and decode rows share one call of the stack.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.backend import REFERENCE, Kernels
from ..kernels.scratch import GatherScratch
from .batch import build_segments, finalize_indices, integers
from .device_tokens import DeviceTokens
from .errors import InvariantBroken
from .exit_scores import ExitScores
from .interfaces import Clock
from .kv_storage import KVStorage
from .models.base import LoopedModel
from .plans import (
    CodaRow,
    FinalizeRow,
    FinishedLoop,
    FinishedRange,
    GateScore,
    LoopRow,
    ModelRunnerOutput,
    PrefillRow,
    PreludeRow,
    RowFailure,
    SampledToken,
    SchedulerOutput,
)
from .sampling import sample
from .types import Generation
from .verify import verify


class ModelRunner:
    def __init__(
        self,
        model: LoopedModel,
        storage: KVStorage,
        clock: Clock,
        random_head_seed: int = 0,
        kernels: Kernels = REFERENCE,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._storage = storage
        self._clock = clock
        self._scratch = GatherScratch()
        self._scores = ExitScores(model, random_head_seed, storage.hidden, kernels)
        self.tokens = DeviceTokens(len(storage.hidden), storage.hidden.device, kernels)
        self._chunks: dict[Generation, Tensor] = {}  # [positions, hidden_size] after the last loop

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._finalize(plan.finalize)
            self._prelude(plan.prelude)
            scores = self._loop(plan.prefill, plan.loops)
            tokens, lost = self._coda(plan.coda)
            verified, unverified = verify(self._model, self._storage, plan.verify, self._scratch)
            self._settle(plan.prefill)
        at_s = self._clock.wall_s()
        return ModelRunnerOutput(
            sequence=plan.sequence,
            stage=plan.stage,
            gate_scores=scores,
            finished_loops=tuple(
                FinishedLoop(row.generation, row.position, row.depth) for row in plan.loops
            ),
            finished_ranges=tuple(
                FinishedRange(row.generation, row.depth, row.range, row.keep_hidden, at_s)
                for row in plan.prefill
            ),
            tokens=tokens,
            verified=verified,
            failed=lost + unverified,
            compute_s=time.perf_counter() - started_s,
        )

    def forget(self, generation: Generation) -> None:
        """Drop a prompt chunk's state; without effect if there is none."""
        self._chunks.pop(generation, None)

    def take_chunk(self, generation: Generation) -> Tensor | None:
        """A prompt chunk's state, which is no longer kept here."""
        return self._chunks.pop(generation, None)

    def put_chunk(self, generation: Generation, state: Tensor) -> None:
        self._chunks[generation] = state

    def chunk_bytes_of(self, generation: Generation) -> int:
        state = self._chunks.get(generation)
        return 0 if state is None else state.nbytes

    @property
    def chunk_bytes(self) -> int:
        return sum(state.nbytes for state in list(self._chunks.values()))

    def _settle(self, prefill: Sequence[PrefillRow]) -> None:
        """A finished range may be sent at once, so on CUDA its kernels must have ended."""
        if prefill and self._storage.kv.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _finalize(self, rows: Sequence[FinalizeRow]) -> None:
        if any(row.targets for row in rows):
            sources, offsets, targets = finalize_indices(rows, self._storage.kv)
            self._kernels.finalize(self._storage.kv, sources, offsets, targets, offsets)

    def _prelude(self, rows: Sequence[PreludeRow]) -> None:
        if rows:
            hidden = self._storage.hidden
            embedded = self._model.embed(self.tokens.inputs(rows))
            slots = integers([row.slot for row in rows], hidden)
            self._kernels.scatter_rows(hidden, slots, embedded)

    def _loop(
        self, prefill: Sequence[PrefillRow], loops: Sequence[LoopRow]
    ) -> tuple[GateScore, ...]:
        running = [row for row in prefill if row.runs]
        for row in prefill:
            if not row.runs:
                self._keep_chunk(row, self._chunk(row))
        if not running and not loops:
            return ()
        hidden = self._storage.hidden
        slots = integers([row.slot for row in loops], hidden)
        inputs = [self._chunk_input(row) for row in running]
        if loops:
            inputs.append(self._kernels.gather_rows(hidden, slots))
        flat = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        segments = build_segments(running, loops, self._storage.geometry, hidden, self._scratch)
        out = self._model.loop(flat, self._storage.kv, segments)
        start = 0
        for row in running:
            stop = start + sum(len(run) for run in row.runs)
            self._keep_chunk(row, self._whole_chunk(row, out[start:stop]))
            start = stop
        if not loops:
            return ()
        decoded = out[start:]
        self._kernels.scatter_rows(hidden, slots, decoded)
        return self._scores.of(loops, decoded)

    def _chunk_input(self, row: PrefillRow) -> Tensor:
        if len(row.range) > 1 and self._storage.geometry.layout == "shared":
            raise InvariantBroken(
                f"generation {row.generation}: a prompt row of {len(row.range)} positions; layout "
                "shared runs one position at a time"
            )
        if row.depth == 0:
            return self._model.embed(integers(row.tokens, self._storage.hidden))
        state = self._chunk(row)
        return (
            state if row.active is None else self._kernels.gather_rows(state, _places(row, state))
        )

    def _whole_chunk(self, row: PrefillRow, computed: Tensor) -> Tensor:
        """Positions that took no part keep the state of their last loop."""
        if row.active is None:
            return computed
        state = self._chunk(row)
        self._kernels.scatter_rows(state, _places(row, state), computed)
        return state

    def _chunk(self, row: PrefillRow) -> Tensor:
        state = self._chunks.get(row.generation)
        if state is None or len(state) != len(row.range):
            raise InvariantBroken(
                f"generation {row.generation}: no state of prompt positions {row.range.start} to "
                f"{row.range.stop - 1} to run depth {row.depth} on"
            )
        return state

    def _keep_chunk(self, row: PrefillRow, state: Tensor) -> None:
        if row.keep_hidden:
            self._storage.hidden[row.slot] = state[-1]
        if row.last_loop:
            self.forget(row.generation)
        else:
            self._chunks[row.generation] = state

    def _coda(
        self, rows: Sequence[CodaRow]
    ) -> tuple[tuple[SampledToken, ...], tuple[RowFailure, ...]]:
        if not rows:
            return (), ()
        hidden = self._storage.hidden
        slots = integers([row.hidden_slot for row in rows], hidden)
        states = self._kernels.gather_rows(hidden, slots)
        sampled = sample(self._model.logits(states), rows)
        self.tokens.keep(rows, sampled.tokens)
        return sampled.told, sampled.failed


def _places(row: PrefillRow, like: Tensor) -> Tensor:
    """Rows of the chunk's state that take part."""
    start = row.range.start
    return integers([p - start for run in row.runs for p in range(run.start, run.stop)], like)
