"""Turns the rows of a plan into the tensors of one pass: prompt segments first, then decodes.

Pure: reads plans and shapes, makes indices, and touches neither KV nor hidden states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.scratch import GatherScratch
from ..kernels.segments import PoolShape, Segment, Segments
from .plans import FinalizeRow, LoopRow, PrefillRow
from .types import KVGeometry


def build_segments(
    prefill: Sequence[PrefillRow],
    loops: Sequence[LoopRow],
    geometry: KVGeometry,
    like: Tensor,
    scratch: GatherScratch,
) -> Segments:
    """like: a tensor whose device and dtype the queries will have."""
    prompts = [Segment(len(run), run.stop, row.blocks) for row in prefill for run in row.runs]
    decodes = [Segment(1, row.position + 1, row.blocks) for row in loops]
    return Segments(
        items=[*prompts, *decodes],
        shape=pool_shape(geometry),
        device=like.device,
        dtype=like.dtype,
        scratch=scratch,
    )


def pool_shape(geometry: KVGeometry) -> PoolShape:
    return PoolShape(
        layers=geometry.num_layers,
        block_size=geometry.block_size,
        position_bytes=geometry.position_bytes,
    )


def integers(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def finalize_indices(rows: Sequence[FinalizeRow], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One entry per target block: its source, the offset within the block, the target."""
    pairs = [(row.source, row.offset, target) for row in rows for target in row.targets]
    table = integers([value for pair in pairs for value in pair], like).view(-1, 3)
    sources, offsets, targets = table.unbind(1)
    return sources, offsets, targets
