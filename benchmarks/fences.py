"""When may a receiver reuse memory that a writer could write? Each fence, tried on real processes.

    python -P benchmarks/fences.py [--repeat N] [--transport default tcp] [--only NAME ...] ...

A writer posts 128 MiB of WRITEs into a receiver's pool and is stopped, killed or cut off in the
middle; the receiver fills the memory with a pattern and goes on polling; what lands then counts.
Meanwhile a bystander writes to the same pool, and the receiver compares each of its blocks.
Exit code 1 if a fence that rlt relies on did not hold. As root, also with a link that is cut.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # read when nixl is loaded; writers do fail here
os.environ.setdefault("UCX_LOG_FILE", "stderr")  # stdout is for results
sys.path.append(str(Path(__file__).parent))  # python -P leaves it out

from fence_lab import WRITES, Lab, lab_of, namespaces, peers
from fence_rows import ROWS, Row


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
    outcomes = []
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
    victim = lab.start("victim", peers.PATTERN, peers.VICTIM_BLOCKS)
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


def results(options: argparse.Namespace, transport: str) -> Iterator[Result]:
    for over_link in (False, True):
        rows = [
            row
            for row in ROWS
            if row.over_link == over_link and (options.only is None or row.name in options.only)
        ]
        if not rows or (over_link and transport != "tcp"):
            continue  # namespaces of one machine share its memory, and UCX finds that out
        try:
            with lab_of(transport, options.seed, options.polled_s, over_link) as lab:
                for row in rows:
                    repeat = options.repeat if row.must_hold else math.ceil(options.repeat / 2)
                    yield try_row(row, lab, repeat)
        except namespaces.Refused as error:
            print(f"left out: {', '.join(row.name for row in rows)}: {error}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--repeat", type=int, default=25, help="half of it where rlt relies on none"
    )
    parser.add_argument("--transport", nargs="+", default=["default", "tcp"])
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--polled-s", type=float, default=0.8, help="wait before counting")
    parser.add_argument("--growth", type=int, default=50, metavar="PEERS")
    parser.add_argument("--json", action="store_true", help="one line of JSON per row")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are to be removed
    if not options.json:
        print(HEAD)
    broken = False
    for transport in options.transport:
        for result in results(options, transport):
            broken |= result.must_hold and not result.held
            print(json.dumps(asdict(result)) if options.json else line(result), flush=True)
            for fault in result.faults:
                print(f"{result.name}: {fault}", file=sys.stderr)
    if options.only is None and options.growth and not options.json:
        print("\n| memory kept | over | peers | resident | files |\n|---|---|---|---|---|")
        for transport in options.transport:
            with lab_of(transport, options.seed, options.polled_s, False) as lab:
                print("\n".join(growth(lab, options.growth)), flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
