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
import json, os, resource, sys
from pathlib import Path
from rlt.launch.arrival import FileArrival
from rlt.launch.children import ChildSpec
from rlt.launch.console import Console
from rlt.launch.restart import RestartPolicy
from rlt.launch.runtime_dir import service_dir
from rlt.launch.silence import ENDLESS, Patience
from rlt.launch.supervisor import Grace, Supervisor

children, base, coordinator = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] or None
waits, patience = bool(sys.argv[4]), json.loads(sys.argv[5])
policies = [RestartPolicy(first_s=0.05, most_failures=5), RestartPolicy(first_s=0.05)]
if not waits:
    policies[0] = RestartPolicy(first_s=0.05, must_start=True)
descriptors = len(os.listdir("/proc/self/fd"))
with service_dir(base) as folder:
    console = Console("launcher")
    specs = [
        ChildSpec(
            name=name,
            command=(sys.executable, "-c", code),
            environment={"DIR": str(folder)},
            policy=policies[min(place, 1)],
            worker=place > 0 or not waits,
        )
        for place, (name, code) in enumerate(children.items())
    ]
    ready = FileArrival(folder / "service.json")
    code = Supervisor(
        specs[0],
        specs[1:],
        console=console,
        coordinator=coordinator,
        patience=Patience(**patience) if patience else ENDLESS,
        ready=ready if waits else None,
        on_ready=lambda: console.announce("READY"),
        grace=Grace(leaving_s=1.0, terminating_s=1.0, draining_s=None if waits else 1.0),
    ).run()
    ready.close()
left = len(os.listdir("/proc/self/fd")) - descriptors
assert left == 0, f"{left} descriptors are left"
try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError("a child is left")
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
COUNT = """
import os
starts = os.environ["DIR"] + "/../starts"
open(f"{starts}/{os.getpid()}", "w").close()
count = len(os.listdir(starts))
"""  # how often those who count have been started; in the folder `starts` beside their own


@contextmanager
def supervised(
    children: Mapping[str, str],
    base: Path,
    *,
    coordinator: str = "",
    alone: bool = False,
    patience: Mapping[str, float] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """coordinator: where the supervisor dials. alone: the main child is a worker, and nobody waits
    for it to be ready."""
    arguments = [json.dumps(children), str(base), coordinator, "" if alone else "waits"]
    arguments.append(json.dumps(patience))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _RUNNER, *arguments],
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


def started(process: subprocess.Popen[str], name: str) -> int:
    """The process ID of that child's next start."""
    line = wait_line(process, f"started {name} ")
    return int(line.rpartition("process ")[2].rstrip(")\n"))


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
