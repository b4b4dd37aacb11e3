"""A service and every means to disturb it: relay, scripted workers, signals, one seeded schedule.

Owns them all and tells, when a test fails, what was done and how to run it again. The service is
the product's: supervisor, coordinator and workers as processes, over real NIXL.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rlt.connector.config import INCARNATION, WorkerConfig
from rlt.coordinator.client import Client
from rlt.coordinator.config import CoordinatorConfig
from rlt.runtime.config import EngineConfig

from ..system.service import GOLDEN, START_S, Service, eventually, started
from .relay import Relay, relay
from .rules import Rule, Schedule

SEED = "RLT_FAULT_SEED"
ENGINE = {"model": str(GOLDEN), "num_blocks": 1024, "threads": 1, "chunk_tokens": 64}
COORDINATOR = {"heartbeat_s": 0.1, "heartbeat_timeout_s": 3.0, "http": None}
TRANSFERS = {"transfer_timeout_s": 10.0}


def chosen_seed(default: int = 0) -> int:
    """The schedule's seed: from the environment, to run a failure again."""
    return int(os.environ.get(SEED, default))


class Faults:
    """seed: of `random`, from which a test draws what it does, and of the relay's schedule."""

    def __init__(self, service: Service, between: Relay, scripts: Path, seed: int) -> None:
        self.service = service
        self.relay = between
        self.seed = seed
        self.random = random.Random(seed)
        self._scripts = scripts
        self._began_s = time.monotonic()
        self._story: list[str] = []

    # Messages.

    def add(self, rule: Rule) -> Rule:
        self.note(f"rule {rule}")
        return self.relay.add(rule)

    def hold(self, kind: str, **where: object) -> Rule:
        return self.add(Rule("hold", kind, **where))  # type: ignore[arg-type]

    def release(self, rule: Rule) -> None:
        self.note(f"release {rule}")
        self.relay.release(rule)

    def use(self, schedule: Schedule | None) -> None:
        self.note(f"schedule {schedule}")
        self.relay.use(schedule)

    # Transfers and passes.

    def order(self, worker: str, *orders: dict[str, Any]) -> None:
        """From now on that worker does this and nothing else out of the ordinary (see worker.py);
        without orders, nothing."""
        self.note(f"{worker} is ordered {list(orders) or 'nothing'}")
        fresh = self._scripts / f"{worker}.fresh"
        fresh.write_text(json.dumps(orders))
        fresh.rename(self._scripts / f"{worker}.script")

    def events(self, worker: str) -> list[dict[str, Any]]:
        """What its transport has noted: posted, failed, ended, arrived."""
        try:
            lines = (self._scripts / f"{worker}.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_event(self, worker: str, event: str, count: int = 1, timeout_s: float = 20.0) -> None:
        eventually(
            lambda: sum(e["event"] == event for e in self.events(worker)) >= count,
            lambda: f"{worker}: {count} times {event!r} among {self.events(worker)[-5:]}",
            timeout_s,
        )

    # Processes.

    def process(self, name: str) -> psutil.Process:
        """Of `coordinator`, `prefill-0`, `decode-1`, ... as it runs now."""
        return self.service.child(name)

    def incarnation(self, name: str) -> str:
        return self.process(name).environ()[INCARNATION]

    def signal(self, name: str, number: int) -> psutil.Process:
        process = self.process(name)
        self.note(f"{signal.Signals(number).name} to {name} (process {process.pid})")
        process.send_signal(number)
        return process

    def kill(self, name: str) -> psutil.Process:
        return self.signal(name, signal.SIGKILL)

    def stop(self, name: str) -> psutil.Process:
        return self.signal(name, signal.SIGSTOP)

    def go_on(self, name: str) -> psutil.Process:
        return self.signal(name, signal.SIGCONT)

    # What there is to see.

    def client(self) -> Client:
        return self.service.client()

    def ready(self, client: Client, pairs: int, timeout_s: float = START_S) -> None:
        """So many pairs can serve, and everybody has been heard since."""
        eventually(
            lambda: client.statistics()["ready_pairs"] == pairs,
            lambda: f"{pairs} pairs are ready; {client.statistics()}",
            timeout_s,
        )

    def back(self, client: Client, name: str, before: str, pairs: int) -> None:
        """Another incarnation than `before` serves under that name, in so many pairs."""
        eventually(
            lambda: self.service.workers(client).get(name, {}).get("incarnation", before) != before,
            lambda: f"{name} is back: {self.service.workers(client).keys()}",
            START_S,
        )
        self.ready(client, pairs)

    def at_rest(self, client: Client, timeout_s: float = 20.0) -> None:
        eventually(
            lambda: self.service.at_rest(client),
            lambda: f"nothing is held; still held: {self.service.held}",
            timeout_s,
        )

    def canary_hits(self, client: Client) -> float:
        return sum(w["canary_hits"] for w in self.service.workers(client).values())

    def note(self, what: str) -> None:
        self._story.append(f"{time.monotonic() - self._began_s:8.3f} s  {what}")

    def story(self) -> str:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        again = f"{SEED}={self.seed} {sys.executable} -P -m pytest '{test}'" if test else ""
        return "\n".join(
            ["what was done:", *self._story, *([f"to run it again: {again}"] if test else [])]
        )


@contextmanager
def faulty(
    prefill: int = 1,
    decode: int = 1,
    *,
    seed: int | None = None,
    schedule: Schedule | None = None,
    transport: str | None = None,
    engine: dict[str, Any] | None = None,
    coordinator: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    most_s: float | None = None,
    hosts: dict[str, tuple[str, ...]] | None = None,
    listen_at: dict[str, str] | None = None,
) -> Iterator[Faults]:
    """A service whose pairs are all ready. transport: UCX_TLS, None for UCX's own choice. The other
    dicts are fields of the configs; canaries are on unless `engine` says otherwise. most_s, hosts:
    see team.py. listen_at: by decode worker, a TCP address where prefill workers dial it directly,
    without the relay."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlt-f"))
        real, listen = f"ipc://{folder}/c.sock", f"ipc://{folder}/r.sock"
        address = f"ipc://{folder}/client.sock"
        service_config = CoordinatorConfig(
            runtime_dir=folder,
            worker_endpoint=real,
            client_endpoints=(address,),
            **{**COORDINATOR, **(coordinator or {})},
        )
        names = [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]
        workers = [
            WorkerConfig(
                role=name.partition("-")[0],  # type: ignore[arg-type]
                worker=name,
                coordinator=listen,
                listen=(listen_at or {}).get(name, f"ipc://{folder}/{name}.sock"),
                engine=EngineConfig(**{**ENGINE, "canary": True, **(engine or {})}),
                **{**TRANSFERS, **(worker or {})},
            )
            for name in names
        ]
        os.chmod(folder, 0o700)
        between = stack.enter_context(relay(real, listen, folder, schedule))
        team = {
            "coordinator": service_config,
            "workers": workers,
            "supervised_at": listen,
            "scripts": folder,
            "most_s": most_s,
            "hosts": hosts or {},
        }
        program = str(Path(__file__).parent / "team.py")
        text = msgspec.json.encode(team).decode()
        process, _, log = stack.enter_context(started([program, text], transport))
        service = Service(process, address, log, Path(folder))
        faults = Faults(service, between, Path(folder), chosen_seed() if seed is None else seed)
        try:
            with _connected(service) as client:
                faults.ready(client, prefill * decode)
            yield faults
        except BaseException:
            print(faults.story(), "".join(log[-200:]), sep="\n", file=sys.stderr)
            raise
        if process.poll() is None:
            service.stop()


@contextmanager
def _connected(service: Service) -> Iterator[Client]:
    """The coordinator's socket may not be there yet; ZeroMQ dials until it is."""
    with Client(service.address, timeout_s=START_S) as client:
        yield client
