"""What holds for every Transport: NIXL over UCX's own choice, NIXL over TCP, and the scripted one.

UCX reads its variables once per process, so the TCP run is this file again in a child process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rlt.connector.geometry import hidden_entry, kv_entries
from rlt.connector.nixl_transport import NixlTransport, describe
from rlt.connector.transport import (
    Finished,
    Notice,
    Notification,
    Transport,
    Write,
    pack_notice,
    unpack_notice,
)
from rlt.runtime.errors import ProtocolError
from rlt.runtime.types import Generation, TokenRange

from .pools import (
    Pools,
    block_bytes,
    canary_pools,
    copy_positions,
    geometry,
    random_pools,
)
from .scripted_transport import ScriptedTransport, Wire

NOTICE = Notice(Generation((7 << 40) + 1), 12, 3)
MakeTransport = Callable[[Pools, str], Transport]


@pytest.fixture(params=["nixl", "scripted"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeTransport]:
    wire = Wire()
    memory: list[Pools] = []  # a scripted transport knows its pool by address alone
    with ExitStack() as stack:

        def build(pools: Pools, name: str) -> Transport:
            memory.append(pools)
            transport: Transport
            if request.param == "nixl":
                transport = NixlTransport(pools.kv, pools.hidden, pools.geometry, name=name)
            else:
                pool = describe(pools.kv, pools.hidden, pools.geometry)
                transport = ScriptedTransport(wire, pool, name)
            return stack.enter_context(closing(transport))

        yield build


def pair(writer: Transport, writer_name: str, reader: Transport, reader_name: str) -> None:
    metadata = reader.add_source(writer_name, writer.agent_metadata())
    writer.add_target(reader_name, metadata, reader.pool)


def run_until(
    writer: Transport, reader: Transport, finished: int, told: int
) -> tuple[list[Finished], list[Notification]]:
    ended: list[Finished] = []
    heard: list[Notification] = []
    deadline_s = time.monotonic() + 20
    while len(ended) < finished or len(heard) < told:
        assert time.monotonic() < deadline_s, f"after 20 s: {ended}, {heard}"
        ended += writer.poll_finished()
        heard += reader.poll_notifications()
    return ended, heard


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 4), (0, 12), (1, 3), (3, 5), (2, 11), (0, 1), (4, 10)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_range_arrives_bit_for_bit_and_no_other_byte_changes(
    make: MakeTransport, dtype: str, start: int, stop: int
) -> None:
    shape = geometry("float32" if dtype == "float32" else "bfloat16")
    mine = random_pools(shape, blocks=9, rows=4)
    theirs, expected = (canary_pools(shape, blocks=20, rows=6) for _ in range(2))
    writer, reader = make(mine, "p"), make(theirs, "d")
    pair(writer, "p", reader, "d")
    count = -(-stop // 4) - start // 4
    span, blocks, sinks = TokenRange(start, stop), [8, 2, 3][:count], [19, 18, 0][:count]
    local = [*kv_entries(writer.pool, span, blocks), hidden_entry(writer.pool, 3)]
    remote = [*kv_entries(reader.pool, span, sinks), hidden_entry(reader.pool, 1)]
    ticket = writer.write(Write("d", local, remote, pack_notice(NOTICE)))
    ended, heard = run_until(writer, reader, 1, 1)
    assert ended == [Finished(ticket, None)]
    assert heard == [Notification("p", "p", pack_notice(NOTICE))]
    copy_positions(mine, expected, span, blocks, sinks)
    expected.hidden[1] = mine.hidden[3]
    assert theirs.bytes() == expected.bytes()


def test_every_write_ends_once_and_is_notified_once(make: MakeTransport) -> None:
    shape = geometry()
    writer = make(random_pools(shape, blocks=8, rows=1), "p")
    reader = make(canary_pools(shape, blocks=8, rows=1), "d")
    pair(writer, "p", reader, "d")
    notices = [pack_notice(Notice(Generation(1), 1, n)) for n in range(40)]
    tickets = [
        writer.write(Write("d", [n % 8], [n % 8], notice)) for n, notice in enumerate(notices)
    ]
    ended, heard = run_until(writer, reader, 40, 40)
    assert sorted(one.ticket for one in ended) == sorted(tickets)
    assert {one.error for one in ended} == {None}
    assert sorted(one.payload for one in heard) == sorted(notices)
    assert writer.poll_finished() == [] and reader.poll_notifications() == []


def test_an_entry_outside_the_targets_pool_fails_that_write_alone(make: MakeTransport) -> None:
    shape = geometry()
    writer = make(random_pools(shape, blocks=8, rows=1), "p")
    theirs = canary_pools(shape, blocks=8, rows=1)
    reader = make(theirs, "d")
    pair(writer, "p", reader, "d")
    past = hidden_entry(reader.pool, 0) + 1
    bad = writer.write(Write("d", [0], [past], b"bad"))
    good = writer.write(Write("d", [1], [1], b"good"))
    ended, heard = run_until(writer, reader, 2, 1)
    errors = {one.ticket: one.error for one in ended}
    assert errors[bad] and errors[good] is None
    assert [one.payload for one in heard] == [b"good"]


def test_a_source_that_is_removed_leaves_the_others_writing(make: MakeTransport) -> None:
    shape = geometry()
    mine, theirs = random_pools(shape, blocks=4, rows=1), canary_pools(shape, blocks=4, rows=1)
    first, second, reader = make(mine, "p1"), make(mine, "p2"), make(theirs, "d")
    pair(first, "p1", reader, "d")
    pair(second, "p2", reader, "d")
    first.write(Write("d", [0], [0], b"one"))
    run_until(first, reader, 1, 1)
    reader.remove_source("p1")
    second.write(Write("d", [1], [2], b"two"))
    _, heard = run_until(second, reader, 1, 1)
    assert heard == [Notification("p2", "p2", b"two")]
    assert block_bytes(theirs, 2) == block_bytes(mine, 1)


def test_one_writer_serves_two_targets_and_goes_on_when_one_is_removed(make: MakeTransport) -> None:
    shape = geometry()
    writer = make(random_pools(shape, blocks=4, rows=1), "p")
    left, right = (canary_pools(shape, blocks=4, rows=1) for _ in range(2))
    one, two = make(left, "d1"), make(right, "d2")
    pair(writer, "p", one, "d1")
    pair(writer, "p", two, "d2")
    writer.write(Write("d1", [0], [0], b"x"))
    run_until(writer, one, 1, 1)
    writer.remove_target("d1")
    writer.write(Write("d2", [1], [1], b"y"))
    _, heard = run_until(writer, two, 1, 1)
    assert [told.payload for told in heard] == [b"y"]


def test_metadata_that_is_damaged_or_anothers_is_refused(make: MakeTransport) -> None:
    shape = geometry()
    writer = make(random_pools(shape, blocks=4, rows=1), "p")
    reader = make(canary_pools(shape, blocks=4, rows=1), "d")
    with pytest.raises(ProtocolError, match="p"):
        reader.add_source("p", b"no metadata at all")
    with pytest.raises(ProtocolError, match="metadata of"):
        reader.add_source("somebody", writer.agent_metadata())
    with pytest.raises(ProtocolError, match="metadata"):
        writer.add_target("d", b"no metadata at all", reader.pool)
    metadata = reader.add_source("p", writer.agent_metadata())
    for paired in (False, True):  # another's metadata opens nothing and closes nothing
        with pytest.raises(ProtocolError, match="fit"):
            writer.add_target("e", metadata, reader.pool)
        if not paired:
            writer.add_target("d", metadata, reader.pool)
    writer.write(Write("d", [1], [1], b"x"))
    run_until(writer, reader, 1, 1)


def test_a_pool_description_larger_than_what_was_registered_is_refused(
    make: MakeTransport,
) -> None:
    shape = geometry()
    writer = make(random_pools(shape, blocks=4, rows=1), "p")
    big = canary_pools(shape, blocks=8, rows=1)
    small = Pools(big.kv[:4], big.hidden, shape)
    reader = make(small, "d")
    metadata = reader.add_source("p", writer.agent_metadata())
    with pytest.raises(ProtocolError, match="fit"):
        writer.add_target("d", metadata, describe(big.kv, big.hidden, shape))


@pytest.mark.parametrize("payload", [b"", b"x" * 19, b"x" * 21])
def test_bytes_of_another_length_are_no_notice(payload: bytes) -> None:
    assert unpack_notice(payload) is None


def test_a_notice_survives_its_bytes() -> None:
    assert unpack_notice(pack_notice(NOTICE)) == NOTICE


@pytest.mark.skipif(os.environ.get("UCX_TLS") == "tcp", reason="this is that run")
def test_the_same_holds_for_nixl_over_tcp() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-k", "[nixl", str(Path(__file__))]
    environment = {**os.environ, "UCX_TLS": "tcp"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr
