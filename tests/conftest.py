"""Checks that hold for every test module: it leaves no process, no thread and no listening socket.

Unclosed sockets and files show as ResourceWarnings, which are errors; collecting garbage at the end
of each module makes them appear where they belong.
"""

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Triton settles at its first import whether it interprets kernels, so this comes before any test.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

LISTENING = 0x10000  # flag of a listening socket in /proc/net/unix


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    sockets = _listening_paths()
    yield
    gc.collect()
    processes = [p for p in psutil.Process().children(recursive=True) if not _of_python_itself(p)]
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        process.kill()
    assert not alive, f"processes left running: {alive}"
    left = [t for t in threading.enumerate() if t not in threads and not _ends(t)]
    assert not left, f"threads left running: {left}"
    assert _listening_paths() <= sockets, f"still listening: {_listening_paths() - sockets}"


def _ends(thread: threading.Thread) -> bool:
    thread.join(timeout=5)
    return not thread.is_alive()


def _of_python_itself(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return True


def _listening_paths() -> set[str]:
    """Paths at which this process listens (Unix sockets)."""
    own = {_target(entry) for entry in Path("/proc/self/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        row[7]
        for row in rows
        if len(row) > 7 and int(row[3], 16) & LISTENING and f"socket:[{row[6]}]" in own
    }


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""
