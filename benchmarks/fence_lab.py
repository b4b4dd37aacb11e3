"""A receiver, a bystander that writes to it all the time, and writers to be hit: for fences.py.

Owns the processes of one experiment and its network. Decides nothing about what holds.
"""

import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import fence_peer as peers


def load(path: Path) -> ModuleType:
    """A module of the tests', which are no package either."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


namespaces = load(Path(__file__).parents[1] / "tests" / "system" / "namespaces.py")
Peer, VICTIM_BLOCKS = peers.Peer, peers.VICTIM_BLOCKS
POOL_BLOCKS = VICTIM_BLOCKS + peers.OWN_BLOCKS
WRITES = 4  # of 32 MiB each
PATIENCE_S = 10.0
LINK_MB_PER_S = 250.0


@dataclass
class Outcome:
    """Of one repetition. in_flight: the WRITEs had begun and not ended when the writer was hit.
    landed: bytes that came after the memory was refilled. seconds: of what the row measures."""

    in_flight: bool
    landed: int = 0
    seconds: float | None = None
    faults: list[str] = field(default_factory=list)


class Lab:
    """A receiver with a bystander, and as many writers as are asked for, one after the other."""

    def __init__(self, transport: str, seed: int, polled_s: float, network: Any) -> None:
        """polled_s: how long a receiver polls before it counts what landed. network: None, or
        writers are on its host p and receivers on d."""
        self.polled_s = polled_s
        self.transport = transport
        self.network = network
        self.random = random.Random(seed)
        self._count = 0
        self._live: list[Any] = []
        self.died: list[str] = []
        self.receiver = self.start("d", peers.PATTERN, POOL_BLOCKS)
        self.bystander = self.start("bystander", 0, peers.OWN_BLOCKS)
        self.pair(self.bystander, self.receiver)
        self.bystander.call("trace", self.receiver.name)
        writer = self.writer()
        self.whole_s = self._time_of_a_whole_write(writer)
        self.fence(writer)

    def start(self, name: str, fill: int, blocks: int) -> Any:
        self._count += 1

        def prepare() -> None:
            os.environ.pop("UCX_TLS", None)
            if self.transport != "default":
                os.environ["UCX_TLS"] = self.transport
            if self.network is not None:
                self.network.hosts["p" if name == "p" else "d"].enter()

        peer = Peer(f"{name}-{self._count}", fill=fill, blocks=blocks, before=prepare)
        self._live.append(peer)
        return peer

    def pair(self, writer: Any, receiver: Any) -> None:
        metadata, pool = receiver.call("accept", writer.name, writer.call("metadata"))
        writer.call("connect", receiver.name, metadata, pool)

    def writer(self) -> Any:
        """A new incarnation, paired, with its connection made by a first small WRITE."""
        writer = self.start("p", 0xA5, VICTIM_BLOCKS)
        self.pair(writer, self.receiver)
        self.warm(writer, self.receiver)
        return writer

    def warm(self, writer: Any, receiver: Any, ended: int = 1) -> None:
        writer.call("post", receiver.name, 0, 1, 1)
        if ended:
            self.all_ended(writer, ended)
        self.until(lambda: receiver.call("take_heard"), "a first WRITE is notified")
        receiver.call("refill", 0, VICTIM_BLOCKS)

    def end(self, peer: Any) -> None:
        """Kill and reap; remember if it had died of itself."""
        if how := peer.died():
            self.died.append(how)
        peer.kill()

    @property
    def link(self) -> Any:
        return self.network.link("p", "d")

    def post_and_wait(self, writer: Any, receiver: Any | None = None) -> None:
        """Post all, and come back at a random moment in the middle."""
        target = (receiver or self.receiver).name
        writer.call("post", target, 0, VICTIM_BLOCKS, WRITES)
        time.sleep(self.whole_s * self.random.uniform(0.1, 0.6))

    def refill(self) -> bool:
        """The memory is used again; whether the writer had been hit in the middle of its WRITEs."""
        landed = self.receiver.call("refill", 0, VICTIM_BLOCKS)
        return 0 < landed < VICTIM_BLOCKS * peers.BLOCK

    def landed(self, polled_s: float | None = None) -> int:
        time.sleep(self.polled_s if polled_s is None else polled_s)
        return int(self.receiver.call("landed", 0, VICTIM_BLOCKS))

    def fence(self, writer: Any) -> None:
        """What the product does: kill, reap, destroy the agent. Ends every repetition."""
        self.end(writer)
        try:
            self.receiver.call("drop_source", writer.name)
        except RuntimeError as error:
            if "KeyError" not in str(error):
                raise
        self.receiver.call("refill", 0, VICTIM_BLOCKS)
        self.receiver.call("take_heard")

    def faults(self) -> list[str]:
        """Since the last call: blocks of the bystander that were wrong, processes that died."""
        died, self.died = self.died, []
        died += [how for one in (self.receiver, self.bystander) if (how := one.died())]
        if died:
            return died
        traces = self.receiver.call("take_traces")
        good = traces["right"] > 0 and traces["wrong"] == 0
        return [] if good else [f"bystander: {traces}"]

    def until(self, ready: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (value := ready()):
            if time.monotonic() > deadline_s:
                raise peers.Hung(f"not within {timeout_s} s: {what}")
            time.sleep(0.001)
        return value

    def all_ended(self, writer: Any, count: int) -> list[Any]:
        ended: list[Any] = []

        def look() -> bool:
            ended.extend(writer.call("take_ended"))
            return len(ended) >= count

        self.until(look, "every WRITE ends")
        return ended

    def _time_of_a_whole_write(self, writer: Any) -> float:
        for _ in range(2):
            start_s = time.monotonic()
            writer.call("post", self.receiver.name, 0, VICTIM_BLOCKS, WRITES)
            ended = self.all_ended(writer, WRITES)
        assert not any(error for _, error, _ in ended), ended
        return float(max(end_s for _, _, end_s in ended) - start_s)

    def close(self) -> None:
        for peer in reversed(self._live):
            peer.kill()


@contextmanager
def lab_of(transport: str, seed: int, polled_s: float, over_link: bool) -> Iterator[Lab]:
    with ExitStack() as stack:
        network = None
        if over_link:
            network = stack.enter_context(namespaces.network(("p", "d")))
            network.link("p", "d").slow(LINK_MB_PER_S)
        lab = Lab(transport, seed, polled_s, network)
        stack.callback(lab.close)
        yield lab


@contextmanager
def faults_of(writer: Any, outcome: Outcome) -> Iterator[None]:
    """A writer that does not go on as it should is a fault of this repetition."""
    try:
        yield
    except (peers.Hung, EOFError, OSError, RuntimeError) as error:
        outcome.faults.append(f"{writer.name}: {error!r}")
