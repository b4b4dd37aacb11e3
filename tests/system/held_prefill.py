"""A prefill worker whose posted WRITEs start only while a file is there: CONFIG GATE.

The hold lives here, in a transport around the product's; the worker itself is the product's.
"""

import itertools
import sys
from collections import deque
from pathlib import Path

from rlt.connector.process import nixl_transport, run_worker
from rlt.connector.transport import Finished, Ticket, Transport, Write
from rlt.prefill.engine import PrefillEngine
from rlt.runtime.executor import ThreadExecutor


class HeldTransport:
    """Everything but WRITEs is the real transport's; its tickets get numbers of this one."""

    def __init__(self, transport: Transport, gate: Path) -> None:
        self._transport = transport
        self._gate = gate
        self._numbers = itertools.count(1)
        self._kept: deque[tuple[Ticket, Write]] = deque()
        self._started: dict[Ticket, Ticket] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, write: Write) -> Ticket:
        ticket = Ticket(next(self._numbers))
        self._kept.append((ticket, write))
        return ticket

    def poll_finished(self) -> list[Finished]:
        while self._kept and self._gate.exists():
            ticket, write = self._kept.popleft()
            self._started[self._transport.write(write)] = ticket
        return [
            Finished(self._started.pop(finished.ticket), finished.error)
            for finished in self._transport.poll_finished()
        ]


def held(executor: ThreadExecutor, incarnation: str) -> Transport:
    transport: Transport = HeldTransport(  # type: ignore[assignment]
        nixl_transport(executor, incarnation), Path(sys.argv[2])
    )
    return transport


if __name__ == "__main__":
    sys.exit(run_worker(PrefillEngine, sys.argv[1:], held))
