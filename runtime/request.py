"""One request as the scheduler knows it: its phase, what was submitted of it, what came back.

Written by the scheduler alone and never handed out: other parts get frozen plans and events.
While it executes, its phase says what is to be SUBMITTED next (progress.py moves it on), and may be
ahead of what was APPLIED (pass_results.py). A phase changes only along MOVES.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .errors import InvariantBroken
from .events import Reservation
from .exit_policy import ExitPolicy, exit_policy_for
from .preemption import Urgency
from .types import EngineRequest, FinishReason, Generation, Stamp, TokenRange


class Role(StrEnum):
    LOCAL = "local"  # prefill and decode here
    PREFILL = "prefill"  # prompt only, then sent
    DECODE = "decode"  # prompt received


class Phase(StrEnum):
    WAITING = "waiting"  # queued; holds nothing
    PREFILLING = "prefilling"
    SENDING = "sending"  # P: computed; blocks are kept until the connector says SendEnded
    RECEIVING = "receiving"  # D: a peer may write its blocks and its receive slot
    RECEIVED = "received"  # D: all is in; waits for an execution slot
    NEEDS_CODA = "needs_coda"
    NEEDS_PRELUDE = "needs_prelude"
    NEEDS_LOOP = "needs_loop"
    AWAITS_SCORE = "awaits_score"  # a submitted loop's score decides what follows
    AWAITS_RESULT = "awaits_result"  # everything of it was submitted; the last result is to come
    SUSPENDED = "suspended"  # preempted: holds a snapshot, and nothing of the pool
    CANCELLING = "cancelling"  # over, but a pass or a peer may still touch its memory
    ENDED = "ended"


_OVER = {Phase.CANCELLING, Phase.ENDED}
_LEFT = _OVER | {Phase.SUSPENDED}  # where any request that executes may go
MOVES: dict[Phase, set[Phase]] = {
    Phase.WAITING: {Phase.PREFILLING, Phase.ENDED},
    Phase.PREFILLING: {Phase.NEEDS_CODA, Phase.AWAITS_RESULT} | _LEFT,
    Phase.SENDING: _OVER,
    Phase.RECEIVING: {Phase.RECEIVED} | _OVER,
    Phase.RECEIVED: {Phase.NEEDS_CODA} | _OVER,
    Phase.NEEDS_CODA: {Phase.NEEDS_PRELUDE, Phase.AWAITS_RESULT} | _LEFT,
    Phase.NEEDS_PRELUDE: {Phase.NEEDS_LOOP} | _LEFT,
    Phase.NEEDS_LOOP: {Phase.NEEDS_CODA, Phase.AWAITS_SCORE} | _LEFT,
    Phase.AWAITS_SCORE: {Phase.NEEDS_LOOP, Phase.NEEDS_CODA} | _OVER,
    Phase.AWAITS_RESULT: {Phase.SENDING} | _OVER,
    Phase.SUSPENDED: {
        *(Phase.PREFILLING, Phase.NEEDS_CODA, Phase.NEEDS_PRELUDE, Phase.NEEDS_LOOP),
        Phase.ENDED,
    },
    Phase.CANCELLING: {Phase.ENDED},
    Phase.ENDED: set(),
}


class Chunk(msgspec.Struct, frozen=True):
    """A prompt chunk whose loops are being submitted, and the depth of the next one."""

    range: TokenRange
    depth: int


@dataclass(slots=True)
class Request:
    spec: EngineRequest
    role: Role
    phase: Phase
    arrival: int = 0  # counts the requests of one engine
    slot: int | None = None  # execution slot: a row of hidden[]
    receive_slot: int | None = None  # D: where the last prompt token's hidden state lands
    reservation: Reservation | None = None  # D: the answer to every Reserve of this generation
    withdrawn: bool = False  # its receive slot may still be written by a peer
    completed: bool = False  # it produced its last output
    funded: int = 0  # snapshot bytes set aside: it may grow, and be suspended
    suspended_in: Phase | None = None  # where it goes on when it is restored
    # Submitted.
    chunk: Chunk | None = None
    prompt_submitted: int = 0  # positions whose every loop was submitted, or that need none
    passed_over: int = 0  # prompt passes that had no room for it, since it last took part
    next_output: int = 0  # what the work to be submitted next leads to
    loops: int = 0  # of the token that leads to next_output
    policy: ExitPolicy = field(init=False)
    context: tuple[int, ...] = field(init=False)  # what is prefilled
    # Applied.
    outputs: list[int] = field(default_factory=list)  # delivered ones of earlier attempts too
    stamps: list[Stamp] = field(default_factory=list)
    prefill_tokens: int = 0
    recurrent_loops: int = 0

    def __post_init__(self) -> None:
        self.policy = exit_policy_for(self.spec.exit)
        self.context = self.spec.context
        self.next_output = self.spec.first_output
        self.outputs = list(self.spec.delivered)

    @property
    def generation(self) -> Generation:
        return self.spec.generation

    @property
    def urgency(self) -> Urgency:
        return self.spec.priority, self.arrival

    @property
    def position(self) -> int:
        """Where the token that leads to next_output enters KV while it loops."""
        return len(self.spec.prompt) + self.next_output - 1

    @property
    def leaves_prefill(self) -> bool:
        """Whether the work to be submitted next is the CODA of what was prefilled or received."""
        return self.next_output == self.spec.first_output

    @property
    def expected(self) -> int | None:
        """The token that the next CODA must give, where an earlier attempt has delivered it."""
        delivered = self.spec.delivered
        return delivered[-1] if delivered and self.leaves_prefill else None

    def exit_depth(self, num_loops: int) -> int:
        """Loops that the token ran which leads to next_output; a whole prompt runs all."""
        if not self.leaves_prefill:
            return self.loops
        return self.spec.delivered_depths[-1] if self.spec.delivered else num_loops

    @property
    def over(self) -> bool:
        return self.phase in _OVER

    @property
    def next_output_is_last(self) -> bool:
        return self.next_output + 1 >= self.spec.sampling.max_tokens

    def move(self, to: Phase) -> None:
        if to not in MOVES[self.phase]:
            raise InvariantBroken(
                f"generation {self.generation}: {self.phase} -> {to} is not a move"
            )
        self.phase = to

    def next_chunk(self, chunk_tokens: int) -> Chunk:
        """The chunk under way, or the next one. Its bounds depend on nobody else's work."""
        if self.chunk is not None:
            return self.chunk
        stop = min(self.prompt_submitted + chunk_tokens, len(self.context))
        return Chunk(TokenRange(self.prompt_submitted, stop), 0)

    def finish_reason(self, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Why the last output ends the request, or None."""
        sampling, token = self.spec.sampling, self.outputs[-1]
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if token in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.outputs) >= sampling.max_tokens else None
