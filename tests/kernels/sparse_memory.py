"""Tensors larger than memory: on a CPU, pages that nobody writes take no memory."""

import math
import mmap

import torch
from torch import Tensor

MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


def sparse_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros. On CUDA, plain memory."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
