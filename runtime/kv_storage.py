"""The two tensors that NIXL registers: the KV pool and the hidden-state rows.

Owns their memory; says nothing about who may use which block (the KV manager does). Both are
contiguous and page-aligned, and are never moved or resized while the storage lives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import EngineConfig
from .errors import ConfigError
from .types import KVGeometry

PAGE_BYTES = 4096
CPU_POSITIONS = 8192
CPU_BYTES = 1024**3

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class KVPlan:
    """How much to allocate: asked for, or measured at start."""

    num_blocks: int
    hidden_rows: int


def plan_storage(config: EngineConfig, geometry: KVGeometry, device: str) -> KVPlan:
    rows = config.num_slots + config.num_receive_slots
    blocks = config.num_blocks
    if blocks is None and device == "cpu":
        blocks = min(geometry.blocks(CPU_POSITIONS), CPU_BYTES // geometry.block_bytes)
        blocks = max(blocks, geometry.num_planes)
    elif blocks is None:
        free_bytes, _ = torch.cuda.mem_get_info()
        blocks = int(free_bytes * config.memory_fraction) // geometry.block_bytes
    if blocks < geometry.num_planes:
        raise ConfigError(
            f"--num-blocks: {blocks} blocks cannot hold one position, which needs one block in "
            f"each of {geometry.num_planes} depth planes; raise --num-blocks or --memory-fraction"
        )
    return KVPlan(num_blocks=blocks, hidden_rows=rows)


class KVStorage:
    def __init__(self, plan: KVPlan, geometry: KVGeometry, device: str) -> None:
        self.geometry = geometry
        self.plan = plan
        dtype = TORCH_DTYPES[geometry.dtype]
        self._kv = _aligned(
            (
                plan.num_blocks,
                geometry.num_layers,
                2,
                geometry.block_size,
                geometry.num_kv_heads,
                geometry.head_dim,
            ),
            dtype,
            device,
        )
        self._hidden = _aligned((plan.hidden_rows, geometry.hidden_size), dtype, device)

    @property
    def kv(self) -> Tensor:
        """[num_blocks, layers, K|V, block_size, kv_heads, head_dim]"""
        return self._kv

    @property
    def hidden(self) -> Tensor:
        """[execution slots, then receive slots; hidden_size]"""
        return self._hidden


def _aligned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Uninitialised and page-aligned; untouched pages of a CPU pool take no memory yet."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % PAGE_BYTES
    return raw[start : start + size].view(dtype).view(shape)
