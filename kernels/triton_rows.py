"""Resident rows on Triton: hidden states, and device tokens, gathered and scattered by slot.

Owns nothing. A row is whatever lies behind one slot: a hidden state, or a single token.
"""

import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .triton_jit import OPTIONS, Kernel, jit, power_of_two

TILE = 1024  # elements that one program copies


@jit()
def _gather(
    hidden: tl.tensor, slots: tl.tensor, out: tl.tensor, width: int, TILE: tl.constexpr
) -> None:
    """Grid (rows, tiles of a row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = hidden + tl.load(slots + row) * width + at
    tl.store(out + row * width + at, tl.load(source, mask=at < width), mask=at < width)


@jit()
def _scatter(
    hidden: tl.tensor, slots: tl.tensor, rows: tl.tensor, width: int, TILE: tl.constexpr
) -> None:
    """Grid (rows, tiles of a row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    target = hidden + tl.load(slots + row) * width + at
    tl.store(target, tl.load(rows + row * width + at, mask=at < width), mask=at < width)


def gather_rows(hidden: Tensor, slots: Tensor) -> Tensor:
    """hidden: [slots, hidden_size] or [slots], contiguous, any dtype; slots: [rows] int64 -> [rows,
    hidden_size] or [rows].

    Bytes: reads and writes hidden_size * itemsize per row, reads 8 of its slot.
    Bound on a GPU: memory, 2 * rows * hidden_size * itemsize / bandwidth; below some hundred rows,
    the time of a launch.
    """
    out = hidden.new_empty(len(slots), *hidden.shape[1:])
    _move(_gather, hidden, slots, out)
    return out


def scatter_rows(hidden: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows: [rows, hidden_size] or [rows] to hidden[slots] in place; slots are distinct.

    hidden: contiguous, any dtype; rows: the same dtype. Bytes and bound: those of gather_rows.
    """
    _move(_scatter, hidden, slots, rows.contiguous())


def _move(kernel: Kernel, hidden: Tensor, slots: Tensor, rows: Tensor) -> None:
    if not len(slots):
        return
    width = rows[0].numel()
    tile = min(TILE, power_of_two(width))
    tiles = -(-width // tile)
    kernel[len(slots), tiles](hidden, slots, rows, width, TILE=tile, **OPTIONS)
