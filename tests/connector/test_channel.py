"""ZeroMQ sockets on the loop: what a flood at one of them leaves for everybody else."""

import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import pytest
import zmq

from rlt.connector.channel import SLICE_S, DealerChannel, RouterChannel
from rlt.connector.codec import MAX_FRAME_BYTES, encode
from rlt.connector.connection_watch import GIVEN_UP_S
from rlt.connector.messages import (
    Alive,
    AskStatistics,
    CancelDone,
    ClientToCoordinator,
    CoordinatorToClient,
)
from rlt.runtime.types import RequestId

Channel = RouterChannel[ClientToCoordinator, CoordinatorToClient]


def test_messages_that_take_long_do_not_keep_the_loop_from_its_other_work() -> None:
    """A handler of 5 ms times a full batch would be more than a second without a heartbeat."""
    handled, gaps = 0, []

    def handle(_: bytes, __: ClientToCoordinator) -> None:
        nonlocal handled
        handled += 1
        time.sleep(0.005)

    async def run(endpoint: str) -> None:
        channel: Channel = RouterChannel(ClientToCoordinator, handle)
        channel.bind(endpoint)
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.connect(endpoint)
            for number in range(100):
                sender.send(encode(AskStatistics(ask=number)))
            last_s = time.monotonic()
            while handled < 100:
                await asyncio.sleep(0)
                gaps.append(time.monotonic() - last_s)
                last_s = time.monotonic()
        channel.close()

    with tempfile.TemporaryDirectory(prefix="rlt-ch") as folder:
        asyncio.run(run(f"ipc://{folder}/s"))
    assert sum(gap > SLICE_S / 2 for gap in gaps) > 10, "it was not interrupted"


def test_a_flood_of_malformed_frames_is_counted_and_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(endpoint: str) -> int:
        channel: Channel = RouterChannel(ClientToCoordinator, lambda _, __: None)
        channel.bind(endpoint)
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.connect(endpoint)
            for _ in range(1000):
                sender.send(b"\xc1")
            async with asyncio.timeout(10):
                while channel.malformed < 1000:
                    await asyncio.sleep(0.001)
        channel.close()
        return channel.malformed

    with tempfile.TemporaryDirectory(prefix="rlt-ch") as folder, caplog.at_level(logging.WARNING):
        assert asyncio.run(run(f"ipc://{folder}/s")) == 1000
    assert 1 <= len(caplog.records) <= 10
    assert "512 so far" in caplog.records[-1].message


LISTENER = """
import asyncio, resource, sys
from rlt.connector.channel import RouterChannel
from rlt.connector.messages import ClientToCoordinator

async def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    peers, all_here = set(), asyncio.Event()
    def hear(peer, message):
        peers.add(peer)
        if len(peers) == 200:
            all_here.set()
    channel = RouterChannel(ClientToCoordinator, hear)
    print(channel.bind(sys.argv[1]), flush=True)
    await asyncio.wait_for(all_here.wait(), 20)
    channel.close()

asyncio.run(main())
"""


def test_more_peers_than_the_usual_number_of_descriptors_do_not_end_the_listener() -> None:
    with tempfile.TemporaryDirectory(prefix="rlt-ch") as folder, ExitStack() as stack:
        listener = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-c", LISTENER, f"ipc://{folder}/s"],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert listener.stdout is not None
        endpoint = listener.stdout.readline().strip()
        context = stack.enter_context(zmq.Context())
        for number in range(200):
            sender = stack.enter_context(context.socket(zmq.DEALER))
            sender.set(zmq.LINGER, 0)
            sender.connect(endpoint)
            sender.send(encode(AskStatistics(ask=number)))
        assert listener.wait(30) == 0


class Dialler:
    """A DealerChannel, and somebody at the other end whom a test plays."""

    def __init__(self, endpoint: str) -> None:
        self.heard: asyncio.Queue[CoordinatorToClient] = asyncio.Queue()
        self.changes: list[bool] = []
        self.channel: DealerChannel[CoordinatorToClient, ClientToCoordinator] = DealerChannel(
            CoordinatorToClient,
            self.heard.put_nowait,
            identity=b"dialler",
            on_change=self.changes.append,
        )
        self.channel.connect(endpoint)

    async def reaches(self, listener: "zmq.Socket[bytes]", ask: int) -> None:
        """Both ways; what is lost with a broken connection is said again."""
        async with asyncio.timeout(10):
            while True:
                self.channel.send(AskStatistics(ask=ask))
                if await asyncio.to_thread(listener.poll, 100):
                    break
        assert listener.recv_multipart() == [b"dialler", encode(AskStatistics(ask=ask))]
        answer = CancelDone(request_id=RequestId(str(ask)))
        listener.send_multipart([b"dialler", encode(answer)])
        async with asyncio.timeout(10):
            assert await self.heard.get() == answer


def listening(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    listener = context.socket(zmq.ROUTER)
    listener.set(zmq.ROUTER_HANDOVER, 1)
    listener.bind(endpoint)
    return listener


def test_who_was_sent_an_oversized_frame_dials_again(caplog: pytest.LogCaptureFixture) -> None:
    """libzmq alone would leave the dialler deaf and dumb for ever."""

    async def run(endpoint: str) -> list[bool]:
        with zmq.Context() as context, listening(context, endpoint) as listener:
            dialler = Dialler(endpoint)
            for ask in range(3):
                await dialler.reaches(listener, ask)
                listener.send_multipart([b"dialler", bytes(MAX_FRAME_BYTES + 1)])
                async with asyncio.timeout(10):
                    while dialler.changes.count(False) <= ask:
                        await asyncio.sleep(0.01)
            await dialler.reaches(listener, 3)
            dialler.channel.close()
            return dialler.changes

    with tempfile.TemporaryDirectory(prefix="rlt-ch") as folder:
        assert asyncio.run(run(f"ipc://{folder}/s")) == [True, False] * 3 + [True]
    assert caplog.text.count("was broken by what came from it") == 3


def test_what_was_said_to_a_listener_that_is_away_reaches_it_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(endpoint: str) -> None:
        with zmq.Context() as context:
            with listening(context, endpoint) as listener:
                dialler = Dialler(endpoint)
                await dialler.reaches(listener, 1)
                listener.send_multipart([b"dialler", encode(Alive())])
                async with asyncio.timeout(10):
                    assert await dialler.heard.get() == Alive()
            async with asyncio.timeout(10):
                while dialler.changes != [True, False]:
                    await asyncio.sleep(0.01)
            dialler.channel.send(AskStatistics(ask=2))
            await asyncio.sleep(2 * GIVEN_UP_S)
            with listening(context, endpoint) as listener:
                assert await asyncio.to_thread(listener.poll, 10_000)
                assert listener.recv_multipart()[1] == encode(AskStatistics(ask=2))
            dialler.channel.close()

    with tempfile.TemporaryDirectory(prefix="rlt-ch") as folder:
        asyncio.run(run(f"ipc://{folder}/s"))
    assert "was broken by what came from it" not in caplog.text
