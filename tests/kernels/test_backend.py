"""Which kernels are chosen, the reason that is given, and what loads Triton."""

import importlib.util
import os
import subprocess
import sys

import pytest

from rlt.kernels.backend import Backend, BackendUnavailable, choose_kernels

from .triton_cases import DEVICES


@pytest.mark.parametrize(
    ("asked", "device", "name", "module", "reason"),
    [
        ("auto", "cpu", "torch", "reference", "the device is a CPU"),
        ("torch", "cpu", "torch", "reference", "asked for"),
        ("torch", "cuda", "torch", "reference", "asked for"),
        ("auto", "cuda", "triton", "triton_attention", "the device is CUDA"),
        ("triton", "cuda", "triton", "triton_attention", "asked for"),
    ],
)
def test_cuda_takes_triton_and_a_cpu_takes_torch(
    asked: Backend, device: str, name: str, module: str, reason: str
) -> None:
    kernels = choose_kernels(asked, device)
    assert kernels.name == name
    assert kernels.reason.startswith(reason)
    assert kernels.paged_attention.__module__ == f"rlt.kernels.{module}"


@pytest.mark.parametrize("device", DEVICES[:1])
def test_triton_on_a_cpu_says_that_it_is_interpreted(device: str) -> None:
    assert str(choose_kernels("triton", device)) == "triton (asked for; interpreted)"


def test_triton_on_a_cpu_without_the_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="set TRITON_INTERPRET=1"):
        choose_kernels("triton", "cpu")


def test_without_triton_cuda_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "triton is not installed" in str(choose_kernels("auto", "cuda"))
    with pytest.raises(BackendUnavailable, match="pip install triton"):
        choose_kernels("triton", "cuda")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_engine_without_triton_kernels_does_not_load_triton() -> None:
    code = (
        "import sys\nimport rlt.runtime.executor\nfrom rlt.kernels.backend import choose_kernels\n"
        "choose_kernels('auto', 'cpu')\nsys.exit('triton' in sys.modules)"
    )
    done = run(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_a_variable_set_after_triton_was_imported_is_refused() -> None:
    code = (
        "import os, triton\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "from rlt.kernels.backend import choose_kernels\nchoose_kernels('triton', 'cpu')"
    )
    assert "triton was imported before" in run(code).stderr
