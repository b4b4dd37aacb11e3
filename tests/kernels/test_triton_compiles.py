"""Every kernel compiles to machine code of real GPUs, with the arguments its caller gives it.

The interpreter accepts much that the compiler refuses. No GPU is needed, nor used.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    *("_attend_split", "_merge_splits", "_attend_chunk", "_store", "_finalize"),
    *("_rotate", "_gather", "_scatter", "_rms_norm", "_gate"),
}
# What one block may have. A100 and H100 have more; the smallest that runs bfloat16 has this.
SHARED_BYTES = 99 * 1024


@pytest.mark.parametrize(
    ("capability", "dtype", "share", "head_dim"),
    [
        pytest.param("90", "bfloat16", "1", "128"),
        pytest.param("80", "float32", "3", "20", marks=pytest.mark.soak),
        pytest.param("90", "float32", "1", "128", marks=pytest.mark.soak),
        pytest.param("80", "bfloat16", "8", "64", marks=pytest.mark.soak),
        pytest.param("86", "bfloat16", "16", "16", marks=pytest.mark.soak),
    ],
)
def test_every_kernel_compiles(
    capability: str, dtype: str, share: str, head_dim: str, tmp_path: Path
) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-P", SCRIPT, capability, dtype, share, head_dim],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    compiled = [line.split() for line in run.stdout.splitlines()]
    assert {name for name, *_ in compiled} == KERNELS
    for name, _, machine_code, shared in compiled:
        assert int(machine_code) > 0
        assert int(shared) <= SHARED_BYTES, f"{name} needs {shared} bytes of shared memory"
