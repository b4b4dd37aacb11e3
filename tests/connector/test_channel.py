"""ZeroMQ sockets on the loop: what a flood at one of them leaves for everybody else."""

import asyncio
import logging
import tempfile
import time

import pytest
import zmq

from rlt.connector.channel import SLICE_S, RouterChannel
from rlt.connector.codec import encode
from rlt.connector.messages import AskStatistics, ClientToCoordinator, CoordinatorToClient

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
