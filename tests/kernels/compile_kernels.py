"""Compiles every Triton kernel for a GPU that need not be there, with the arguments that its caller
gives it. Run as a program of its own, without the interpreter.

Prints one line per compiled kernel: name, target, bytes of machine code, shared memory in bytes.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from rlt.kernels import (
    triton_attention,
    triton_gate,
    triton_kv,
    triton_norm_rotary,
    triton_rows,
)
from rlt.kernels.segments import PoolShape, Segment, Segments


class AbsentGPU:
    """What Triton's compiler asks of a driver; there is no device behind it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_instead_of_launching(capability: int) -> None:
    triton.runtime.driver.set_active(AbsentGPU(capability))

    def compiled(kernel: Any, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **options)
            print(kernel.__name__, capability, len(made.asm["cubin"]), made.metadata.shared)

        return run

    triton.runtime.JITFunction.__getitem__ = compiled


def call_every_kernel(dtype: torch.dtype, share: int, dim: int) -> None:
    kv = torch.zeros(8, 2, 2, 16, 2, dim, dtype=dtype)
    shape = PoolShape(2, 16, 2 * dim * dtype.itemsize)
    items = [Segment(1, 20, (0, 1)), Segment(5, 18, (2, 3))]
    segments = Segments(items, shape, torch.device("cpu"), dtype)
    heads = torch.zeros(6, 2 * share + 2, dim, dtype=dtype)
    triton_attention.paged_attention(heads[:, : 2 * share], kv, 1, segments)
    triton_kv.store_kv(torch.zeros(6, 4 * dim, dtype=dtype), kv, 1, segments)
    sources, offsets, targets = torch.tensor([[0, 1, 5], [0, 2, 6]]).unbind(1)
    triton_kv.finalize(kv, sources, offsets, targets, offsets)
    phases = torch.zeros(6, 1, dim, dtype=dtype)
    triton_norm_rotary.rotate(heads, phases, phases)
    hidden = torch.zeros(4, 2048, dtype=dtype)
    triton_rows.scatter_rows(hidden, sources, triton_rows.gather_rows(hidden, sources))
    triton_rows.gather_rows(torch.zeros(4, dtype=torch.int64), sources)
    triton_norm_rotary.rms_norm(hidden, hidden[0], 1e-6)
    triton_norm_rotary.rms_norm(hidden, hidden[0], 1e-6, hidden)
    gate = triton_gate.gate_scores(hidden, hidden[:1], hidden[0, :1])
    triton_gate.gate_scores(hidden, hidden[:1], None, gate[1])


if __name__ == "__main__":
    compile_instead_of_launching(int(sys.argv[1]))
    call_every_kernel(getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
