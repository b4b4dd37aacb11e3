"""What EngineCore.step() reports to whoever drives it, in order. Frozen records only."""

import msgspec

from .types import AllocationId, BlockTables, FinishReason, Generation, Stamp, TokenLogprobs


class TokensProduced(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs start_index, start_index+1, ... of one request. finish_reason comes with the last."""

    generation: Generation
    start_index: int
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]  # loops that each token ran; output 0 is always R
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class PrefillFinished(msgspec.Struct, frozen=True):
    """P computed every loop of every prompt position. Says nothing about what was sent."""

    generation: Generation
    stamps: tuple[Stamp, ...]


class Received(msgspec.Struct, frozen=True):
    """D holds everything; the request waits for an execution slot."""

    generation: Generation


class Activated(msgspec.Struct, frozen=True):
    """D gave the request an execution slot and queued CODA.

    prefill_tokens, recurrent_loops: what D had computed for this request by then (both 0).
    """

    generation: Generation
    prefill_tokens: int
    recurrent_loops: int


class RequestFailed(msgspec.Struct, frozen=True):
    """The request ends with a named error (see errors.py). Released follows."""

    generation: Generation
    code: str
    message: str


class Released(msgspec.Struct, frozen=True):
    """Every block, slot and lease of the generation is back (or quarantined and counted)."""

    generation: Generation
    quarantined_blocks: int = 0


EngineEvent = TokensProduced | PrefillFinished | Received | Activated | RequestFailed | Released


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """D's promise: where the KV of one generation is to be written. Positions [0, cached_tokens)
    are there already and are not sent."""

    allocation: AllocationId
    tables: BlockTables
    hidden_slot: int
    cached_tokens: int = 0


class Wait(msgspec.Struct, frozen=True):
    """Not now: ask again after something was released."""

    reason: str


class Refuse(msgspec.Struct, frozen=True):
    """Never: the request cannot fit this engine. code is an error code of errors.py."""

    code: str
    reason: str
