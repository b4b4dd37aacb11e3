"""One handoff of ten tokens over three depths, in the pieces of which its tests are made."""

from rlt.connector.messages import ChunkSpec, Commit
from rlt.connector.sender import Sender
from rlt.runtime.events import Reservation
from rlt.runtime.plans import (
    Arrival,
    FinishedRange,
    SendOrder,
    SendProgress,
    TransferFeedback,
)
from rlt.runtime.types import AllocationId, Generation, KVGeometry, TokenRange

GEOMETRY = KVGeometry(
    num_layers=2,
    num_depths=3,
    num_kv_heads=2,
    head_dim=4,
    hidden_size=8,
    block_size=4,
    dtype="float32",
)
G = Generation(7)
P, D = "prefill-0-aa", "decode-0-bb"
PROMPT = 10


def reservation(prompt: int = PROMPT, cached: int = 0) -> Reservation:
    blocks = GEOMETRY.plane_blocks(prompt)
    tables = tuple(tuple(range(d * blocks, (d + 1) * blocks)) for d in range(3))
    return Reservation(
        allocation=AllocationId(5), tables=tables, hidden_slot=1, cached_tokens=cached
    )


def tables(prompt: int = PROMPT) -> tuple[tuple[int, ...], ...]:
    blocks = GEOMETRY.plane_blocks(prompt)
    return tuple(tuple(100 + d * blocks + i for i in range(blocks)) for d in range(3))


def finished(depth: int, start: int, stop: int, *, hidden: bool = False) -> FinishedRange:
    return FinishedRange(G, depth, TokenRange(start, stop), hidden, 1.0)


def posted(sequence: int) -> TransferFeedback:
    return TransferFeedback(posted=(SendProgress(G, sequence, 64, 1.0),))


def sent(sequence: int) -> TransferFeedback:
    return TransferFeedback(sent=(SendProgress(G, sequence, 64, 1.0),))


def arrived(sequence: int, allocation: int = 5) -> TransferFeedback:
    return TransferFeedback(arrived=(Arrival(G, allocation, sequence, 1.0, P),))


def one_chunk_prompt(p: Sender) -> list[SendOrder]:
    p.on_prefill_admitted(G, tables(), 3)
    for depth in range(3):
        p.on_ranges_finished([finished(depth, 0, PROMPT, hidden=depth == 2)])
    return p.take_orders()


def full_commit(**changes: object) -> Commit:
    chunks = tuple(ChunkSpec(depth, depth, TokenRange(0, PROMPT)) for depth in range(3))
    hidden = ChunkSpec(3, None, TokenRange(PROMPT - 1, PROMPT))
    fields = {"generation": G, "allocation": 5, "chunks": (*chunks, hidden), **changes}
    return Commit(**fields)  # type: ignore[arg-type]
