"""The worker side between real processes over NIXL: bytes, a killed peer, a stopped one, leftovers.

UCX reads its variables once per process, so the TCP run is this file again in a child process.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rlt.connector.nixl_transport import NixlTransport
from rlt.connector.worker_connector import WorkerConnector
from rlt.runtime.clock import SystemClock
from rlt.runtime.errors import ProtocolError
from rlt.runtime.plans import Arrival, SendFailure, SendOrder
from rlt.runtime.types import Generation, TokenRange

from .pools import Pools, canary_pools, copy_positions, geometry, random_pools
from .receiver_process import Hello, Welcome

SHAPE = geometry("bfloat16", layers=6)
SINK_BLOCKS, SINK_ROWS = 40, 4
PATIENCE_S = 20.0


class Receiver:
    """A decode worker's end in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        script = str(Path(__file__).with_name("receiver_process.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.arrived: list[Arrival] = []

    def pair(self, connector: WorkerConnector, source: str) -> Welcome:
        hello = Hello(
            source,
            connector.agent_metadata(),
            connector.pool,
            SINK_BLOCKS,
            SINK_ROWS,
            self.name,
        )
        self._say(msgspec.json.encode(hello))
        welcome = msgspec.json.decode(self._line(), type=Welcome)
        connector.add_peer(self.name, welcome.metadata, welcome.pool)
        return welcome

    def take_arrivals(self) -> None:
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0)[0]:
            self.arrived.append(msgspec.json.decode(self._line(), type=Arrival))

    def dump(self, path: Path) -> bytes:
        self._say(f"dump {path}".encode())
        assert msgspec.json.decode(self._line(), type=str) == str(path)
        return path.read_bytes()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self._say(b"end")
            self.process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = bytes(self.process.stdout.readline())
        assert line, f"{self.name} ended: {self.process.poll()}"
        return line


@pytest.fixture
def source() -> Pools:
    return random_pools(SHAPE, blocks=16, rows=3)


@pytest.fixture
def connector(source: Pools) -> Iterator[WorkerConnector]:
    made = WorkerConnector(
        NixlTransport(source.kv, source.hidden, SHAPE, name="p"),
        clock=SystemClock(),
        max_inflight_bytes=4 * SHAPE.block_bytes,
        transfer_timeout_s=0.5,
    )
    with closing(made):
        yield made


@pytest.fixture
def start() -> Iterator[Callable[[str], Receiver]]:
    started: list[Receiver] = []

    def build(name: str) -> Receiver:
        started.append(Receiver(name))
        return started[-1]

    yield build
    for receiver in started:
        receiver.close()


def order(
    sequence: int, peer: str, span: TokenRange, blocks: list[int], sinks: list[int]
) -> SendOrder:
    return SendOrder(
        generation=Generation(5),
        peer=peer,
        sequence=sequence,
        depth=1,
        range=span,
        blocks=tuple(blocks),
        peer_blocks=tuple(sinks),
        hidden_slot=0,
        peer_hidden_slot=0,
        allocation=77,
    )


def poll_until(
    connector: WorkerConnector, done: Callable[[list[SendFailure]], bool]
) -> list[SendFailure]:
    failed: list[SendFailure] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while not done(failed):
        assert time.monotonic() < deadline_s, f"after {PATIENCE_S} s: {failed}"
        failed += connector.poll().failed
        time.sleep(0.0005)  # NIXL has no descriptor to wait on, and the peer needs the core
    return failed


def test_ranges_and_a_hidden_row_arrive_bit_for_bit_in_another_process(
    source: Pools,
    connector: WorkerConnector,
    start: Callable[[str], Receiver],
    tmp_path: Path,
) -> None:
    receiver = start("d")
    receiver.pair(connector, "p")
    expected = canary_pools(SHAPE, blocks=SINK_BLOCKS, rows=SINK_ROWS)
    chunks = [
        (TokenRange(0, 16), [15, 3, 4, 9], [39, 0, 7, 8]),
        (TokenRange(3, 14), [1, 2, 5, 6], [20, 22, 21, 1]),
        (TokenRange(9, 11), [10], [30]),
    ]
    orders = [order(n, "d", *chunk) for n, chunk in enumerate(chunks)]
    hidden = msgspec.structs.replace(
        orders[0], sequence=3, depth=None, blocks=(), peer_blocks=(), peer_hidden_slot=2
    )
    connector.post([*orders, hidden])

    def all_in(_: list[SendFailure]) -> bool:
        receiver.take_arrivals()
        return len(receiver.arrived) == 4 and not connector.outstanding()

    assert poll_until(connector, all_in) == []
    assert sorted(arrival.sequence for arrival in receiver.arrived) == [0, 1, 2, 3]
    assert {(a.generation, a.allocation) for a in receiver.arrived} == {(5, 77)}
    for span, blocks, sinks in chunks:
        copy_positions(source, expected, span, blocks, sinks)
    expected.hidden[2] = source.hidden[0]
    assert receiver.dump(tmp_path / "pools") == b"".join(expected.bytes())
    counted = connector.statistics()
    lacked = 29 * SHAPE.num_layers * 2 * SHAPE.position_bytes + SHAPE.hidden_bytes
    assert counted["bytes_sent"] == counted["bytes_posted"] == lacked
    receiver.end()


