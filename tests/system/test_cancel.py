"""A cancel that meets its request in each phase, held there by a relay or a scripted transport.

Real processes and NIXL. After each: nothing more is sent, every process holds nothing, and the
request ID works again at once, also while late messages of the old generation still come in.
"""

from collections.abc import Iterator

import pytest

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from ..faults.faults import Faults, faulty
from .service import eventually

pytestmark = pytest.mark.system
ID = RequestId("the-request")


class Stage:
    """1P1D whose every message goes through a relay, with WRITEs that can be held."""

    def __init__(self, faults: Faults, client: Client) -> None:
        self.faults, self.client = faults, client

    def submit(self, *, prompt: int = 40, max_tokens: int = 8) -> None:
        self.client.submit(
            GenerateRequest(
                request_id=ID,
                prompt_token_ids=tuple(3 + i % 500 for i in range(prompt)),
                sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
            )
        )

    def cancel(self) -> None:
        """Cancel; everything after the cancel's own delta would be output after its answer."""
        self.client.cancel(ID)
        ends = [d for d in self.client.outputs(timeout_s=5.0) if d.finish_reason is not None]
        assert [d.finish_reason for d in ends] == [FinishReason.CANCELLED]
        assert self.client.active() == ()

    def finish(self) -> None:
        """The same ID again, to its end; nothing of the old one may show."""
        self.submit()
        tokens: list[int] = []
        while True:
            deltas = self.client.outputs(timeout_s=20.0)
            assert deltas, "no output"
            for delta in deltas:
                assert delta.error is None, delta
                assert delta.start_index == len(tokens)
                tokens += delta.token_ids
            if deltas[-1].finish_reason is not None:
                break
        assert len(tokens) == 8
        assert self.client.outputs(timeout_s=0.2) == []

    def rest(self) -> None:
        self.faults.at_rest(self.client)
        assert self.faults.canary_hits(self.client) == 0

    def prefill_phase(self) -> str:
        values = self.faults.service.workers(self.client)["prefill-0"]
        return next((k for k, v in values.items() if k.startswith("phase_") and v), "")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with faulty(engine={"chunk_tokens": 1}) as faults, faults.client() as client:
        yield Stage(faults, client)


def test_waiting(stage: Stage) -> None:
    """In the coordinator's own queue, because D's receive slots are promised to others."""
    others = [
        GenerateRequest(
            request_id=RequestId(f"other-{number}"),
            prompt_token_ids=(5, 6, 7),
            sampling=SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        )
        for number in range(64)
    ]
    held = stage.faults.hold("reserved")
    for other in others:
        stage.client.submit(other)
    stage.submit()
    assert stage.client.statistics()["queue_length"] == 1
    stage.client.cancel(ID)
    [delta] = stage.client.outputs(timeout_s=5.0)
    assert (delta.request_id, delta.finish_reason) == (ID, FinishReason.CANCELLED)
    stage.faults.release(held)
    unfinished = {other.request_id for other in others}
    while unfinished:
        for delta in stage.client.outputs(timeout_s=20.0):
            assert delta.request_id != ID and delta.error is None
            if delta.finish_reason is not None:
                unfinished.remove(delta.request_id)
    stage.finish()
    stage.rest()


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("reserving", "reserve"),
        ("reserving, answered", "reserved"),
        ("starting", "prefill"),
        ("starting, answered", "prefill_accepted"),
        ("committed", "commit"),
        ("received", "received"),
        ("acknowledged", "ack"),
        ("activating", "activated"),
        ("decoding, output on its way", "output"),
    ],
)
def test_while_a_message_is_on_its_way(stage: Stage, phase: str, kind: str) -> None:
    held = stage.faults.hold(kind)
    stage.submit()
    held.wait()
    stage.cancel()
    stage.faults.release(held)
    stage.finish()
    stage.rest()


def test_computing(stage: Stage) -> None:
    stage.submit(prompt=450)
    eventually(lambda: stage.prefill_phase() == "phase_prefilling", "P computes")
    stage.cancel()
    stage.finish()
    stage.rest()


def test_sending(stage: Stage) -> None:
    """WRITEs are posted and their handles not terminal: P may not let go before they are."""
    stage.faults.order("prefill-0", {"at": "post", "do": "hold"})
    stage.submit()
    eventually(lambda: stage.prefill_phase() == "phase_sending", "P sends")
    stage.cancel()
    eventually(
        lambda: stage.faults.service.workers(stage.client)["prefill-0"]["leases_send"] == 1,
        "the lease stays while a handle runs",
    )
    stage.faults.order("prefill-0")
    stage.finish()
    stage.rest()


def test_active(stage: Stage) -> None:
    stage.submit(max_tokens=400)
    first = stage.client.outputs(timeout_s=20.0)
    assert first and first[0].token_ids
    stage.client.cancel(ID)
    late = stage.client.outputs(timeout_s=1.0)
    assert late[-1].finish_reason is FinishReason.CANCELLED
    assert stage.client.outputs(timeout_s=0.5) == []
    stage.finish()
    stage.rest()


def test_leaving_a_stream_early_cancels(stage: Stage) -> None:
    stream = stage.client.generate(
        [5, 6, 7], stream=True, max_tokens=400, ignore_eos=True, request_id=ID
    )
    for delta in stream:
        if delta.token_ids:
            break
    stream.close()
    stage.finish()
    stage.rest()
