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
)
from .preemption import Urgency
from .replay import active_runs, ended_positions
from .request import Chunk, Request
from .types import Generation, KVGeometry

MAX_PASSED_OVER = 8


def prefill_rows(
    requests: Iterable[Request],
    kv: KVManager,
    geometry: KVGeometry,
    *,
    chunk_tokens: int,
) -> tuple[PrefillRow, ...]:
    """One loop of as many chunks as fit `chunk_tokens` positions, by priority and then in order.

    A chunk is never cut to what is left of them, so its bounds do not depend on its
    neighbours; the first one always fits, and who was passed over too often goes first. Layout
    shared reads the last executed version at every depth, so there a chunk is one position.
    """
    size, budget = chunk_tokens if geometry.layout == "last_exited" else 1, chunk_tokens
    rows: list[PrefillRow] = []
    for request in sorted(requests, key=_turn):
        chunk = request.next_chunk(size)
        if len(chunk.range) <= budget:
            budget -= len(chunk.range)
            rows.append(_prefill_row(request, chunk, kv, geometry))
        if budget <= 0:
            break
    return tuple(rows)


def _turn(request: Request) -> tuple[bool, Urgency]:
    return request.passed_over <= MAX_PASSED_OVER, request.urgency


def _prefill_row(request: Request, chunk: Chunk, kv: KVManager, geometry: KVGeometry) -> PrefillRow:
    span, num_loops = chunk.range, geometry.num_depths
    if geometry.layout == "shared":
        num_loops = request.spec.context_loops(span.start, num_loops)
    last_loop = chunk.depth == num_loops - 1
    return PrefillRow(
        generation=request.generation,
        slot=_slot(request),
        depth=chunk.depth,
        range=span,
        tokens=request.context[span.start : span.stop] if chunk.depth == 0 else (),
        blocks=kv.plane_row(request.generation, chunk.depth, span.stop),
        last_loop=last_loop,
        keep_hidden=last_loop and span.stop == len(request.context),
        active=active_runs(request.spec, span, chunk.depth, geometry.num_depths),
    )


def replayed_rows(
    prompts: Iterable[PrefillRow],
    requests: Iterable[Request],
    kv: KVManager,
    geometry: KVGeometry,
) -> tuple[FinalizeRow, ...]:
    """Fill the deeper planes of replayed positions whose last loop was the one before."""
    if geometry.layout == "shared":
        return ()
    specs = {request.generation: request.spec for request in requests if request.spec.delivered}
    return tuple(
        _finalize_row(row.generation, position, row.depth, kv, geometry)
        for row in prompts
        if row.generation in specs
        for position in ended_positions(
            specs[row.generation], row.range, row.depth, geometry.num_depths
        )
    )


def prelude_rows(requests: Sequence[Request]) -> tuple[PreludeRow, ...]:
    """The token is given where it is known here; else it is on the device."""
    return tuple(
        PreludeRow(
            generation=request.generation,
            slot=_slot(request),
            token=request.outputs[-1] if len(request.outputs) == request.next_output else None,
            output_index=request.next_output,
        )
        for request in requests
    )


def loop_rows(requests: Sequence[Request], kv: KVManager) -> tuple[LoopRow, ...]:
    return tuple(_loop_row(request, kv) for request in requests)


def _loop_row(request: Request, kv: KVManager) -> LoopRow:
    depth, position = request.loops, request.position
    want_score = request.policy.wants_score(depth + 1)
    return LoopRow(
        generation=request.generation,
        slot=_slot(request),
        position=position,
        depth=depth,
        blocks=kv.plane_row(request.generation, depth, position + 1),
        want_score=want_score,
        random_head=want_score and request.spec.exit.mode == "random_lookahead",
    )


def coda_rows(
    requests: Sequence[Request], *, num_loops: int, keep_tokens: bool
) -> tuple[CodaRow, ...]:
    """The first output of a received prompt is read from its receive slot; output 0 ran all loops.

    keep_tokens: a PRELUDE may be submitted before the token is known here.
    """
    return tuple(
        CodaRow(
            generation=request.generation,
            hidden_slot=_slot(request) if request.receive_slot is None else request.receive_slot,
            output_index=request.next_output,
            sampling=request.spec.sampling,
            keep_slot=_slot(request) if keep_tokens and _is_read_later(request) else None,
            exit_depth=request.exit_depth(num_loops),
            expected=request.expected,
        )
        for request in requests
    )


def _is_read_later(request: Request) -> bool:
    """A PRELUDE follows, and its token is not known here before."""
    return request.expected is None and not request.next_output_is_last


def finalize_rows(
    requests: Sequence[Request], kv: KVManager, geometry: KVGeometry
) -> tuple[FinalizeRow, ...]:
    """Fill the deeper planes of positions whose token exited early, before anything reads them."""
    rows: list[FinalizeRow] = []
    for request in requests:
        if request.leaves_prefill or request.next_output_is_last:
            continue
        if request.loops < geometry.num_planes:
            generation, position = request.generation, request.position
            rows.append(_finalize_row(generation, position, request.loops, kv, geometry))
    return tuple(rows)


def _finalize_row(
    generation: Generation, position: int, exit_depth: int, kv: KVManager, geometry: KVGeometry
) -> FinalizeRow:
    column, offset = divmod(position, geometry.block_size)
    return FinalizeRow(
        generation=generation,
        offset=offset,
        source=kv.block(generation, exit_depth - 1, column),
        targets=tuple(
            kv.block(generation, depth, column) for depth in range(exit_depth, geometry.num_planes)
        ),
    )


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
