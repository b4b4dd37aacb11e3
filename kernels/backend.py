"""The one place that chooses between the torch kernels and the Triton kernels, and says why.

Everything above takes its operations from the Kernels that it is given. Triton is imported when it
is chosen, and never otherwise: machines without it, and processes on a CPU, do not pay for it.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

from torch import Tensor

from . import gate, norm_rotary, reference
from .segments import Segments

Backend = Literal["auto", "torch", "triton"]


class BackendUnavailable(Exception):
    """What was asked for cannot run here; the message says what to do."""


class RmsNorm(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor: ...


class GateScores(Protocol):
    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, survival: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation; reference.py, norm_rotary.py and gate.py say what each
    computes."""

    name: Literal["torch", "triton"]
    reason: str
    store_kv: Callable[[Tensor, Tensor, int, Segments], None]
    paged_attention: Callable[[Tensor, Tensor, int, Segments], Tensor]
    finalize: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    gather_rows: Callable[[Tensor, Tensor], Tensor]
    scatter_rows: Callable[[Tensor, Tensor, Tensor], None]
    rms_norm: RmsNorm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    gate_scores: GateScores

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_kernels(asked: Backend, device: str) -> Kernels:
    """device: cpu or cuda."""
    match asked:
        case "torch":
            return torch_kernels("asked for")
        case "triton":
            return _triton_kernels("asked for", device)
        case "auto" if device != "cuda":
            return torch_kernels("the device is a CPU")
        case "auto" if importlib.util.find_spec("triton") is None:
            return torch_kernels("slow: the device is CUDA, but triton is not installed")
        case "auto":
            return _triton_kernels("the device is CUDA", device)
        case _:
            assert_never(asked)


def torch_kernels(reason: str) -> Kernels:
    return Kernels(
        name="torch",
        reason=reason,
        store_kv=reference.store_kv,
        paged_attention=reference.paged_attention,
        finalize=reference.finalize,
        gather_rows=reference.gather_rows,
        scatter_rows=reference.scatter_rows,
        rms_norm=norm_rotary.rms_norm,
        rotate=norm_rotary.rotate,
        gate_scores=gate.gate_scores,
    )


def _triton_kernels(reason: str, device: str) -> Kernels:
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable("triton is not installed; pip install triton, or choose torch")
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailable(
            "on a CPU, Triton kernels run in Triton's interpreter alone, slowly and for tests; set "
            "TRITON_INTERPRET=1 in the environment, or choose torch"
        )
    from . import triton_attention, triton_gate, triton_kv, triton_norm_rotary, triton_rows
    from .triton_jit import interpreted

    if device != "cuda" and not interpreted():
        raise BackendUnavailable(
            "triton was imported before TRITON_INTERPRET=1 was set; set it before the start"
        )
    return Kernels(
        name="triton",
        reason=f"{reason}; interpreted" if interpreted() else reason,
        store_kv=triton_kv.store_kv,
        paged_attention=triton_attention.paged_attention,
        finalize=triton_kv.finalize,
        gather_rows=triton_rows.gather_rows,
        scatter_rows=triton_rows.scatter_rows,
        rms_norm=triton_norm_rotary.rms_norm,
        rotate=triton_norm_rotary.rotate,
        gate_scores=triton_gate.gate_scores,
    )


REFERENCE = torch_kernels("the default")
