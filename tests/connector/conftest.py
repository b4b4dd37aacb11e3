"""Both ends of the handoff of handoff_parts.py, opened, on a clock that a test moves."""

import pytest

from rlt.connector.receiver import Receiver
from rlt.connector.sender import Sender
from rlt.runtime.types import Generation

from .clock import ManualClock
from .handoff_parts import (
    GEOMETRY,
    PROMPT,
    D,
    G,
    P,
    reservation,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dropped() -> list[Generation]:
    return []


@pytest.fixture
def p(clock: ManualClock, dropped: list[Generation]) -> Sender:
    def drop(generation: Generation) -> tuple[int, ...]:
        dropped.append(generation)
        return ()

    machine = Sender(GEOMETRY, clock, worker="prefill-0", drop_queued=drop)
    machine.open(G, D, reservation(), PROMPT)
    return machine


@pytest.fixture
def d(clock: ManualClock) -> Receiver:
    machine = Receiver(GEOMETRY, clock, worker="decode-0")
    machine.open(G, P, reservation(), PROMPT)
    return machine
