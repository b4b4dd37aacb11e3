"""The harness over a real service: what is held stays held, what is let go goes on, and rightly."""

from collections.abc import Iterator
from typing import Any

import pytest

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import RequestId, SamplingParams

from ..system.requests import sixty_four
from ..system.service import eventually
from .answers import answers, local_answers
from .faults import Faults, faulty
from .rules import Rule, Schedule

pytestmark = pytest.mark.system
REQUESTS = sixty_four()[:24]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return local_answers(REQUESTS)


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with faulty() as faults:
        yield faults


@pytest.fixture
def client(faults: Faults) -> Iterator[Client]:
    with faults.client() as client:
        yield client
        faults.order("prefill-0")
        faults.order("decode-0")
        faults.use(None)
        faults.at_rest(client)
        assert faults.canary_hits(client) == 0


def ask(client: Client, number: int) -> str:
    name = RequestId(f"held-{number}")
    prompt = tuple(3 + i % 500 for i in range(40))
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    client.submit(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    return name


def finish(client: Client, name: str) -> int:
    tokens = 0
    while True:
        deltas = client.outputs(timeout_s=20.0)
        assert deltas, "nothing came"
        for delta in deltas:
            assert delta.error is None, delta
            assert (delta.request_id, delta.start_index) == (name, tokens)
            tokens += len(delta.token_ids)
        if deltas[-1].finish_reason is not None:
            return tokens


@pytest.mark.parametrize(
    ("worker", "order", "kind"),
    [
        ("prefill-0", {"at": "post", "do": "hold"}, "prefill_complete"),
        ("decode-0", {"at": "notice", "do": "hold"}, "commit"),
        ("prefill-0", {"at": "compute", "do": "hold", "stage": "prefill"}, "prefill_accepted"),
        ("decode-0", {"at": "compute", "do": "hold", "stage": "coda"}, "activated"),
    ],
)
def test_what_is_held_is_let_go_and_the_request_ends_as_ever(
    faults: Faults, client: Client, worker: str, order: dict[str, Any], kind: str
) -> None:
    """kind: the last message that comes while it is held."""
    before = len(faults.events(worker))
    last = faults.add(Rule("delay", kind))
    faults.order(worker, order)
    name = ask(client, 1)
    last.wait()
    assert client.outputs(timeout_s=0.5) == [] and client.active() == (name,)
    if order["at"] == "post":
        assert len(faults.events(worker)) == before, "a held WRITE was posted"
    faults.order(worker)
    assert finish(client, name) == 6
    faults.release(last)


def test_ends_that_are_held_keep_p_s_blocks_while_the_request_is_answered(
    faults: Faults, client: Client
) -> None:
    faults.order("prefill-0", {"at": "finish", "do": "hold"})
    assert finish(client, ask(client, 1)) == 6
    names = ("leases_send", "handles_in_flight")

    def held() -> tuple[float, ...]:
        values = faults.service.workers(client)["prefill-0"]
        return tuple(values[name] for name in names)

    eventually(lambda: held() == (1, 5), lambda: f"a lease and five handles: {held()}")


def test_a_write_that_fails_fails_its_attempt_alone(faults: Faults, client: Client) -> None:
    faults.order("prefill-0", {"at": "finish", "do": "fail", "sequence": 1, "count": 1})
    assert finish(client, ask(client, 1)) == 6
    assert faults.service.workers(client)["prefill-0"]["writes_failed"] >= 1


def test_writes_that_end_in_another_order_change_no_answer(
    faults: Faults, client: Client, expected: dict[str, Any]
) -> None:
    delay = {"do": "delay", "delay_s": 0.1, "seed": faults.seed}
    faults.order("prefill-0", {"at": "finish", **delay}, {"at": "post", **delay})
    faults.order("decode-0", {"at": "notice", **delay})
    began = len(faults.events("prefill-0"))
    assert answers(client, REQUESTS) == expected
    ends = [e for e in faults.events("prefill-0")[began:] if e["event"] == "posted"]
    order = [(e["generation"], e["sequence"]) for e in ends]
    assert order != sorted(order), "the WRITEs were not reordered"


def test_copies_and_delays_of_every_message_change_no_answer(
    faults: Faults, client: Client, expected: dict[str, Any]
) -> None:
    faults.use(Schedule(faults.seed, copy=0.3, delay=0.3, delay_s=0.05))
    assert answers(client, REQUESTS) == expected


def test_a_stopped_worker_goes_on_when_it_is_woken(faults: Faults, client: Client) -> None:
    faults.stop("decode-0")
    name = ask(client, 2)
    assert client.outputs(timeout_s=0.5) == []
    faults.go_on("decode-0")
    assert finish(client, name) == 6


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_a_killed_worker_is_started_again_and_serves(
    faults: Faults, client: Client, worker: str
) -> None:
    before = faults.incarnation(worker)
    faults.kill(worker)
    faults.back(client, worker, before, pairs=1)
    assert finish(client, ask(client, 3)) == 6


def test_the_story_says_what_was_done_and_how_to_run_it_again(faults: Faults) -> None:
    story = faults.story()
    assert "SIGKILL to decode-0" in story and "schedule Schedule(seed=0, copy=0.3" in story
    assert "RLT_FAULT_SEED=0 " in story and "test_faults.py::test_the_story" in story
