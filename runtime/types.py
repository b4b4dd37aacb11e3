"""Plain values that every layer names: identities, ranges, request parameters, KV geometry.

Standard library and msgspec only; nothing here has behaviour beyond checking and arithmetic.
Half-open ranges everywhere; a depth (0..R-1) and a position are never the same type of thing.
"""

from enum import StrEnum
from typing import Literal, NewType

import msgspec

Generation = NewType("Generation", int)  # one attempt at one request; never reused
RequestId = NewType("RequestId", str)  # the caller's word; may come back
AllocationId = NewType("AllocationId", int)  # one grant of a block table; never reused

BlockTables = tuple[tuple[int, ...], ...]  # [plane][block index] -> block number
Dtype = Literal["float32", "bfloat16"]
KVLayout = Literal["last_exited", "shared"]
ExitMode = Literal["ouro", "ouro_delayed", "random_lookahead", "trace"]
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


class TokenRange(msgspec.Struct, frozen=True, array_like=True):
    """Positions start, ..., stop-1 of one sequence. Says nothing about loop depth."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token, which is part of the output
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How output tokens are chosen and when a request stops.

    temperature 0 is greedy. top_k 0 and top_p 1 switch those filters off. A draw depends on
    (seed, output index) alone. logprobs: how many top alternatives to report per token besides
    the chosen one (None: report nothing).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


class ExitParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller asks about early exit; None takes the checkpoint's default.

    trace: loops per output token, for mode "trace" alone; entry 0 is R.
    """

    exit_mode: ExitMode = "ouro"
    trace: tuple[int, ...] | None = None
    exit_threshold: float | None = None
    min_loops: int | None = None
    max_loops: int | None = None


class ExitSettings(msgspec.Struct, frozen=True):
    """ExitParams with every default filled in and checked: 1 <= min_loops <= max_loops <= R.

    trace: for mode "trace", at least as many entries as the request has outputs; else empty.
    """

    threshold: float
    min_loops: int
    max_loops: int
    mode: ExitMode = "ouro"
    trace: tuple[int, ...] = ()


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the KV cache. Two workers may pair only if theirs are equal.

    A block is (one depth plane, block_size positions, all layers, K and V), contiguous, laid out as
    [layer, K|V, position, kv head, head_dim]. Layout last_exited has a plane per depth; shared has
    one plane that every loop overwrites.
    """

    num_layers: int
    num_depths: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    block_size: int
    dtype: Dtype
    layout: KVLayout = "last_exited"

    @property
    def num_planes(self) -> int:
        return self.num_depths if self.layout == "last_exited" else 1

    def plane(self, depth: int) -> int:
        """The plane that a loop at `depth` writes and reads."""
        return depth if self.layout == "last_exited" else 0

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of one layer's K (or V): the smallest contiguous run."""
        return self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.block_size * self.position_bytes

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_size * ITEM_BYTES[self.dtype]

    def plane_blocks(self, tokens: int) -> int:
        """Blocks that one depth plane needs for `tokens` positions."""
        return -(-tokens // self.block_size)

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` positions need over all planes."""
        return self.plane_blocks(tokens) * self.num_planes


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, as an engine is given it: everything resolved, nothing optional left.

    capacity_tokens is the number of positions that can enter KV: prompt + max_tokens - 1, because a
    request that ends never runs its last token.

    delivered, delivered_depths: outputs that the client has from an earlier attempt, and the loops
    that each of them ran. They are replayed: P runs the prompt and all of them but the last, D
    derives the last one again as a check and goes on behind it.
    """

    generation: Generation
    prompt: tuple[int, ...]
    sampling: SamplingParams  # seed is set
    exit: ExitSettings
    priority: int = 0  # lower goes first
    delivered: tuple[int, ...] = ()
    delivered_depths: tuple[int, ...] = ()

    @property
    def capacity_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that P runs: the prompt, and what was delivered but for its last token."""
        return self.prompt + self.delivered[:-1]

    @property
    def context_tokens(self) -> int:
        return len(self.prompt) + max(0, len(self.delivered) - 1)

    @property
    def first_output(self) -> int:
        """The output that the handed-over hidden state leads to; not delivered again if it was."""
        return max(0, len(self.delivered) - 1)

    def context_loops(self, position: int, num_loops: int) -> int:
        """Loops that the context's token at `position` runs: a replayed one as many as it ran when
        it was first computed, which is told by the output that it led to."""
        replayed = position - len(self.prompt)
        return num_loops if replayed < 0 else self.delivered_depths[replayed + 1]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one output position, before temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token ID, log-probability), best first


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What admission needs to know about the checkpoint that a worker serves."""

    name: str
    fingerprint: str  # digest over config and weights; equal on both sides of a pair
    vocab_size: int
    max_positions: int
    num_loops: int
    eos_token_ids: tuple[int, ...]
    default_exit_threshold: float


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """One event in a request's timeline. at_s is wall-clock time (seconds since the epoch)."""

    event: str
    at_s: float
    worker: str = ""
    depth: int | None = None
    num_bytes: int | None = None
