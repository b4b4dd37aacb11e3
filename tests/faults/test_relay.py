"""The relay between sockets of this test: what goes through, when, and in which order."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from .relay import Relay, relay
from .rules import Rule, Schedule

PEER = b"prefill-0-aa"


class Line:
    """coordinator: a ROUTER. worker: a DEALER that dialled the relay."""

    def __init__(self, folder: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.coordinator = self.router(f"ipc://{folder}/c")
        self.worker = self.dial(f"ipc://{folder}/r", PEER)

    def dial(self, endpoint: str, identity: bytes) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, identity)
        dealer.connect(endpoint)
        self._sockets.append(dealer)
        return dealer

    def router(self, endpoint: str) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        router.bind(endpoint)
        self._sockets.append(router)
        return router

    def say(self, *numbers: int, kind: str = "ask") -> None:
        for number in numbers:
            self.worker.send(msgspec.msgpack.encode({"type": kind, "generation": number}))

    def heard(self, count: int, timeout_ms: int = 5000) -> list[int]:
        """The next `count` generations that come to the coordinator, or all that come in time."""
        found: list[int] = []
        while len(found) < count and self.coordinator.poll(timeout_ms):
            identity, frame = self.coordinator.recv_multipart()
            assert identity == PEER
            found.append(msgspec.msgpack.decode(frame)["generation"])
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rlt-r") as folder:
        yield folder


@pytest.fixture
def between(folder: str) -> Iterator[Relay]:
    with relay(f"ipc://{folder}/c", f"ipc://{folder}/r", folder) as between:
        yield between


@pytest.fixture
def line(folder: str, between: Relay) -> Iterator[Line]:
    line = Line(folder)
    line.say(0)
    assert line.heard(1) == [0]
    yield line
    line.close()


def test_everything_goes_through_in_order_both_ways(line: Line, between: Relay) -> None:
    line.say(*range(1, 100))
    assert line.heard(99) == list(range(1, 100))
    line.coordinator.send_multipart([PEER, b"back"])
    assert line.worker.poll(5000) and line.worker.recv() == b"back"
    assert between.counts["ask"] == 100


def test_a_dropped_message_never_comes(line: Line, between: Relay) -> None:
    rule = between.add(Rule("drop", generation=2))
    line.say(1, 2, 3)
    assert line.heard(3, 300) == [1, 3]
    between.release(rule)
    line.say(2)
    assert line.heard(1) == [2]


def test_held_messages_come_in_order_when_they_are_released_or_are_forgotten(
    line: Line, between: Relay
) -> None:
    rule = between.hold("ask")
    line.say(1, 2)
    line.say(3, kind="other")
    assert line.heard(1) == [3]
    rule.wait()
    between.release(rule)
    assert line.heard(2) == [1, 2]
    rule = between.hold("ask")
    line.say(4)
    rule.wait()
    between.forget(rule)
    line.say(5)
    assert line.heard(2, 300) == [5]


def test_a_copied_message_comes_again(line: Line, between: Relay) -> None:
    between.add(Rule("copy", generation=2, copies=2))
    line.say(1, 2, 3)
    assert line.heard(5) == [1, 2, 2, 2, 3]


def test_a_delayed_message_holds_up_what_follows_it_on_its_connection(
    line: Line, between: Relay
) -> None:
    between.add(Rule("delay", generation=1, delay_s=0.3))
    began_s = time.monotonic()
    line.say(1, 2)
    assert line.heard(2) == [1, 2]
    assert time.monotonic() - began_s >= 0.3


def test_a_swapped_message_is_overtaken_by_the_next_or_comes_alone(
    line: Line, between: Relay
) -> None:
    between.add(Rule("swap", generation=1))
    line.say(1, 2, 3)
    assert line.heard(3) == [2, 1, 3]
    line.say(1)
    assert line.heard(1) == [1]


def test_a_schedule_loses_and_copies_nothing_but_what_it_says(line: Line, between: Relay) -> None:
    lossy = frozenset({"lossy"})
    between.use(Schedule(3, copy=0.2, delay=0.2, delay_s=0.01, drop=0.3, lossy=lossy))
    line.say(*range(1, 101))
    heard = line.heard(1000, 500)
    assert sorted(set(heard)) == list(range(1, 101)) and heard == sorted(heard)
    assert 103 < len(heard) < 130
    line.say(*range(1, 101), kind="lossy")
    assert 50 < len(set(line.heard(1000, 500))) < 90


def test_prefill_workers_are_led_to_the_relay_and_through_it_to_their_decode_worker(
    line: Line, between: Relay, folder: str
) -> None:
    real = line.router(f"ipc://{folder}/d")
    register = {"type": "register", "worker": "decode-0", "peer_endpoint": f"ipc://{folder}/d"}
    for _ in range(2):
        line.worker.send(msgspec.msgpack.encode({**register, "generation": 9}))
        assert line.coordinator.poll(5000)
        told: Any = msgspec.msgpack.decode(line.coordinator.recv_multipart()[1])
    assert told["peer_endpoint"] != register["peer_endpoint"]
    rule = between.add(Rule("drop", "chunk", to="decode"))
    dialled = line.dial(told["peer_endpoint"], b"p")
    dialled.send(msgspec.msgpack.encode({"type": "chunk"}))
    dialled.send(msgspec.msgpack.encode({"type": "commit"}))
    assert real.poll(5000)
    identity, frame = real.recv_multipart()
    assert (identity, msgspec.msgpack.decode(frame)) == (b"p", {"type": "commit"})
    assert rule.matched == 1


def test_frames_that_are_no_messages_go_through(line: Line) -> None:
    line.worker.send(b"\xc1\xc1")
    assert line.coordinator.poll(5000)
    assert line.coordinator.recv_multipart() == [PEER, b"\xc1\xc1"]
