"""Single links between hosts are cut and mended: real processes in network namespaces, over TCP.

One prefill worker, two decode workers, a cable for each pair and from each to the coordinator.
After each cut every request ends with the tokens of an undisturbed run, and nothing stays held.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import ExitParams, RequestId, SamplingParams

from .hosts import Cluster, cluster
from .namespaces import Refused
from .service import eventually

pytestmark = pytest.mark.system

EVERYWHERE = ("--num-blocks", "512", "--chunk-tokens", "64", "--transfer-timeout-s", "3")
SERVICE = ("--heartbeat-s", "0.2", "--heartbeat-timeout-s", "3")
DECODE = ("d", "d2")
SLOW = 0.1  # MB/s: a prompt of 300 tokens takes 6 s
DEADLINE_S = 60.0
HEALED_S = 60.0
LONG_CUT_S = 75.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    try:
        with cluster(DECODE, EVERYWHERE, SERVICE) as running:
            yield running
    except Refused as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def links_are_mended(hosts: Cluster) -> Iterator[None]:
    yield
    for link in hosts.network.links.values():
        link.mend()
        link.fast()


@dataclass
class Asked:
    """Requests of one client, and what came of each."""

    client: Client
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)

    def ask(
        self,
        name: str,
        *,
        prompt: int,
        max_tokens: int,
        start: int = 3,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.tokens[name] = []
        self.client.submit(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=tuple(start + (7 * i) % 500 for i in range(prompt)),
                sampling=SamplingParams(
                    max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True
                ),
                exit=ExitParams(exit_threshold=0.6, min_loops=1),
                deadline_s=deadline_s,
            )
        )

    def hear(self, timeout_s: float) -> None:
        for delta in self.client.outputs(timeout_s=timeout_s):
            name = str(delta.request_id)
            assert delta.start_index == len(self.tokens[name]), delta
            self.tokens[name] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[name] = delta

    def all_right(self, expected: dict[str, list[int]]) -> None:
        """Wait until every request has ended; each with these tokens."""
        limit_s = time.monotonic() + DEADLINE_S + 5
        while len(self.ended) < len(self.tokens):
            assert time.monotonic() < limit_s, f"not ended: {set(self.tokens) - set(self.ended)}"
            self.hear(1.0)
        assert {name: delta.error for name, delta in self.ended.items() if delta.error} == {}
        assert self.tokens == {name: expected[name] for name in self.tokens}


@pytest.fixture(scope="module")
def expected(hosts: Cluster) -> dict[str, list[int]]:
    """What the requests of these tests answer while nothing is cut."""
    with hosts.client() as client:
        asked = Asked(client)
        ask_all(asked)
        limit_s = time.monotonic() + DEADLINE_S
        while len(asked.ended) < len(asked.tokens):
            assert time.monotonic() < limit_s, hosts.log()
            asked.hear(1.0)
        assert [delta.error for delta in asked.ended.values() if delta.error] == []
        eventually(lambda: hosts.at_rest(client), lambda: f"held: {hosts.held}")
    return asked.tokens


def ask_long_prompt(asked: Asked) -> None:
    asked.ask("long prompt", prompt=300, max_tokens=6)


def ask_long_answer(asked: Asked) -> None:
    asked.ask("long answer", prompt=20, max_tokens=400)


def ask_small(asked: Asked) -> None:
    for number in range(4):
        asked.ask(f"small {number}", prompt=30 + number, max_tokens=5, start=9 + number)


def ask_all(asked: Asked) -> None:
    ask_long_prompt(asked)
    ask_long_answer(asked)
    ask_small(asked)


def counter(client: Client, name: str) -> float:
    statistics: Any = client.statistics()
    return float(statistics.get(name, 0))


def healed(hosts: Cluster, client: Client) -> None:
    """Every worker and pair is back, and nothing is held or quarantined any more."""
    eventually(lambda: hosts.whole(client), hosts.log, HEALED_S)
    eventually(lambda: hosts.at_rest(client), lambda: f"{hosts.held}\n{hosts.log()}", HEALED_S)


def chosen(hosts: Cluster, client: Client) -> str:
    """The decode worker that holds something."""

    def holding() -> list[str]:
        workers = hosts.workers(client)
        return [d for d in DECODE if workers[d]["blocks_free"] < workers[d]["blocks_total"]]

    eventually(lambda: len(holding()) == 1, hosts.log)
    return holding()[0]


def test_requests_are_served_across_hosts(hosts: Cluster, expected: dict[str, list[int]]) -> None:
    with hosts.client() as client:
        asked = Asked(client)
        ask_all(asked)
        asked.all_right(expected)
        eventually(lambda: hosts.at_rest(client), lambda: f"held: {hosts.held}")


def test_a_handoff_whose_link_is_cut_goes_to_the_other_pair_and_the_link_heals(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    links = [hosts.network.link("p", d) for d in DECODE]
    for link in links:
        link.slow(SLOW)
    with hosts.client() as client:
        retries = counter(client, "retries")
        asked = Asked(client)
        ask_long_prompt(asked)
        eventually(lambda: hosts.workers(client)["p"]["handles_in_flight"] > 0, hosts.log)
        cut = hosts.network.link("p", chosen(hosts, client))
        cut.cut()
        for link in links:
            link.fast()
        ask_small(asked)
        asked.all_right(expected)
        assert counter(client, "retries") > retries
        cut.mend()
        healed(hosts, client)
        after = Asked(client)
        ask_small(after)
        after.all_right(expected)


def test_a_request_that_decodes_needs_no_link_to_its_prefill_worker(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    with hosts.client() as client:
        retries = counter(client, "retries")
        asked = decoding(client)
        link = hosts.network.link("p", chosen(hosts, client))
        link.cut()
        asked.all_right(expected)
        assert counter(client, "retries") == retries
        link.mend()
        healed(hosts, client)


def decoding(client: Client) -> Asked:
    """A long answer that has begun."""
    asked = Asked(client)
    ask_long_answer(asked)
    while not asked.tokens["long answer"]:
        asked.hear(0.05)
    return asked


@pytest.mark.soak
def test_a_link_that_was_cut_until_every_connection_was_given_up_heals(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    """UCX looks after its connections every 20 s."""
    with hosts.client() as client:
        links = [hosts.network.link("p", d) for d in DECODE]
        for link in links:
            link.slow(SLOW)
        asked = Asked(client)
        ask_long_prompt(asked)
        eventually(lambda: hosts.workers(client)["p"]["handles_in_flight"] > 0, hosts.log)
        name = chosen(hosts, client)
        cut = hosts.network.link("p", name)
        cut.cut()
        for link in links:
            link.fast()
        asked.all_right(expected)
        time.sleep(LONG_CUT_S)
        assert hosts.workers(client)[name]["blocks_quarantined"] > 0, hosts.log()
        cut.mend()
        healed(hosts, client)
        after = Asked(client)
        ask_all(after)
        after.all_right(expected)


@pytest.mark.soak
def test_what_comes_while_a_pair_is_cut_is_served_by_the_other(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    with hosts.client() as client:
        for name in DECODE:
            link = hosts.network.link("p", name)
            link.cut()
            for _ in range(3):
                asked = Asked(client)
                ask_all(asked)
                asked.all_right(expected)
            link.mend()
            healed(hosts, client)


@pytest.mark.soak
def test_an_answer_goes_on_elsewhere_when_its_decode_worker_cannot_reach_the_coordinator(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    with hosts.client() as client:
        replays = counter(client, "replays")
        asked = decoding(client)
        link = hosts.network.link("c", chosen(hosts, client))
        link.cut()
        ask_small(asked)
        asked.all_right(expected)
        assert counter(client, "replays") > replays
        link.mend()
        healed(hosts, client)
        after = Asked(client)
        ask_all(after)
        after.all_right(expected)


@pytest.mark.soak
def test_a_handoff_goes_elsewhere_when_its_decode_worker_cannot_reach_the_coordinator(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    links = [hosts.network.link("p", d) for d in DECODE]
    for link in links:
        link.slow(SLOW)
    with hosts.client() as client:
        asked = Asked(client)
        ask_long_prompt(asked)
        eventually(lambda: hosts.workers(client)["p"]["handles_in_flight"] > 0, hosts.log)
        cut = hosts.network.link("c", chosen(hosts, client))
        cut.cut()
        for link in links:
            link.fast()
        asked.all_right(expected)
        cut.mend()
        healed(hosts, client)


@pytest.mark.soak
def test_requests_wait_for_the_only_prefill_worker_that_cannot_be_reached(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    """It is expelled; when the link is mended its supervisor hears so and starts another."""
    with hosts.client() as client:
        incarnation = hosts.workers(client)["p"]["incarnation"]
        asked = decoding(client)
        ask_long_prompt(asked)
        link = hosts.network.link("c", "p")
        link.cut()
        ask_small(asked)
        eventually(lambda: "p" not in hosts.workers(client), hosts.log)
        link.mend()
        asked.all_right(expected)
        healed(hosts, client)
        assert hosts.workers(client)["p"]["incarnation"] != incarnation


@pytest.mark.soak
def test_requests_wait_while_every_pair_is_cut_and_end_by_their_deadline_or_right(
    hosts: Cluster, expected: dict[str, list[int]]
) -> None:
    links = [hosts.network.link("p", d) for d in DECODE]
    for link in links:
        link.slow(SLOW)
    with hosts.client() as client:
        hurried, patient = Asked(client), Asked(client)
        ask_long_prompt(patient)
        eventually(lambda: hosts.workers(client)["p"]["handles_in_flight"] > 0, hosts.log)
        for link in links:
            link.cut()
            link.fast()
        hurried.ask("hurried", prompt=20, max_tokens=4, deadline_s=6.0)
        asked_s = time.monotonic()
        patient.tokens |= hurried.tokens
        while "hurried" not in patient.ended:
            patient.hear(0.5)
            assert time.monotonic() < asked_s + 8.0, hosts.log()
        named = ("deadline_exceeded", "no_decode_worker")
        assert patient.ended.pop("hurried").error_code in named
        del patient.tokens["hurried"]
        for link in links:
            link.mend()
        patient.all_right(expected)
        healed(hosts, client)
