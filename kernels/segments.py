"""What one pass of paged attention reads and writes: segments of query positions and their blocks.

Owns the host arrays and the device indices made from them, once per pass for every layer. Never
touches K or V. A segment sees positions 0..kv_length-1 of one plane and nothing behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .gather_plan import GatherGroup, plan_groups
from .launch_indices import LaunchIndices, launch_indices
from .scratch import KEEP_BYTES, GatherScratch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PoolShape:
    """The shape of the pool: [num_blocks, layers, K|V, block_size, kv_heads, head_dim]."""

    layers: int
    block_size: int
    position_bytes: int  # one position's K (or V) in one layer

    @property
    def block_rows(self) -> int:
        """Position rows in one block, over its layers, K and V."""
        return self.layers * 2 * self.block_size


@dataclass(frozen=True)
class Segment:
    """query_length >= 1 positions of one request at one depth, ending at kv_length - 1.

    blocks: the depth plane's block row; it covers at least kv_length positions. kv_length 0 makes
    padding: its queries stand nowhere, are not stored, and attention gives them zeros.
    """

    query_length: int
    kv_length: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Segments:
    """A batch of segments; queries lie one segment after the other in [tokens, ...] tensors."""

    items: Sequence[Segment]
    shape: PoolShape
    device: torch.device
    dtype: torch.dtype
    scratch: GatherScratch = field(default_factory=GatherScratch)
    _tables: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        width = max([1, *(self.shape_blocks(item.kv_length) for item in self.items)])
        tables = np.zeros((len(self.items), width), dtype=np.int64)
        for row, item in zip(tables, self.items, strict=True):
            used = self.shape_blocks(item.kv_length)
            row[:used] = item.blocks[:used]
        object.__setattr__(self, "_tables", tables)

    def shape_blocks(self, positions: int) -> int:
        return -(-positions // self.shape.block_size)

    @cached_property
    def query_lengths(self) -> Ints:
        return np.array([item.query_length for item in self.items], dtype=np.int64)

    @cached_property
    def kv_lengths(self) -> Ints:
        return np.array([item.kv_length for item in self.items], dtype=np.int64)

    @cached_property
    def _owner_and_position(self) -> tuple[Ints, Ints]:
        """For every query token: its segment, and its position in its sequence."""
        lengths = self.query_lengths
        owner = np.repeat(np.arange(len(lengths)), lengths)
        first = np.cumsum(lengths) - lengths
        within = np.arange(len(owner)) - first[owner]
        return owner, (self.kv_lengths - lengths)[owner] + within

    @cached_property
    def positions(self) -> Tensor:
        """[tokens] int64: where each query stands in its sequence (its RoPE phase)."""
        return torch.from_numpy(self._owner_and_position[1]).to(self.device)

    @cached_property
    def _slots(self) -> Ints:
        """[tokens]: block * block_size + offset of each query, -1 for padding."""
        owner, position = self._owner_and_position
        size = self.shape.block_size
        slots: Ints = self._tables[owner, position.clip(0) // size] * size + position % size
        return np.where(position < 0, -1, slots)

    @cached_property
    def write_slots(self) -> Tensor:
        """[tokens] int64: block * block_size + offset of each query, -1 for padding."""
        return torch.from_numpy(self._slots).to(self.device)

    @cached_property
    def stored(self) -> Tensor | None:
        """[stored tokens] int64: the queries that are not padding, or None when all are."""
        if (self._slots >= 0).all():
            return None
        return torch.from_numpy(np.flatnonzero(self._slots >= 0)).to(self.device)

    @cached_property
    def write_rows(self) -> Tensor:
        """[stored tokens * 2] int64: row of each query's K, then of its V, in layer 0 of the flat
        pool."""
        size = self.shape.block_size
        block, offset = np.divmod(self._slots[self._slots >= 0], size)
        keys = block * self.shape.block_rows + offset
        rows = np.stack((keys, keys + size), axis=1).reshape(-1)
        return torch.from_numpy(rows).to(self.device)

    @cached_property
    def groups(self) -> list[GatherGroup]:
        """How the reference attends: segments of equal query length, padded together."""
        return plan_groups(
            query_lengths=self.query_lengths,
            kv_lengths=self.kv_lengths,
            tables=self._tables,
            block_size=self.shape.block_size,
            block_rows=self.shape.block_rows,
            most_positions=KEEP_BYTES // (2 * self.shape.position_bytes),
            device=self.device,
            dtype=self.dtype,
        )

    @cached_property
    def launch(self) -> LaunchIndices:
        """What a Triton launch reads of these segments."""
        return launch_indices(
            query_lengths=self.query_lengths,
            kv_lengths=self.kv_lengths,
            tables=self._tables,
            device=self.device,
        )
