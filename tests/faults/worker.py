"""A real worker whose transfers and passes do as a script says: CONFIG SCRIPT LOG.

All holds live here, in a transport around the product's and in front of its compute thread; the
worker itself is the product's. SCRIPT is a file of orders, looked at again whenever it changes; LOG
gets a line for every WRITE, notification and held pass, so that a test can wait for one.
"""

import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from rlt.connector.process import nixl_transport, run_worker
from rlt.connector.transport import (
    Finished,
    Notification,
    Ticket,
    Transport,
    Write,
    unpack_notice,
)
from rlt.decode.engine import DecodeEngine
from rlt.prefill.engine import PrefillEngine
from rlt.runtime.executor import ThreadExecutor
from rlt.runtime.plans import ModelRunnerOutput, SchedulerOutput

LOOK_S = 0.002  # how often a held pass looks whether it may run


class Order(msgspec.Struct, frozen=True):
    """at: before a WRITE is posted, after it has ended, when its notification is heard, or before a
    pass is computed. hold lasts until the script changes; fail is told as the transport's own
    error (at post: nothing is written); delay lasts up to delay_s, drawn by seed and sequence, so
    that WRITEs end in another order. None matches all; the first `after` matches are let through,
    and no more than `count` are treated. stage: of the pass.
    """

    at: Literal["post", "finish", "notice", "compute"]
    do: Literal["hold", "fail", "delay"]
    generation: int | None = None
    sequence: int | None = None
    stage: str | None = None
    after: int = 0
    count: int | None = None
    delay_s: float = 0.0
    seed: int = 0


class Script:
    """The orders that hold now, and how often each of them was asked about."""

    def __init__(self, path: Path, log: Path) -> None:
        self._path = path
        self._log: TextIO = log.open("a", buffering=1)
        self.version = 0  # of the file, as it was read last
        self._orders: list[Order] = []
        self._matched: Counter[int] = Counter()

    def look(self) -> bool:
        """Read it again if it has changed."""
        try:
            changed_ns = os.stat(self._path).st_mtime_ns
        except FileNotFoundError:
            return False
        if changed_ns == self.version:
            return False
        self.version = changed_ns
        self._orders = msgspec.json.decode(self._path.read_bytes(), type=list[Order])
        self._matched.clear()
        return True

    def order(
        self, at: str, generation: int | None, sequence: int | None, stage: str | None = None
    ) -> Order | None:
        for index, order in enumerate(self._orders):
            wanted = (order.generation, order.sequence, order.stage)
            have = (generation, sequence, stage)
            if order.at != at or any(w not in (None, h) for w, h in zip(wanted, have, strict=True)):
                continue
            self._matched[index] += 1
            number = self._matched[index] - order.after
            if number > 0 and (order.count is None or number <= order.count):
                return order
        return None

    def note(self, event: str, generation: int | None, sequence: int | None) -> None:
        line = {"event": event, "generation": generation, "sequence": sequence}
        self._log.write(json.dumps(line) + "\n")


class _Item:
    """A WRITE, an end or a notification on its way, and what was ordered for it."""

    def __init__(self, what: object, payload: bytes, order: Order | None, version: int = 0) -> None:
        notice = unpack_notice(payload)
        self.what = what
        self.version = version  # of the script that the order is from
        self.generation = None if notice is None else int(notice.generation)
        self.sequence = None if notice is None else notice.sequence
        self.order = order
        self.due_s = time.monotonic()
        if order is not None and order.do == "delay":
            draw = random.Random(f"{order.seed} {self.generation} {self.sequence}")
            self.due_s += draw.uniform(0.0, order.delay_s)


