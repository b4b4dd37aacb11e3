"""One worker of benchmarks/fences.py: a process with the product's NixlTransport and a pool.

Owns the process, its end of a pipe and what it counted. Knows no experiment. It polls its transport
all the time, as a worker does, and answers one call after the other. Fork it before any agent is
made in the parent: UCX does not survive a fork.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlt.connector.nixl_transport import NixlTransport
from rlt.connector.transport import Write
from rlt.runtime.types import KVGeometry

SHAPE = KVGeometry(
    num_layers=32,
    num_depths=2,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=64,
    block_size=16,
    dtype="bfloat16",
)
PR_SET_PDEATHSIG = 1
BLOCK = SHAPE.block_bytes  # 2 MiB
PATTERN = 0x5A
VICTIM_BLOCKS = 64  # of a receiver's pool; behind them those that the bystander writes
OWN_BLOCKS = 8
TRACE_S = 0.01
TRACE = struct.Struct("<QQ")  # what the bystander says with each WRITE: number, block


class Hung(Exception):
    """A worker did not answer in time."""


class Worker:
    """Inside the process."""

    def __init__(self, name: str, blocks: int, fill: int) -> None:
        self.kv = torch.full((blocks * BLOCK,), fill, dtype=torch.uint8)
        heads = (SHAPE.num_layers, 2, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
        hidden = torch.zeros((1, SHAPE.hidden_size), dtype=torch.bfloat16)
        pool = self.kv.view(torch.bfloat16).view(blocks, *heads)
        self.transport = NixlTransport(pool, hidden, SHAPE, name=name)
        self.ended: list[tuple[int, str | None, float]] = []
        self.heard: list[tuple[str, bytes]] = []
        self.traces = {"right": 0, "wrong": 0}
        self.bystander_of: str | None = None
        self.number = 0
        self.under_way: Any = None
        self.next_trace_s = 0.0
        self.posting: list[Write] = []

    # what the driver may call

    def metadata(self) -> bytes:
        return self.transport.agent_metadata()

    def accept(self, source: str, metadata: bytes) -> tuple[bytes, Any]:
        return self.transport.add_source(source, metadata), self.transport.pool

    def connect(self, target: str, metadata: bytes, pool: Any) -> None:
        self.transport.add_target(target, metadata, pool)

    def drop_target(self, target: str) -> float:
        return timed(lambda: self.transport.remove_target(target))

    def drop_source(self, source: str) -> float:
        return timed(lambda: self.transport.remove_source(source))

    def post(self, target: str, first: int, blocks: int, writes: int) -> None:
        """Answered before it is posted: over shared memory the copy is made inside the call."""
        self.posting = [
            Write(target, list(range(first + n, first + blocks, writes)),
                  list(range(first + n, first + blocks, writes)), b"victim")
            for n in range(writes)
        ]  # fmt: skip

    def refill(self, first: int, blocks: int) -> int:
        """Write the pattern over some blocks; how many of their bytes were not the pattern."""
        landed = self.landed(first, blocks)
        self.kv[first * BLOCK : (first + blocks) * BLOCK] = PATTERN
        return landed

    def landed(self, first: int, blocks: int) -> int:
        part = self.kv[first * BLOCK : (first + blocks) * BLOCK]
        return int(np.count_nonzero(part.numpy() != PATTERN))

    def take_ended(self) -> list[tuple[int, str | None, float]]:
        ended, self.ended = self.ended, []
        return ended

    def take_heard(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard

    def trace(self, target: str | None) -> None:
        """Be the bystander: write block after block to one target, each full of another number."""
        self.bystander_of = target

    def take_traces(self) -> dict[str, int]:
        traces, self.traces = self.traces, {"right": 0, "wrong": 0}
        return traces

    def usage(self) -> tuple[int, int]:
        """Resident bytes, open files."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))

    # the loop

    def run(self, pipe: Connection) -> None:
        while True:
            if pipe.poll(0.0003):
                name, arguments = pipe.recv()
                if name == "end":
                    return
                try:
                    pipe.send((True, getattr(self, name)(*arguments)))
                except Exception as error:
                    pipe.send((False, f"{name}: {error!r}"))
            self._poll()

    def _poll(self) -> None:
        posting, self.posting = self.posting, []
        for write in posting:
            self.transport.write(write)
        if (
            self.bystander_of is not None
            and self.under_way is None
            and time.monotonic() > self.next_trace_s
        ):
            self.next_trace_s = time.monotonic() + TRACE_S
            self._post_trace(self.bystander_of)
        for one in self.transport.poll_finished():
            if one.ticket == self.under_way:
                self.under_way = None
                if one.error is not None:
                    self.bystander_of = None
            self.ended.append((one.ticket, one.error, time.monotonic()))
        for told in self.transport.poll_notifications():
            if len(told.payload) == TRACE.size:
                self._check_trace(told.payload)
            else:
                self.heard.append((told.source, told.payload))

    def _post_trace(self, target: str) -> None:
        self.number += 1
        block = self.number % OWN_BLOCKS
        self.kv[block * BLOCK : (block + 1) * BLOCK] = self.number % 251
        sink = VICTIM_BLOCKS + block
        write = Write(target, [block], [sink], TRACE.pack(self.number, sink))
        self.under_way = self.transport.write(write)

    def _check_trace(self, payload: bytes) -> None:
        number, block = TRACE.unpack(payload)
        part = self.kv[block * BLOCK : (block + 1) * BLOCK]
        self.traces["right" if bool((part == number % 251).all()) else "wrong"] += 1


def timed(call: Callable[[], None]) -> float:
    start_s = time.monotonic()
    call()
    return time.monotonic() - start_s


class Peer:
    """The driver's end: a process to call, stop, wake and kill."""

    def __init__(self, name: str, *, fill: int, blocks: int, before: Callable[[], None]) -> None:
        """before: runs first in the process (UCX's variables, a network namespace)."""
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                before()
                torch.set_num_threads(1)
                Worker(name, blocks, fill).run(theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self.gone = False

    def call(self, name: str, *arguments: Any, timeout_s: float = 30.0) -> Any:
        self._pipe.send((name, arguments))
        if not self._pipe.poll(timeout_s):
            raise Hung(f"{self.name}: {name} took more than {timeout_s} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def died(self) -> str | None:
        """How it ended of itself; None while it lives, and when kill() has ended it."""
        if self.gone:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.gone = True
        return f"{self.name} ended with {os.waitstatus_to_exitcode(status)}"

    def kill(self) -> None:
        """Kill and reap."""
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.gone = True
        self._pipe.close()
