"""A real service for tests: launcher, coordinator and workers as processes, ended by process ID.

Everything a test starts ends with the `with` block, also when the test fails, and the block checks
that no process and no socket file is left.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlt.coordinator.client import Client
from rlt.coordinator.discovery import find_services

GOLDEN = Path(__file__).parent.parent / "golden" / "ckpt"
START_S = 90.0
STOP_S = 40.0
SMALL = ("--num-blocks", "1024", "--chunk-tokens", "64", "--threads", "1")


COORDINATOR_HOLDS = ("queue_length", "live_requests", "live_attempts", "credits_outstanding")
WORKER_HOLDS = (
    "allocations",
    "leases_owner",
    "leases_pass",
    "leases_receive",
    "leases_send",
    "blocks_quarantined",
    "slots_withdrawn",
    "running",
    "sending",
    "unconfirmed",
    "writes_queued",
    "handles_in_flight",
    "handles_stuck",
    "bytes_in_flight",
)


@dataclass
class Service:
    process: subprocess.Popen[str]
    address: str
    log: list[str]
    folder: Path
    held: dict[str, float] = field(default_factory=dict)  # what at_rest() found last

    def client(self) -> Client:
        return Client(self.address, timeout_s=30.0)

    @property
    def http(self) -> str:
        [record] = find_services(self.folder)
        return record.http

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        """The process of `coordinator`, `prefill-0`, `decode-1`, ... as it runs now."""
        wanted = "rlt.coordinator" if name == "coordinator" else f'"worker":"{name}"'
        [found] = [child for child in self.children() if _mentions(child, wanted)]
        return found

    def workers(self, client: Client) -> dict[str, dict[str, Any]]:
        """What each worker said in its last heartbeat, by name."""
        statistics: Any = client.statistics()
        return {w["worker"]: {**w, **w["values"]} for w in statistics["workers"]}

    def at_rest(self, client: Client) -> bool:
        """Whether nothing is held anywhere: no block, slot, lease, handle or credit."""
        statistics: Any = client.statistics()
        held = {name: statistics[name] for name in COORDINATOR_HOLDS}
        for worker in statistics["workers"]:
            values = worker["values"]
            if not values:  # it has not beaten yet
                held[f"{worker['worker']} silent"] = 1
                continue
            held |= {
                f"{worker['worker']} {name}": values[name]
                for name in WORKER_HOLDS
                if name in values
            }
            held[f"{worker['worker']} blocks"] = values["blocks_total"] - values["blocks_free"]
            held[f"{worker['worker']} live"] = worker["live"]
        self.held = {name: value for name, value in held.items() if value}
        return not self.held

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def _mentions(process: psutil.Process, wanted: str) -> bool:
    try:
        return any(wanted in argument.replace(" ", "") for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(
    prefill: int = 1,
    decode: int = 1,
    *options: str,
    model: Path | None = GOLDEN,
    transport: str | None = None,
) -> Iterator[Service]:
    """Start `rlt-coordinator` and wait until it is ready. transport: UCX_TLS, None for UCX's own
    choice."""
    arguments = ["--prefill", str(prefill), "--decode", str(decode), *options]
    if model is not None:
        arguments += ["--model", str(model)]
    with tempfile.TemporaryDirectory(prefix="rlt-t") as folder:
        arguments += ["--runtime-dir", folder]
        with started(["-m", "rlt.launch.cli", *arguments], transport) as (process, lines, log):
            address = wait_for(lines, lambda line: line.startswith("READY "), log, process)
            service = Service(process, address.removeprefix("READY ").strip(), log, Path(folder))
            children = service.children()
            yield service
            if process.poll() is None:
                service.stop()
            _, alive = psutil.wait_procs(children, timeout=10.0)
            assert not alive, f"left behind: {alive}\n" + "".join(log)
            left = {path.name for path in Path(folder).rglob("*")} - {"lock"}
            assert not left, f"left behind: {left}"


@contextmanager
def started(
    arguments: Sequence[str], transport: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], "queue.Queue[str | None]", list[str]]]:
    """A Python process, its stdout lines as they come, and all that it said."""
    environment = {k: v for k, v in os.environ.items() if k != "UCX_TLS"}
    if transport is not None:
        environment["UCX_TLS"] = transport
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    log: list[str] = []
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: Any, sink: Callable[[str | None], None]) -> None:
        for line in stream:
            log.append(line)
            sink(line)
        sink(None)

    readers = [
        threading.Thread(target=read, args=(process.stdout, lines.put)),
        threading.Thread(target=read, args=(process.stderr, lambda _: None)),
    ]
    for reader in readers:
        reader.start()
    try:
        yield process, lines, log
    finally:
        if process.poll() is None:
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
            process.terminate()
            psutil.wait_procs(tree, timeout=20.0)
            for left in tree:
                if left.is_running():
                    left.kill()
            process.wait()
        for reader in readers:
            reader.join(10.0)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def wait_for(
    lines: "queue.Queue[str | None]",
    wanted: Callable[[str], bool],
    log: list[str],
    process: subprocess.Popen[str],
) -> str:
    deadline = time.monotonic() + START_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError("not ready in time:\n" + "".join(log)) from None
        if line is None:
            raise AssertionError(f"ended with {process.wait()}:\n" + "".join(log))
        if wanted(line):
            return line


def eventually(
    check: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 15.0
) -> None:
    """Statistics travel with heartbeats, so a test has to look until they say it."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s} s: {said}")
        time.sleep(0.05)