class ScriptedTransport:
    """Everything but WRITEs and notifications is the real transport's; its tickets get numbers of
    this one."""

    def __init__(self, transport: Transport, script: Script) -> None:
        self._transport = transport
        self._script = script
        self._numbers = itertools.count(1)
        self._unposted: list[_Item] = []
        self._running: dict[Ticket, tuple[Ticket, Write]] = {}
        self._unheard: list[_Item] = []
        self._ended: list[_Item] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, write: Write) -> Ticket:
        ticket = Ticket(next(self._numbers))
        item = self._ordered("post", (ticket, write), write.notice)
        if item.order is None:
            self._post(item)
        elif item.order.do == "fail":
            self._script.note("failed", item.generation, item.sequence)
            failed = Finished(ticket, "it was ordered to fail before it was posted")
            self._ended.append(_Item(failed, write.notice, None))
        else:
            self._unposted.append(item)
        return ticket

    def poll_finished(self) -> list[Finished]:
        for item in self._free(self._unposted, "post"):
            self._post(item)
        for finished in self._transport.poll_finished():
            ticket, write = self._running.pop(finished.ticket)
            item = self._ordered("finish", Finished(ticket, finished.error), write.notice)
            self._script.note("ended", item.generation, item.sequence)
            if item.order is not None and item.order.do == "fail":
                item.what = Finished(ticket, "it was ordered to fail after it was posted")
            self._ended.append(item)
        return [item.what for item in self._free(self._ended, "finish")]  # type: ignore[misc]

    def poll_notifications(self) -> list[Notification]:
        for told in self._transport.poll_notifications():
            item = self._ordered("notice", told, told.payload)
            self._script.note("arrived", item.generation, item.sequence)
            self._unheard.append(item)
        return [item.what for item in self._free(self._unheard, "notice")]  # type: ignore[misc]

    def remove_source(self, source: str) -> None:
        """What this source has notified and nobody heard goes with its agent."""
        self._unheard = [i for i in self._unheard if getattr(i.what, "source", None) != source]
        self._transport.remove_source(source)

    def _ordered(self, at: str, what: object, payload: bytes) -> _Item:
        self._script.look()
        item = _Item(what, payload, None)
        order = self._script.order(at, item.generation, item.sequence)
        return _Item(what, payload, order, self._script.version)

    def _post(self, item: _Item) -> None:
        ticket, write = item.what  # type: ignore[misc]
        self._running[self._transport.write(write)] = (ticket, write)
        self._script.note("posted", item.generation, item.sequence)

    def _free(self, items: list[_Item], at: str) -> list[_Item]:
        """Take out what nothing keeps any more."""
        self._script.look()
        for item in items:
            if _is_held(item) and item.version != self._script.version:
                item.order = self._script.order(at, item.generation, item.sequence)
                item.version = self._script.version
        now_s = time.monotonic()
        free = [item for item in items if not _is_held(item) and item.due_s <= now_s]
        items[:] = [item for item in items if item not in free]
        return sorted(free, key=lambda item: item.due_s)


def _is_held(item: _Item) -> bool:
    return item.order is not None and item.order.do == "hold"


def scripted_passes(executor: ThreadExecutor, script: Script) -> None:
    """Passes are held or slowed down on the compute thread, in front of the product's own code."""
    compute = executor._compute
    run = compute._run

    def scripted(plan: SchedulerOutput) -> ModelRunnerOutput:
        script.look()
        order = script.order("compute", None, None, plan.stage.value)
        if order is not None and order.do == "delay":
            time.sleep(order.delay_s)
        if order is not None and order.do == "hold":
            script.note("held", None, None)
        while order is not None and order.do == "hold":
            time.sleep(LOOK_S)
            if script.look():
                order = script.order("compute", None, None, plan.stage.value)
        return run(plan)

    compute._run = scripted


def main(config: str, script: str, log: str) -> int:
    def make_transport(executor: ThreadExecutor, incarnation: str) -> Transport:
        # The compute thread has a reader of its own: a script is not for two threads.
        scripted_passes(executor, Script(Path(script), Path(log)))
        real = nixl_transport(executor, incarnation)
        return ScriptedTransport(real, Script(Path(script), Path(log)))  # type: ignore[return-value]

    role = json.loads(config)["role"]
    return run_worker(
        PrefillEngine if role == "prefill" else DecodeEngine, [config], make_transport
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
