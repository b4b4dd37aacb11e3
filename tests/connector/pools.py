"""Small pools of KV blocks and hidden rows, with a canary or random numbers in every byte."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlt.runtime.types import Dtype, KVGeometry, TokenRange

CANARY = 0x5A


def geometry(
    dtype: Dtype = "float32", *, block_size: int = 4, layers: int = 3, heads: int = 2
) -> KVGeometry:
    return KVGeometry(
        num_layers=layers,
        num_depths=2,
        num_kv_heads=heads,
        head_dim=8,
        hidden_size=24,
        block_size=block_size,
        dtype=dtype,
    )


@dataclass
class Pools:
    """kv: [blocks, layers, K|V, block_size, kv_heads, head_dim]; hidden: [rows, hidden_size]."""

    kv: Tensor
    hidden: Tensor
    geometry: KVGeometry

    def bytes(self) -> tuple[bytes, bytes]:
        return _bytes(self.kv), _bytes(self.hidden)


def canary_pools(shape: KVGeometry, *, blocks: int, rows: int) -> Pools:
    kv_bytes, hidden_bytes = blocks * shape.block_bytes, rows * shape.hidden_bytes
    kv = torch.full((kv_bytes,), CANARY, dtype=torch.uint8)
    hidden = torch.full((hidden_bytes,), CANARY, dtype=torch.uint8)
    return _pools(kv, hidden, shape)


def random_pools(shape: KVGeometry, *, blocks: int, rows: int, seed: int = 0) -> Pools:
    generator = torch.Generator().manual_seed(seed)
    sizes = (blocks * shape.block_bytes, rows * shape.hidden_bytes)
    kv, hidden = (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes
    )
    return _pools(kv, hidden, shape)


def block_bytes(pools: Pools, block: int) -> bytes:
    return _bytes(pools.kv[block])


def copy_positions(
    source: Pools, sink: Pools, span: TokenRange, blocks: list[int], sink_blocks: list[int]
) -> None:
    """What a transfer of `span` should do, position by position."""
    size = source.geometry.block_size
    first = span.start // size
    into, out_of = sink.kv.view(torch.int16), source.kv.view(torch.int16)
    for position in range(span.start, span.stop):
        index, offset = position // size - first, position % size
        into[sink_blocks[index], :, :, offset] = out_of[blocks[index], :, :, offset]


def _pools(kv: Tensor, hidden: Tensor, shape: KVGeometry) -> Pools:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[shape.dtype]
    heads = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return Pools(
        kv.view(dtype).view(-1, *heads), hidden.view(dtype).view(-1, shape.hidden_size), shape
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()
