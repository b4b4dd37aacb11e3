"""When may a receiver reuse memory that a writer could write? Each fence, tried on real processes.

    python -P benchmarks/fences.py [--repeat N] [--transport default tcp] [--only NAME ...] ...

A writer posts 128 MiB of WRITEs into a receiver's pool and is stopped, killed or cut off in the
middle; the receiver fills the memory with a pattern and goes on polling; what lands then counts.
Meanwhile a bystander writes to the same pool, and the receiver compares each of its blocks.
Exit code 1 if a fence that rlt relies on did not hold. As root, also with a link that is cut.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

POLLED_S = 0.8  # how long a receiver polls before it counts what landed
PATIENCE_S = 10.0
WRITES = 4  # of 32 MiB each


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # read when nixl is loaded; writers do fail here
peers = load(Path(__file__).with_name("fence_peer.py"))
namespaces = load(Path(__file__).parents[1] / "tests" / "system" / "namespaces.py")
Peer, VICTIM_BLOCKS = peers.Peer, peers.VICTIM_BLOCKS
POOL_BLOCKS = VICTIM_BLOCKS + peers.OWN_BLOCKS


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

    def __init__(self, transport: str, seed: int, network: Any = None) -> None:
        """network: writers on host p, receivers on host d, joined by one link."""
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

    def landed(self, polled_s: float = POLLED_S) -> int:
        time.sleep(polled_s)
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


# What a receiver may do while the writer is stopped, killed, or still writing.


def stopped_agent_kept(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    writer.stop()
    in_flight = lab.refill()
    writer.wake()
    outcome = Outcome(in_flight, lab.landed())
    lab.fence(writer)
    return outcome


def stopped_agent_destroyed(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    writer.stop()
    seconds = lab.receiver.call("drop_source", writer.name)
    in_flight = lab.refill()
    writer.wake()
    outcome = Outcome(in_flight, lab.landed(), seconds)
    lab.fence(writer)
    return outcome


def killed_agent_kept(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.end(writer)
    outcome = Outcome(lab.refill(), lab.landed())
    lab.fence(writer)
    return outcome


def killed_then_destroyed(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.end(writer)
    seconds = lab.receiver.call("drop_source", writer.name)
    return Outcome(lab.refill(), lab.landed(), seconds)


def destroyed_then_killed(lab: Lab) -> Outcome:
    writer = lab.writer()
    lab.post_and_wait(writer)
    seconds = lab.receiver.call("drop_source", writer.name)
    lab.end(writer)
    return Outcome(lab.refill(), lab.landed(), seconds)


def stopped_destroyed_killed(lab: Lab) -> Outcome:
    """A stalled worker that is expelled: SIGKILL ends it without waking it."""
    writer = lab.writer()
    lab.post_and_wait(writer)
    writer.stop()
    seconds = lab.receiver.call("drop_source", writer.name)
    lab.end(writer)
    return Outcome(lab.refill(), lab.landed(), seconds)


# What a writer is left with when its target is gone.


def target_killed(lab: Lab) -> Outcome:
    """The WRITEs must end with an error, another target must go on, a new incarnation join."""
    writer, victim = hit_target(lab)
    outcome = Outcome(False)
    start_s = time.monotonic()
    victim.kill()
    with faults_of(writer, outcome):
        ended = lab.all_ended(writer, WRITES)
        outcome.in_flight = any(error for _, error, _ in ended)
        if outcome.in_flight:
            outcome.seconds = max(end_s for _, _, end_s in ended) - start_s
        writer.call("drop_target", victim.name)
        lab.warm(writer, lab.receiver)
        new_incarnation(lab, writer)
    lab.fence(writer)
    return outcome


def target_stopped_and_woken(lab: Lab) -> Outcome:
    """While it is stopped, another target must go on and a new incarnation join."""
    writer, victim = hit_target(lab)
    outcome = Outcome(False)
    victim.stop()
    with faults_of(writer, outcome):
        lab.warm(writer, lab.receiver, ended=0)
        new_incarnation(lab, writer, ended=0)
        early = len(writer.call("take_ended")) - 2
        outcome.in_flight = early < WRITES
        victim.wake()
        start_s = time.monotonic()
        ended = lab.all_ended(writer, WRITES - early)
        outcome.faults += [error for _, error, _ in ended if error]
        outcome.seconds = time.monotonic() - start_s
        writer.call("drop_target", victim.name)
    lab.fence(writer)
    victim.kill()
    return outcome


def target_stopped_and_killed(lab: Lab) -> Outcome:
    writer, victim = hit_target(lab)
    outcome = Outcome(False)
    victim.stop()
    with faults_of(writer, outcome):
        time.sleep(POLLED_S)
        early = len(writer.call("take_ended"))
        outcome.in_flight = early < WRITES
        start_s = time.monotonic()
        victim.kill()
        lab.all_ended(writer, WRITES - early)
        outcome.seconds = time.monotonic() - start_s
        writer.call("drop_target", victim.name)
        lab.warm(writer, lab.receiver)
    lab.fence(writer)
    return outcome


def target_restarted(lab: Lab) -> Outcome:
    """The writer sleeps through the death of its target and the start of the next one."""
    writer, victim = hit_target(lab)
    writer.stop()
    in_flight = 0 < victim.call("landed", 0, VICTIM_BLOCKS) < VICTIM_BLOCKS * peers.BLOCK
    victim.kill()
    heir = lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(lab.writer(), heir)
    heir.call("refill", 0, VICTIM_BLOCKS)
    writer.wake()
    time.sleep(POLLED_S)
    outcome = Outcome(in_flight, heir.call("landed", 0, VICTIM_BLOCKS))
    with faults_of(writer, outcome):
        lab.all_ended(writer, WRITES)
        lab.pair(writer, heir)
        lab.warm(writer, heir)
    lab.fence(writer)
    heir.kill()
    return outcome


def hit_target(lab: Lab) -> tuple[Any, Any]:
    """A writer in the middle of its WRITEs to a target of its own."""
    writer, victim = lab.writer(), lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(writer, victim)
    lab.warm(writer, victim)
    lab.post_and_wait(writer, victim)
    return writer, victim


def new_incarnation(lab: Lab, writer: Any, ended: int = 1) -> None:
    heir = lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(writer, heir)
    lab.warm(writer, heir, ended)
    heir.kill()


@contextmanager
def faults_of(writer: Any, outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except (peers.Hung, EOFError, OSError, RuntimeError) as error:
        outcome.faults.append(f"{writer.name}: {error!r}")


def pair_closed_and_opened(lab: Lab) -> Outcome:
    """Both live: the receiver destroys its agent in the middle, the writer drops the target when
    its WRITEs have ended, and the same two pair again."""
    writer = lab.writer()
    lab.post_and_wait(writer)
    start_s = time.monotonic()
    lab.receiver.call("drop_source", writer.name)
    outcome = Outcome(lab.refill())
    with faults_of(writer, outcome):
        ended = lab.all_ended(writer, WRITES)
        outcome.seconds = max(end_s for _, _, end_s in ended) - start_s
        outcome.landed = lab.landed()
        writer.call("drop_target", lab.receiver.name)
        lab.pair(writer, lab.receiver)
        lab.warm(writer, lab.receiver)
    lab.fence(writer)
    return outcome


# What a link may still bring that was cut and is mended.

LINK_MB_PER_S = 250.0
CUT_S = 1.0
MENDED_S = 4.0  # TCP tries again after twice the time it was cut


def cut_agent_kept(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    return mended(lab, writer, Outcome(False))


def cut_agent_destroyed(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    seconds = lab.receiver.call("drop_source", writer.name)
    return mended(lab, writer, Outcome(False, seconds=seconds))


def cut_killed_agent_kept(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    writer.kill()
    return mended(lab, writer, Outcome(False))


def cut_killed_destroyed(lab: Lab) -> Outcome:
    writer = cut_writer(lab)
    writer.kill()
    seconds = lab.receiver.call("drop_source", writer.name)
    return mended(lab, writer, Outcome(False, seconds=seconds))


def cut_writer(lab: Lab) -> Any:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.link.cut()
    time.sleep(CUT_S)
    return writer


def mended(lab: Lab, writer: Any, outcome: Outcome) -> Outcome:
    outcome.in_flight = lab.refill()
    lab.link.mend()
    outcome.landed = lab.landed(MENDED_S)
    lab.fence(writer)
    return outcome


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    run: Callable[[Lab], Outcome]
    must_hold: bool  # rlt relies on it
    over_link: bool = False


ROWS = [
    Row("stopped", "writer stopped, then woken", stopped_agent_kept, False),
    Row("stopped-destroyed", "writer stopped, agent destroyed, writer woken",
        stopped_agent_destroyed, False),
    Row("killed", "writer killed and reaped", killed_agent_kept, False),
    Row("killed-destroyed", "writer killed and reaped, agent destroyed",
        killed_then_destroyed, True),
    Row("destroyed-killed", "agent destroyed, writer killed and reaped",
        destroyed_then_killed, True),
    Row("stopped-destroyed-killed", "writer stopped, agent destroyed, writer killed and reaped",
        stopped_destroyed_killed, True),
    Row("restarted", "writer stopped, receiver restarted, writer woken", target_restarted, True),
    Row("closed", "agent destroyed while both live, paired again", pair_closed_and_opened, False),
    Row("target-killed", "target killed", target_killed, True),
    Row("target-stopped", "target stopped, then woken", target_stopped_and_woken, True),
    Row("target-stopped-killed", "target stopped, then killed", target_stopped_and_killed, True),
    Row("cut", "link cut and mended", cut_agent_kept, False, True),
    Row("cut-destroyed", "link cut, agent destroyed, mended", cut_agent_destroyed, False, True),
    Row("cut-killed", "link cut, writer killed and reaped, mended",
        cut_killed_agent_kept, False, True),
    Row("cut-killed-destroyed", "link cut, writer killed and reaped, agent destroyed, mended",
        cut_killed_destroyed, True, True),
]  # fmt: skip


@dataclass
class Result:
    name: str
    what: str
    transport: str
    must_hold: bool
    repetitions: int
    in_flight: int
    landed_in: int
    landed_most: int
    seconds: list[float]
    faults: list[str]

    @property
    def held(self) -> bool:
        return not self.landed_in and not self.faults


def try_row(row: Row, lab: Lab, repeat: int) -> Result:
    outcomes: list[Outcome] = []
    lab.faults()
    for _ in range(repeat):
        outcome = row.run(lab)
        outcome.faults += lab.faults()
        outcomes.append(outcome)
    return Result(
        row.name,
        row.what,
        lab.transport,
        row.must_hold,
        repeat,
        sum(one.in_flight for one in outcomes),
        sum(one.landed > 0 for one in outcomes),
        max(one.landed for one in outcomes),
        [one.seconds for one in outcomes if one.seconds is not None],
        [fault for one in outcomes for fault in one.faults],
    )


@contextmanager
def lab_of(row: Row, transport: str, seed: int) -> Iterator[Lab]:
    with ExitStack() as stack:
        network = None
        if row.over_link:
            network = stack.enter_context(namespaces.network(("p", "d")))
            network.link("p", "d").slow(LINK_MB_PER_S)
        lab = Lab(transport, seed, network)
        stack.callback(lab.close)
        yield lab


HEAD = """| what | over | times | in flight | landed after | most MB | held | ms: median, most |
|---|---|---|---|---|---|---|---|"""


def growth(lab: Lab, count: int) -> list[str]:
    """What a worker keeps of peers that were killed in the middle, after `count` of them."""
    said = []
    survivor = lab.writer()
    for who, one_dies in (
        ("receiver, per killed writer", lambda: writer_dies(lab)),
        ("writer, per killed target", lambda: target_dies(lab, survivor)),
    ):
        keeper = survivor if who.startswith("writer") else lab.receiver
        for _ in range(count // 5):
            one_dies()
        before = keeper.call("usage")
        for _ in range(count):
            one_dies()
        after = keeper.call("usage")
        kib, files = (after[0] - before[0]) / 1024 / count, (after[1] - before[1]) / count
        said.append(
            f"| {who} | {lab.transport} | {count} | {kib:+.0f} KiB | {files:+.2f} open files |"
        )
    return said


def writer_dies(lab: Lab) -> None:
    writer = lab.writer()
    lab.post_and_wait(writer)
    lab.fence(writer)


def target_dies(lab: Lab, survivor: Any) -> None:
    victim = lab.start("victim", peers.PATTERN, VICTIM_BLOCKS)
    lab.pair(survivor, victim)
    lab.warm(survivor, victim)
    lab.post_and_wait(survivor, victim)
    victim.kill()
    lab.all_ended(survivor, WRITES)
    survivor.call("drop_target", victim.name)


def line(result: Result) -> str:
    times = ""
    if result.seconds:
        middle, most = statistics.median(result.seconds), max(result.seconds)
        times = f"{middle * 1e3:.1f}, {most * 1e3:.1f}"
    held = "yes" if result.held else "**no**" if result.must_hold else "no"
    return (
        f"| {result.what} | {result.transport} | {result.repetitions} | {result.in_flight} "
        f"| {result.landed_in} | {result.landed_most / 1e6:.1f} | {held} | {times} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--transport", nargs="+", default=["default", "tcp"])
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=int, default=50, metavar="PEERS")
    parser.add_argument("--json", action="store_true", help="one line of JSON per row")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only is None or row.name in options.only]
    broken = False
    if not options.json:
        print(HEAD)
    for transport in options.transport:
        for row in rows:
            if row.over_link and transport != "tcp":
                continue  # namespaces of one machine share its memory, and UCX finds that out
            try:
                with lab_of(row, transport, options.seed) as lab:
                    repeat = options.repeat if row.must_hold else math.ceil(options.repeat / 2)
                    result = try_row(row, lab, repeat)
            except namespaces.Refused as error:
                print(f"{row.name}: left out: {error}", file=sys.stderr)
                continue
            broken |= row.must_hold and not result.held
            print(json.dumps(asdict(result)) if options.json else line(result), flush=True)
            for fault in result.faults:
                print(f"{row.name}: {fault}", file=sys.stderr)
    if options.only is None and options.growth and not options.json:
        print("\n| memory kept | over | peers | resident | files |\n|---|---|---|---|---|")
        for transport in options.transport:
            with lab_of(ROWS[0], transport, options.seed) as lab:
                print("\n".join(growth(lab, options.growth)), flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
