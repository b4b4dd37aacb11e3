"""Runs several positions of requests through every loop at once: speculation's check.

Owns nothing. Writes K and V of these positions in every plane, touches no hidden row, and tells the
greedy choice after each position. Layout last_exited alone: in `shared`, positions run one by one.
"""

from collections.abc import Sequence

import torch

from ..kernels.scratch import GatherScratch
from ..kernels.segments import Segment, Segments
from .batch import integers, pool_shape
from .errors import InvariantBroken
from .kv_storage import KVStorage
from .models.base import LoopedModel
from .plans import RowFailure, Verified, VerifyRow
from .sampling import NOT_FINITE


def verify(
    model: LoopedModel, storage: KVStorage, rows: Sequence[VerifyRow], scratch: GatherScratch
) -> tuple[tuple[Verified, ...], tuple[RowFailure, ...]]:
    """A row with logits that are not finite fails alone."""
    if not rows:
        return (), ()
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
    values, best = model.logits(hidden).max(-1)
    lengths = [len(row.tokens) for row in rows]
    finite = [bool(part.all()) for part in torch.split(values.isfinite(), lengths)]
    tokens = [tuple(part.tolist()) for part in torch.split(best, lengths)]
    return (
        tuple(
            Verified(row.generation, row.start, chosen)
            for row, chosen, good in zip(rows, tokens, finite, strict=True)
            if good
        ),
        tuple(
            RowFailure(row.generation, NOT_FINITE)
            for row, good in zip(rows, finite, strict=True)
            if not good
        ),
    )
