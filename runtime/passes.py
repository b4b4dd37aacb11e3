"""Pure planning: which requests take part in the next pass, and the frozen rows they become.

Reads requests and block tables, changes neither. Depths, positions and output indices are fixed
here, at submission: a result is matched with the row that asked for it.
"""

from collections.abc import Iterable, Sequence

from .kv_manager import KVManager
from .plans import (
    CodaRow,
    FinalizeRow,
    LoopRow,
    PrefillRow,
    PreludeRow,
    SchedulerOutput,
    Stage,
)
from .request import Chunk, Phase, Request
from .types import Generation


def choose_stage(requests: Iterable[Request], prefill_turn: bool) -> Stage | None:
    """CODA before PRELUDE before RECURRENT; a prompt chunk gets its turn between two loop passes.

    prefill_turn: a loop pass ran since the last prompt chunk.
    """
    phases = {request.phase for request in requests}
    if Phase.NEEDS_CODA in phases:
        return Stage.CODA
    if Phase.NEEDS_PRELUDE in phases:
        return Stage.PRELUDE
    if Phase.PREFILLING in phases and (prefill_turn or Phase.NEEDS_LOOP not in phases):
        return Stage.PREFILL
    return Stage.RECURRENT if Phase.NEEDS_LOOP in phases else None


def prefill_rows(
    requests: Iterable[Request], kv: KVManager, *, chunk_tokens: int, num_loops: int
) -> tuple[PrefillRow, ...]:
    """One loop of as many chunks as fit the token budget, first come first served.

    A chunk is never cut to what is left of the budget, so its bounds do not depend on its
    neighbours; the first one always fits.
    """
    budget = chunk_tokens
    rows: list[PrefillRow] = []
    for request in requests:
        if request.phase is Phase.PREFILLING:
            chunk = request.next_chunk(chunk_tokens)
            if len(chunk.range) <= budget:
                budget -= len(chunk.range)
                rows.append(_prefill_row(request, chunk, kv, num_loops))
        if budget <= 0:
            break
    return tuple(rows)


def _prefill_row(request: Request, chunk: Chunk, kv: KVManager, num_loops: int) -> PrefillRow:
    span = chunk.range
    last_loop = chunk.depth == num_loops - 1
    return PrefillRow(
        generation=request.generation,
        slot=_slot(request),
        depth=chunk.depth,
        range=span,
        tokens=request.spec.prompt[span.start : span.stop] if chunk.depth == 0 else (),
        blocks=kv.plane_row(request.generation, chunk.depth, span.stop),
        last_loop=last_loop,
        keep_hidden=last_loop and span.stop == len(request.spec.prompt),
    )


def prelude_rows(requests: Sequence[Request]) -> tuple[PreludeRow, ...]:
    return tuple(
        PreludeRow(
            generation=request.generation,
            slot=_slot(request),
            token=request.outputs[-1],
            output_index=len(request.outputs),
        )
        for request in requests
    )


def loop_rows(requests: Sequence[Request], kv: KVManager) -> tuple[LoopRow, ...]:
    return tuple(
        LoopRow(
            generation=request.generation,
            slot=_slot(request),
            position=request.position,
            depth=request.loops_done,
            blocks=kv.plane_row(request.generation, request.loops_done, request.position + 1),
            want_score=request.policy.wants_score(request.loops_done + 1),
        )
        for request in requests
    )


def coda_rows(requests: Sequence[Request]) -> tuple[CodaRow, ...]:
    """The first output of a received prompt is read from its receive slot."""
    return tuple(
        CodaRow(
            generation=request.generation,
            hidden_slot=_slot(request) if request.receive_slot is None else request.receive_slot,
            output_index=len(request.outputs),
            sampling=request.spec.sampling,
        )
        for request in requests
    )


def finalize_rows(
    requests: Sequence[Request], kv: KVManager, *, block_size: int, num_loops: int
) -> tuple[FinalizeRow, ...]:
    """Fill the deeper planes of positions whose token exited early, before anything reads them."""
    rows: list[FinalizeRow] = []
    for request in requests:
        if request.exited is None:
            continue
        column, offset = divmod(request.exited.position, block_size)
        tables = kv.allocation(request.generation).tables
        rows.append(
            FinalizeRow(
                generation=request.generation,
                offset=offset,
                source=tables[request.exited.exit_depth - 1][column],
                targets=tuple(
                    tables[depth][column] for depth in range(request.exited.exit_depth, num_loops)
                ),
            )
        )
    return tuple(rows)


def generations(plan: SchedulerOutput) -> list[Generation]:
    """Whose memory the pass touches, each once."""
    return [
        *(row.generation for row in plan.prefill),
        *(row.generation for row in plan.prelude),
        *(row.generation for row in plan.loops),
        *(row.generation for row in plan.coda),
    ]


def _slot(request: Request) -> int:
    assert request.slot is not None, f"generation {request.generation} runs without a slot"
    return request.slot