def test_a_killed_peer_fails_its_writes_and_the_next_one_is_served(
    connector: WorkerConnector, start: Callable[[str], Receiver]
) -> None:
    first, second = start("d1"), start("d2")
    first.pair(connector, "p")
    connector.post([order(0, "d1", TokenRange(0, 4), [0], [0])])
    poll_until(connector, lambda _: not connector.outstanding())
    first.send_signal(signal.SIGKILL)
    first.process.wait()
    connector.post([order(1, "d1", TokenRange(0, 4), [1], [1])])
    failed = poll_until(connector, lambda failed: any(one.terminal for one in failed))
    assert {one.sequence for one in failed} == {1}
    connector.remove_peer("d1")
    second.pair(connector, "p")
    connector.post([order(2, "d2", TokenRange(0, 4), [2], [2])])

    def arrived(_: list[SendFailure]) -> bool:
        second.take_arrivals()
        return bool(second.arrived)

    assert poll_until(connector, arrived) == []
    assert connector.statistics()["handles_stuck"] == 0
    second.end()


def test_a_stopped_peer_passes_the_deadline_and_its_handle_ends_when_it_is_killed(
    connector: WorkerConnector, start: Callable[[str], Receiver]
) -> None:
    receiver = start("d")
    receiver.pair(connector, "p")
    connector.post([order(0, "d", TokenRange(0, 4), [0], [0])])
    poll_until(connector, lambda _: not connector.outstanding())
    receiver.send_signal(signal.SIGSTOP)
    connector.post([order(1, "d", TokenRange(0, 4), [1], [1])])
    failed = poll_until(connector, lambda failed: bool(failed))
    assert [(one.sequence, one.terminal) for one in failed] == [(1, False)]
    assert connector.statistics()["handles_stuck"] == connector.in_flight(Generation(5)) == 1
    receiver.send_signal(signal.SIGKILL)
    ended = poll_until(connector, lambda failed: bool(failed))
    assert [(one.sequence, one.terminal) for one in ended] == [(1, True)]
    assert connector.in_flight(Generation(5)) == 0 and not connector.outstanding()
    connector.remove_peer("d")


def test_a_pair_that_was_closed_is_opened_anew_with_the_same_welcome(
    connector: WorkerConnector, start: Callable[[str], Receiver]
) -> None:
    """The peer lost nothing: its agent, and so its metadata, are the same. What was posted before
    still lands and is notified."""
    receiver = start("d")
    welcome = receiver.pair(connector, "p")
    for sequence in (0, 2, 4):
        receiver.send_signal(signal.SIGSTOP)
        connector.post([order(sequence, "d", TokenRange(0, 4), [0], [0])])
        poll_until(connector, lambda failed: bool(failed))
        connector.remove_peer("d")
        assert connector.draining("d")
        with pytest.raises(ProtocolError, match="not drained"):
            connector.add_peer("d", welcome.metadata, welcome.pool)
        receiver.send_signal(signal.SIGCONT)
        poll_until(connector, lambda _: not connector.draining("d"))
        connector.add_peer("d", welcome.metadata, welcome.pool)
        connector.post([order(sequence + 1, "d", TokenRange(0, 4), [1], [1])])

        def all_in(_: list[SendFailure], most: int = sequence + 2) -> bool:
            receiver.take_arrivals()
            return len(receiver.arrived) == most and not connector.outstanding()

        assert poll_until(connector, all_in) == []
    assert [arrival.sequence for arrival in receiver.arrived] == list(range(6))
    receiver.end()


def test_closing_with_a_running_handle_keeps_it_until_it_ends(
    source: Pools, start: Callable[[str], Receiver]
) -> None:
    receiver = start("d")
    held = WorkerConnector(
        NixlTransport(source.kv, source.hidden, SHAPE, name="p"),
        clock=SystemClock(),
        max_inflight_bytes=1 << 20,
        transfer_timeout_s=30,
    )
    receiver.pair(held, "p")
    held.post([order(0, "d", TokenRange(0, 4), [0], [0])])
    poll_until(held, lambda _: not held.outstanding())
    receiver.send_signal(signal.SIGSTOP)
    held.post([order(1, "d", TokenRange(0, 4), [1], [1])])
    held.poll()
    assert held.in_flight(Generation(5)) == 1
    held.close()
    receiver.send_signal(signal.SIGKILL)
    receiver.process.wait()
    poll_until(held, lambda failed: bool(failed))
    held.close()


def test_closing_leaves_no_shared_memory_and_no_file(
    source: Pools, start: Callable[[str], Receiver], tmp_path: Path
) -> None:
    before = _files()
    receiver = start("d")
    made = WorkerConnector(
        NixlTransport(source.kv, source.hidden, SHAPE, name="p"),
        clock=SystemClock(),
        max_inflight_bytes=1 << 20,
        transfer_timeout_s=5,
    )
    receiver.pair(made, "p")
    made.post([order(0, "d", TokenRange(0, 16), [0, 1, 2, 3], [0, 1, 2, 3])])
    poll_until(made, lambda _: not made.outstanding())
    receiver.end()
    made.remove_peer("d")
    made.close()
    assert _files() == before
    assert not _segments({os.getpid(), receiver.process.pid})


@pytest.mark.soak
@pytest.mark.skipif(os.environ.get("UCX_TLS") == "tcp", reason="this is that run")
def test_the_same_holds_over_tcp() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", str(Path(__file__))]
    environment = {**os.environ, "UCX_TLS": "tcp"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


def _files() -> set[Path]:
    """What UCX and NIXL could leave behind."""
    return {
        path
        for folder in ("/dev/shm", "/tmp")
        for path in Path(folder).iterdir()
        if "ucx" in path.name.lower() or "nixl" in path.name.lower()
    }


def _segments(creators: set[int]) -> list[str]:
    """System V shared memory made by these processes."""
    table = Path("/proc/sysvipc/shm")
    rows = table.read_text().splitlines()[1:] if table.exists() else []
    return [row for row in rows if int(row.split()[4]) in creators]
