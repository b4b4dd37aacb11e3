"""Lines that are written by a thread of their own."""

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlt.launch.arrival import FileArrival
from rlt.launch.line_writer import LineWriter

from .script import SERVE, WAIT, supervised, wait_line

CHATTER = (
    "import sys\nfor n in range(40_000): print('chatter' * 20, n)\nprint('done', flush=True)\n"
)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_all(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while data := os.read(descriptor, 1 << 20):
            found += data
    except BlockingIOError:
        pass
    return found


def test_lines_come_out_in_order_and_whole(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for number in range(1000):
        writer.write(f"line {number} \udcff")
    assert writer.close(5.0)
    assert read_all(pipe[0]).decode().splitlines() == [f"line {n} ?" for n in range(1000)]


def test_a_reader_that_does_not_read_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], bound_bytes=300_000)
    for number in range(10_000):
        writer.write(f"{number:>99}")
    found = b""
    while b"were dropped: nobody read" not in found:
        found += os.read(pipe[0], 1 << 16)
    assert writer.close(5.0)
    found += read_all(pipe[0])
    numbers = [int(line) for line in found.splitlines() if line.strip().isdigit()]
    assert numbers[:2000] == list(range(2000)) and len(numbers) < 5000
    assert numbers == sorted(set(numbers))


def test_the_end_waits_for_a_slow_reader_only_so_long(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    writer.write("x" * 200_000)
    assert not writer.close(0.05)
    while not writer.close(0.05):
        read_all(pipe[0])


def test_a_reader_that_went_away_is_no_fault() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LineWriter(writing)
    for _ in range(3):
        writer.write("nobody hears")
    assert writer.close(5.0)
    os.close(writing)


def test_a_launcher_whose_lines_nobody_reads_still_supervises(tmp_path: Path) -> None:
    arrival = FileArrival(tmp_path / "chatted")
    says = f"{CHATTER}import os\nopen('{tmp_path}/new', 'w').close()\n"
    says += f"os.rename('{tmp_path}/new', '{tmp_path}/chatted')\n"
    with supervised({"main": SERVE, "worker": says + WAIT}, tmp_path) as process:
        wait_line(process, "READY")
        assert select.select([arrival], [], [], 20.0)[0], "a worker is held up by its own log"
        arrival.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
