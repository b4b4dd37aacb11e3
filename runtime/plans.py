"""The records that cross between Scheduler and Executor. Frozen; no mutable Request in them.

A SchedulerOutput says what runs; a ModelRunnerOutput says what came out, by kind. A reader never
infers meaning from the stage: it looks at the rows or results that are there.
"""

from enum import StrEnum

import msgspec

from .types import Generation, SamplingParams, TokenLogprobs, TokenRange


class Stage(StrEnum):
    PREFILL = "prefill"  # a prompt chunk, one loop
    PRELUDE = "prelude"  # embed one sampled token per row
    RECURRENT = "recurrent"  # one loop for rows that may each be at another depth
    CODA = "coda"  # LM head and sampling
    VERIFY = "verify"  # several positions of one request, all loops, in one pass


class PrefillRow(msgspec.Struct, frozen=True, gc=False):
    """One loop over positions `range` of one prompt, at `depth`.

    tokens: the chunk's token IDs at depth 0, else empty (the worker keeps the chunk's hidden states
    between loops). blocks: the depth plane's block row, covering positions 0..range.stop-1.
    keep_hidden: the chunk holds the last prompt token and this is the last loop, so that token's
    hidden state goes to hidden[slot].
    active: the runs of positions that take part, or None for all. The others are replayed tokens
    that ended at an earlier loop: their hidden states stay as they are.
    """

    generation: Generation
    slot: int
    depth: int
    range: TokenRange
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    last_loop: bool
    keep_hidden: bool
    active: tuple[TokenRange, ...] | None = None

    @property
    def runs(self) -> tuple[TokenRange, ...]:
        """What is computed."""
        return (self.range,) if self.active is None else self.active


class PreludeRow(msgspec.Struct, frozen=True, gc=False):
    """hidden[slot] = embedding of `token`, which is output `output_index - 1`.

    output_index is the output that the coming loops will produce. token None: it is on the device,
    kept for this slot by the CODA row that sampled it.
    """

    generation: Generation
    slot: int
    token: int | None
    output_index: int


class LoopRow(msgspec.Struct, frozen=True, gc=False):
    """One loop of one decode row: hidden[slot] -> hidden[slot], K/V written at (depth, position).

    blocks: the depth plane's block row covering positions 0..position.
    want_score: evaluate the exit gate after this loop, or the frozen random head instead of it.
    """

    generation: Generation
    slot: int
    position: int
    depth: int
    blocks: tuple[int, ...]
    want_score: bool
    random_head: bool = False


class FinalizeRow(msgspec.Struct, frozen=True, gc=False):
    """Copy one position's K/V (every layer) from the exit plane's block to deeper planes' blocks.

    Runs before any other work of the same SchedulerOutput.
    """

    generation: Generation
    offset: int  # position within the block
    source: int
    targets: tuple[int, ...]


class CodaRow(msgspec.Struct, frozen=True, gc=False):
    """LM head over hidden[hidden_slot], then sample output `output_index`.

    keep_slot: the sampled token also stays on the device for this slot's next PRELUDE. exit_depth:
    loops that the token ran, told with the output. expected: the token that an earlier attempt
    delivered as this output, which must come out again.
    """

    generation: Generation
    hidden_slot: int
    output_index: int
    sampling: SamplingParams
    keep_slot: int | None = None
    exit_depth: int = 0
    expected: int | None = None


class VerifyRow(msgspec.Struct, frozen=True, gc=False):
    """Run `tokens` at positions start, start+1, ... through all loops (last_exited only) and tell
    the greedy next token of each position. tables: [depth] block rows covering all of them."""

    generation: Generation
    start: int
    tokens: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One pass. `sequence` counts passes of one engine from 1. Rows of one stage only, but a
    RECURRENT pass may carry rows of prompt chunks too, which share its one call of the stack."""

    sequence: int
    stage: Stage
    finalize: tuple[FinalizeRow, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    prelude: tuple[PreludeRow, ...] = ()
    loops: tuple[LoopRow, ...] = ()
    coda: tuple[CodaRow, ...] = ()
    verify: tuple[VerifyRow, ...] = ()


class GateScore(msgspec.Struct, frozen=True, gc=False):
    """sigmoid(gate(hidden)) in float32, with what produced it."""

    generation: Generation
    position: int
    depth: int
    score: float


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """gap: how near the row's expected token was, where another one came out: its logit's distance
    from the largest, or the draw's distance from its share."""

    generation: Generation
    output_index: int
    token: int
    logprobs: TokenLogprobs | None
    gap: float | None = None


class Verified(msgspec.Struct, frozen=True, gc=False):
    """next_tokens[i]: the greedy choice after position start + i."""

    generation: Generation
    start: int
    next_tokens: tuple[int, ...]


class FinishedLoop(msgspec.Struct, frozen=True, gc=False):
    """A decode row's loop is done: its K/V stands at (depth, position)."""

    generation: Generation
    position: int
    depth: int


class FinishedRange(msgspec.Struct, frozen=True, gc=False):
    """K/V of (depth, range) of a prompt are written and may be sent. The event that frees a depth.

    hidden_ready: the last prompt token's hidden state stands in its slot too.
    """

    generation: Generation
    depth: int
    range: TokenRange
    hidden_ready: bool
    at_s: float


class RowFailure(msgspec.Struct, frozen=True, gc=False):
    """This request's rows did not run, and why; the other rows of the pass did."""

    generation: Generation
    reason: str


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one pass produced. `error`: the pass failed as a whole, and so does every row of it.

    failed: requests of which no row ran; they have no other result here.
    """

    sequence: int
    stage: Stage
    gate_scores: tuple[GateScore, ...] = ()
    finished_loops: tuple[FinishedLoop, ...] = ()
    finished_ranges: tuple[FinishedRange, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    verified: tuple[Verified, ...] = ()
    failed: tuple[RowFailure, ...] = ()
    error: str | None = None
    compute_s: float = 0.0


class SendOrder(msgspec.Struct, frozen=True, gc=False):
    """Post one WRITE: chunk `sequence` of a generation, to the peer that reserved its target.

    blocks, peer_blocks: source and target block numbers covering `range`, in order; both empty and
    depth None when the chunk is the hidden state, which goes from hidden_slot to peer_hidden_slot.
    """

    generation: Generation
    peer: str  # incarnation of the decode worker
    sequence: int
    depth: int | None
    range: TokenRange
    blocks: tuple[int, ...]
    peer_blocks: tuple[int, ...]
    hidden_slot: int
    peer_hidden_slot: int
    allocation: int = 0  # D's allocation: travels in the notification


class SendProgress(msgspec.Struct, frozen=True, gc=False):
    """A WRITE was posted, or its handle became terminal."""

    generation: Generation
    sequence: int
    num_bytes: int
    at_s: float


class SendFailure(msgspec.Struct, frozen=True, gc=False):
    """A WRITE failed. terminal is False when its handle never reached an end."""

    generation: Generation
    sequence: int
    reason: str
    terminal: bool


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A NIXL notification: the bytes of one chunk are in this worker's memory. source: the
    incarnation that the agent faces which it came to."""

    generation: Generation
    allocation: int
    sequence: int
    at_s: float
    source: str


class TransferFeedback(msgspec.Struct, frozen=True, gc=False):
    """What the worker-side connector saw since it was last asked."""

    posted: tuple[SendProgress, ...] = ()
    sent: tuple[SendProgress, ...] = ()
    failed: tuple[SendFailure, ...] = ()
    arrived: tuple[Arrival, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.posted or self.sent or self.failed or self.arrived)
