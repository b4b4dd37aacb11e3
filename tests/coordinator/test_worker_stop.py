"""When a worker that was told to stop counts as stopped."""

import asyncio
import os

import pytest

from rlt.connector.channel import SendResult
from rlt.coordinator.registry import Worker
from rlt.coordinator.worker_stop import stop_workers
from rlt.runtime.interfaces import AdmissionLimits

LIMITS = AdmissionLimits(num_blocks=8, num_slots=1, num_receive_slots=1, max_positions=8)


@pytest.mark.parametrize(
    ("sent", "reaped", "stopped"),
    [
        (SendResult.SENT, False, False),
        (SendResult.SENT, True, True),  # a connection may outlive the process, behind a proxy
        (SendResult.GONE, False, False),  # its process runs: it is ours
        (SendResult.GONE, True, True),
    ],
)
def test_a_worker_has_stopped_when_it_is_reaped_whatever_its_connection_says(
    sent: SendResult, reaped: bool, stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(
        name="p",
        incarnation="p-1",
        role="prefill",
        pid=os.getpid(),
        endpoint="",
        limits=LIMITS,
        heard_s=0.0,
        epoch=1,
    )
    asyncio.run(
        stop_workers(
            [worker],
            lambda *_: sent,
            reaped=lambda _: reaped,
            local=True,
            bound_s=0.1,
        )
    )
    assert ("has not stopped" not in caplog.text) is stopped
