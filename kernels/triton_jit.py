"""What every Triton kernel here shares: the typed decorator, launch options, interpreter facts.

Importing this module imports triton, so only the Triton backend may do it. Whether kernels are
interpreted is settled by TRITON_INTERPRET at the first import of triton and never changes after.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton  # type: ignore[import-untyped]


class Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...


def jit(*, changing: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """changing: integer arguments that differ from pass to pass. Of any other, Triton compiles a
    kernel per class of values (1, a multiple of 16, others)."""

    def decorate(function: Callable[..., None]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=changing)
        return kernel

    return decorate


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call."""
    inlined: Callable[..., Any] = triton.jit(function)
    return inlined


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU. Triton's own functions were decorated
    when it was imported, so a variable set later has no effect."""
    return not isinstance(triton.language.sum, triton.JITFunction)


# Said explicitly: the default changes between Triton versions.
OPTIONS = {"enable_fp_fusion": True}


def power_of_two(value: int) -> int:
    """The smallest one that is at least `value`: what a Triton tile needs."""
    power: int = triton.next_power_of_2(value)
    return power


def float32_dots(dtype: torch.dtype) -> bool:
    """Whether tl.dot takes float32 operands: for float32, and always under the interpreter, whose
    bfloat16 products are wrong."""
    return dtype == torch.float32 or interpreted()
