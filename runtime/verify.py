"""Runs several positions of requests through every loop at once: speculation's check.

Owns nothing. Writes K and V of these positions in every plane, touches no hidden row, and tells the
greedy choice after each position. Layout last_exited alone: in `shared`, positions run one by one.
"""

from collections.abc import Sequence

from ..kernels.scratch import GatherScratch
from ..kernels.segments import Segment, Segments
from .batch import integers, pool_shape
from .errors import InvariantBroken
from .kv_storage import KVStorage
from .models.base import LoopedModel
from .plans import Verified, VerifyRow
from .sampling import greedy


def verify(
    model: LoopedModel, storage: KVStorage, rows: Sequence[VerifyRow], scratch: GatherScratch
) -> tuple[Verified, ...]:
    if not rows:
        return ()
    if storage.geometry.layout != "last_exited":
        raise InvariantBroken("a VERIFY pass needs layout last_exited, this engine's is shared")
    hidden = model.embed(integers([t for row in rows for t in row.tokens], storage.hidden))
    for depth in range(storage.geometry.num_depths):
        segments = Segments(
            [
                Segment(len(row.tokens), row.start + len(row.tokens), row.tables[depth])
                for row in rows
            ],
            pool_shape(storage.geometry),
            hidden.device,
            hidden.dtype,
            scratch,
        )
        hidden = model.loop(hidden, storage.kv, segments)
    tokens = iter(greedy(model.logits(hidden)).tolist())
    return tuple(
        Verified(row.generation, row.start, tuple(next(tokens) for _ in row.tokens)) for row in rows
    )
