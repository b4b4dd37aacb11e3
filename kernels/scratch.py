"""One buffer that the reference attention gathers K and V into, again and again.

Owns nothing but that buffer. A fresh tensor per layer was measured to double the time of a large
gather (page faults), so the buffer is kept; it holds one gather at a time.
"""

import torch
from torch import Tensor

KEEP_BYTES = 16 * 1024**2


class GatherScratch:
    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def rows(self, count: int, like: Tensor) -> Tensor:
        """[count, width of like], uninitialised, valid until the next call."""
        size = count * like.shape[1]
        if size * like.itemsize > KEEP_BYTES:
            return like.new_empty(count, like.shape[1])
        if self._buffer is None or self._buffer.numel() < size or self._buffer.dtype != like.dtype:
            self._buffer = torch.empty(
                KEEP_BYTES // like.itemsize, dtype=like.dtype, device=like.device
            )
        return self._buffer[:size].view(count, like.shape[1])
