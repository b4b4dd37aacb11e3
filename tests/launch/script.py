"""Small child programs and a runner that supervises them in a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# A supervisor whose children are the given Python snippets; `main` is the first.
_RUNNER = """
import json, sys
from pathlib import Path
from rlt.launch.arrival import FileArrival
from rlt.launch.children import ChildSpec
from rlt.launch.console import Console
from rlt.launch.runtime_dir import service_dir
from rlt.launch.supervisor import Grace, Supervisor

children, base = json.loads(sys.argv[1]), Path(sys.argv[2])
with service_dir(base) as folder:
    console = Console("launcher")
    specs = [
        ChildSpec(name=name, command=(sys.executable, "-c", code), environment={"DIR": str(folder)})
        for name, code in children.items()
    ]
    ready = FileArrival(folder / "service.json")
    code = Supervisor(
        specs[0],
        specs[1:],
        console=console,
        ready=ready,
        on_ready=lambda: console.announce("READY"),
        on_lost=lambda name, pid, status: console.announce(f"LOST {name} {status}"),
        grace=Grace(leaving_s=1.0, terminating_s=1.0),
    ).run()
    ready.close()
sys.exit(code)
"""

SAY_READY = """
import os
open(os.environ["DIR"] + "/new", "w").close()
os.rename(os.environ["DIR"] + "/new", os.environ["DIR"] + "/service.json")
"""
END_ON_TERM = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
FOREVER = "import signal; print('up', flush=True)\nwhile True: signal.pause()\n"
WAIT = END_ON_TERM + FOREVER
SERVE = END_ON_TERM + SAY_READY + FOREVER


@contextmanager
def supervised(children: Mapping[str, str], base: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _RUNNER, json.dumps(children), str(base)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_line(process: subprocess.Popen[str], text: str) -> str:
    """The next line of stdout, or of stderr for other texts, that has `text` in it."""
    stream = process.stdout if text.isupper() else process.stderr
    assert stream is not None
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"the output ended without {text!r}")


def wait_gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process (of any parent) ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if b"State:\tZ" in _status(pid) or not _status(pid):
                return True
            time.sleep(0.01)
        return False
    finally:
        os.close(fd)


def _status(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
