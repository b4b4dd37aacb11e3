"""What the tests of Triton kernels share: devices, poisoned pools and memory, segments by length.

Every case runs the reference and the kernel on the same tensors: interpreted on a CPU, compiled on
CUDA (marked gpu).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlt.kernels.segments import PoolShape, Segment, Segments

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

LAYERS = 3
NAN = float("nan")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, or the largest integer, until somebody writes them."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all(), "torch no longer fills fresh memory"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


@dataclass(frozen=True)
class Shape:
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def pool(self) -> PoolShape:
        position = self.kv_heads * self.head_dim * self.dtype.itemsize
        return PoolShape(LAYERS, self.block_size, position)


class Pool:
    """NaN but for the positions that were filled, in one layer, in scattered blocks."""

    def __init__(self, shape: Shape, device: str, num_blocks: int) -> None:
        self.shape, self.device = shape, device
        size = (num_blocks, LAYERS, 2, shape.block_size, shape.kv_heads, shape.head_dim)
        self.kv = torch.full(size, NAN, dtype=shape.dtype, device=device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self._free: list[int] = order.tolist()

    def segment(self, query_length: int, kv_length: int, layer: int) -> Segment:
        size = self.shape.block_size
        blocks = [self._free.pop() for _ in range(-(-kv_length // size))]
        for index, block in enumerate(blocks):
            filled = min(size, kv_length - index * size)
            part = self.kv[block, layer, :, :filled]
            part.copy_(torch.randn(part.shape))
        return Segment(query_length, kv_length, blocks)

    def segments(self, items: Sequence[Segment]) -> Segments:
        return Segments(items, self.shape.pool, torch.device(self.device), self.shape.dtype)


def batch(
    lengths: Sequence[tuple[int, int]], shape: Shape, device: str, layer: int = LAYERS - 1
) -> tuple[Tensor, Pool, Segments]:
    """lengths: (query length, kv length) of each segment -> queries, pool, segments. The queries
    are a part of wider rows, as in the model."""
    torch.manual_seed(1)
    blocks = sum(-(-kv_length // shape.block_size) for _, kv_length in lengths)
    pool = Pool(shape, device, blocks + 3)
    segments = pool.segments([pool.segment(*each, layer) for each in lengths])
    rows = sum(query_length for query_length, _ in lengths)
    wide = torch.randn(rows, shape.heads + shape.kv_heads, shape.head_dim).to(device, shape.dtype)
    return wide[:, : shape.heads], pool, segments
