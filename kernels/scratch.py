"""What the reference attention uses again and again: a buffer that K and V are gathered into, and
the triangle that hides later positions.

Owns nothing else. A fresh tensor per layer was measured to double the time of a large gather (page
faults), so the buffer is kept; it holds one gather at a time.
"""

import torch
from torch import Tensor

KEEP_BYTES = 16 * 1024**2
TRIANGLE_STEP = 1024  # the triangle's width grows in these steps


class GatherScratch:
    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._triangle: Tensor | None = None

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

    def triangle(self, copies: int, rows: int, width: int, like: Tensor) -> Tensor:
        """[copies, rows, at least width], aligned at its right end: the last row sees every column,
        each row before it one column less."""
        held = self._triangle
        if (
            held is None
            or held.shape[:2] != (copies, rows)
            or held.shape[2] < width
            or held.dtype != like.dtype
        ):
            wide = -(-max(width, rows) // TRIANGLE_STEP) * TRIANGLE_STEP
            held = torch.zeros(copies, rows, wide, dtype=like.dtype, device=like.device)
            later = torch.ones(rows, rows, dtype=torch.bool, device=like.device).triu(1)
            held[:, :, wide - rows :].masked_fill_(later, float("-inf"))
            self._triangle = held
        return held
