"""rlt on several hosts: a coordinator on c, one `rlt-worker` on each of the others, NIXL over TCP.

Owns those processes and their lines. The prefill worker is on p, decode workers on d, d2, ...: one
address per decode worker is all that a prefill worker is told. Every host has a cable to c, and p
one to every decode host. NIXL is held to TCP:
namespaces of one machine share its memory, and UCX would go around a cable that is cut.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt.coordinator.client import Client

from .namespaces import Host, Network, network
from .service import COORDINATOR_HOLDS, GOLDEN, WORKER_HOLDS, eventually

PORT = 7000
START_S = 90.0


class Program:
    """One process on one host, with everything that it said."""

    def __init__(self, host: Host, arguments: Sequence[str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            host.command([sys.executable, "-P", "-m", *arguments]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "UCX_TLS": "tcp"},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(f"{time.monotonic():.2f} {line}")

    def ask_to_end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        try:
            self.process.wait(15.0)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)  # a second signal kills at once
            self.process.wait(15.0)
        finally:
            self._reader.join(10.0)
            assert self.process.stdout is not None
            self.process.stdout.close()


@dataclass
class Cluster:
    network: Network
    programs: dict[str, Program]
    address: str
    held: dict[str, Any]  # what at_rest() found last

    def client(self) -> Client:
        return Client(self.address, timeout_s=30.0)

    def workers(self, client: Client) -> dict[str, dict[str, Any]]:
        """What each worker said in its last heartbeat, by the name of its host."""
        statistics: Any = client.statistics()
        return {one["worker"]: {**one, **one["values"]} for one in statistics["workers"]}

    def at_rest(self, client: Client) -> bool:
        """Whether nothing is held anywhere: no block, slot, lease, handle or credit."""
        statistics: Any = client.statistics()
        held = {name: statistics[name] for name in COORDINATOR_HOLDS}
        for name, worker in self.workers(client).items():
            held |= {f"{name} {one}": worker[one] for one in WORKER_HOLDS if one in worker}
            held[f"{name} blocks"] = worker["blocks_total"] - worker["blocks_free"]
        self.held = {name: value for name, value in held.items() if value}
        return not self.held

    def whole(self, client: Client) -> bool:
        """Whether every worker is there and every pair is open."""
        statistics: Any = client.statistics()
        workers = self.workers(client)
        all_there = set(workers) == set(self.programs) - {"c"}
        return all_there and statistics["ready_pairs"] == len(workers) - 1

    def log(self) -> str:
        lines = [f"{name:>3} {line}" for name, one in self.programs.items() for line in one.lines]
        return "".join(sorted(lines, key=lambda line: float(line.split()[1])))


@contextmanager
def cluster(
    decode: Sequence[str], everywhere: Sequence[str] = (), service: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Start c, p and the decode workers, and wait until every pair is open. Options of all
    programs, and of the coordinator alone."""
    cables = [("c", "p"), *(("c", name) for name in decode), *(("p", name) for name in decode)]
    with ExitStack() as stack:
        net = stack.enter_context(network(*cables))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlt-h")))
        programs: dict[str, Program] = {}
        stack.callback(_end, programs)
        address = f"ipc://{folder}/client.sock"

        def start(name: str, module: str, *options: str) -> None:
            common = ["--model", str(GOLDEN), "--threads", "1", "--insecure", *everywhere]
            place = ["--runtime-dir", str(folder / name)]
            programs[name] = Program(net.hosts[name], [module, *common, *place, *options])

        def start_worker(name: str, *options: str) -> None:
            coordinator = f"tcp://{net.hosts['c'].addresses[name]}:{PORT}"
            start(name, "rlt.launch.worker", "--name", name, "--coordinator", coordinator, *options)

        sockets = ["--no-http", "--listen", address, "--worker-listen", f"tcp://0.0.0.0:{PORT}"]
        start("c", "rlt.launch.cli", "--prefill", "0", "--decode", "0", *sockets, *service)
        start_worker("p", "--role", "prefill")
        for name in decode:
            listen = f"tcp://{net.hosts[name].addresses['p']}:0"
            start_worker(name, "--role", "decode", "--peer-listen", listen)
        running = Cluster(net, programs, address, {})
        with running.client() as client:
            eventually(lambda: running.whole(client), running.log, START_S)
        yield running


def _end(programs: dict[str, Program]) -> None:
    """Workers first, so that each can say goodbye."""
    for program in reversed(programs.values()):
        program.ask_to_end()
    for program in reversed(programs.values()):
        program.end()
