"""Metrics: every figure told is one of what was done, and the text is what Prometheus reads."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rlt.coordinator.client import Client
from rlt.coordinator.metrics.exposition import Metrics
from rlt.coordinator.metrics.families import WORKER_COUNTERS, WORKER_GAUGES
from rlt.coordinator.metrics.watching import Watch
from rlt.coordinator.now import Now
from rlt.launch.cli import EMBEDDED_MODEL
from rlt.runtime.errors import error_codes

from ..coordinator.running import Running, running
from ..coordinator.workers import DEPTHS, expected_depths
from ..coordinator.world import World
from ..project.test_imports import ROOT
from .real_service import SMALL, serving


def samples(text: bytes) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation, family.name
        yield from family.samples


def values(text: bytes) -> dict[str, float]:
    """Each sample by its name and labels, as a reader of the page would look it up."""
    return {
        s.name + "".join(f" {name}={value}" for name, value in sorted(s.labels.items())): s.value
        for s in samples(text)
    }


def scrape(service: Running) -> dict[str, float]:
    return values(service.call(lambda: service.service.metrics.text())[0])


def scrape_http(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics") as answer:
        return values(answer.read())


def wait_for(url: str, wanted: dict[str, float]) -> dict[str, float]:
    """Workers' figures come with their heartbeats."""
    deadline = time.monotonic() + 15.0
    while True:
        now = scrape_http(url)
        if all(now[name] == value for name, value in wanted.items()):
            return now
        assert time.monotonic() < deadline, {name: now[name] for name in wanted}
        time.sleep(0.05)


def watched_world() -> tuple[World, Metrics]:
    metrics = Metrics()
    world = World(observer=metrics.watch)
    metrics.read(lambda: world.state.snapshot(world.now))
    return world, metrics


def test_the_figures_of_a_service_are_what_was_asked_of_it() -> None:
    with running() as service, Client(service.endpoint) as client:
        before = scrape(service)
        for max_tokens in (3, 5):
            client.generate([7, 8, 9], max_tokens=max_tokens, ignore_eos=True)
        service.eventually(lambda: service.service.state.idle)
        after = scrape(service)
    assert before["rlt_requests_total code= outcome=length"] == 0
    assert before["rlt_ready_pairs"] == 1
    assert after["rlt_requests_total code= outcome=length"] == 2
    assert after["rlt_accepted_requests_total"] == 2
    assert after["rlt_prompt_tokens_total"] == 6
    assert after["rlt_generated_tokens_total"] == 8
    assert after["rlt_attempts_total"] == 2
    assert after["rlt_retries_total"] == 0
    assert after["rlt_time_to_first_token_seconds_count"] == 2
    assert after["rlt_inter_token_latency_seconds_count"] == 6  # all but each first
    assert after["rlt_request_seconds_count"] == 2
    assert after["rlt_queue_seconds_count"] == 2
    depths = [*expected_depths(3), *expected_depths(5)]
    assert after["rlt_exit_depth_loops_sum"] == sum(depths)
    for depth in range(1, DEPTHS + 1):
        bucket = f"rlt_exit_depth_loops_bucket le={float(depth)}"
        assert after[bucket] == sum(seen <= depth for seen in depths)
    assert after["rlt_worker_kv_blocks role=decode worker=d0"] == 4096
    assert all(after[f"rlt_handoffs phase={name}"] == 0 for name in ("decoding", "cancelling"))


@pytest.mark.system
def test_a_scrape_of_a_real_service_tells_what_was_done_between_two() -> None:
    prompt, outputs = list(range(3, 153)), 20
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"] * config["total_ut_steps"]
    sent = len(prompt) * layers * 2 * config["num_key_value_heads"] * head_dim * 4
    with serving(*SMALL) as (endpoint, url), Client(endpoint) as client:
        before = scrape_http(url)
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(url + "/nothing-here")
        refused.value.close()
        results = [
            client.generate(
                prompt, max_tokens=outputs, exit_threshold=0.6, min_loops=1, ignore_eos=True
            )
            for _ in range(3)
        ]
        after = wait_for(
            url,
            {
                "rlt_worker_prefill_tokens_total role=prefill worker=prefill-0": 450,
                "rlt_worker_output_tokens_total role=decode worker=decode-0": 60,
                "rlt_worker_kv_blocks_free role=prefill worker=prefill-0": 2048,
                "rlt_worker_kv_blocks_free role=decode worker=decode-0": 2048,
            },
        )
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    depths = [depth for result in results for depth in result.exit_depths]
    assert grown["rlt_requests_total code= outcome=length"] == 3
    assert grown["rlt_http_responses_total status=404"] == 1
    assert grown["rlt_http_responses_total status=200"] > 0
    assert grown["rlt_prompt_tokens_total"] == 450
    assert grown["rlt_generated_tokens_total"] == len(depths) == 60
    assert grown["rlt_exit_depth_loops_sum"] == sum(depths)
    assert len(set(depths)) > 1, "no early exit: the histogram would prove nothing"
    assert grown["rlt_worker_prefill_tokens_total role=decode worker=decode-0"] == 0
    hidden = config["hidden_size"] * 4
    assert grown["rlt_transfer_bytes_sum"] == 3 * (sent + hidden)
    posted = "rlt_worker_transfer_sent_bytes_total role=prefill worker=prefill-0"
    assert grown[posted] == 3 * (sent + hidden)
    assert grown["rlt_transfer_seconds_count"] == grown["rlt_transfer_bytes_count"] == 3
    assert 0 < grown["rlt_compute_end_unsent_bytes_sum"] < 3 * sent
    assert 0 < after["rlt_transfer_seconds_sum"] < 60
    assert grown["rlt_inter_token_latency_seconds_count"] == 57
    assert after["rlt_decode_loops_before_activation_total"] == 0
    assert after["rlt_late_messages_total"] == after["rlt_malformed_frames_total"] == 0
    assert after["rlt_worker_quarantined_bytes role=decode worker=decode-0"] == 0


def test_handoffs_are_told_by_phase_while_they_go_on() -> None:
    world, metrics = watched_world()
    seen = []
    world.generate(max_tokens=2)
    for _ in range(20):
        now = values(metrics.text()[0])
        (phase,) = [
            name.removeprefix("rlt_handoffs phase=")
            for name, value in now.items()
            if name.startswith("rlt_handoffs") and value
        ] or ["none"]
        if not seen or seen[-1] != phase:
            seen.append(phase)
        world.deliver_all()
        world.work()
    assert seen[0] == "reserving" and seen[-1] == "none"
    assert "decoding" in seen


def test_every_ending_is_counted_once_under_its_own_name() -> None:
    world, metrics = watched_world()
    world.generate("cancelled")
    world.generate("late", deadline_s=1.0)
    world.generate("never", prompt=(5,) * 2000)
    world.cancel("cancelled")
    world.time_s += 2.0
    world.perform(world.state.tick(world.now))
    now = values(metrics.text()[0])
    assert now["rlt_requests_total code= outcome=cancelled"] == 1
    assert now["rlt_requests_total code=deadline_exceeded outcome=error"] == 1
    assert now["rlt_requests_total code=too_long outcome=rejected"] == 1
    assert now["rlt_request_seconds_count"] == 2
    assert now["rlt_time_to_first_token_seconds_count"] == 0


def test_a_worker_cannot_make_up_labels_or_metrics() -> None:
    world, metrics = watched_world()
    names = set(values(metrics.text()[0]))
    world.generate("odd")
    world.deliver_all()
    decode = world.named("d0")
    for number in range(50):
        world.state.counters[f"failed.made-up-{number}"] += 1
        world.state.counters[f"refused.made-up-{number}"] += 1
    beat = decode.heartbeat()
    beat.statistics.update({f"invented_{number}": 1.0 for number in range(50)})
    world.perform(world.state.handle_worker(decode.incarnation, beat, world.now))
    now = values(metrics.text()[0])
    assert now["rlt_requests_total code=other outcome=error"] == 50
    assert now["rlt_refused_attempts_total code=other"] == 50
    assert len(set(now) - names) < 20


def test_a_worker_that_is_gone_leaves_the_page() -> None:
    world, metrics = watched_world()
    assert "rlt_worker_slots role=prefill worker=p0" in values(metrics.text()[0])
    world.kill("p0-1")
    now = values(metrics.text()[0])
    assert not [name for name in now if "worker=p0" in name]
    assert now["rlt_workers role=prefill"] == 0 and now["rlt_ready_pairs"] == 0


def test_the_text_follows_the_conventions_in_both_formats() -> None:
    with running() as service, Client(service.endpoint) as client:
        client.generate([7, 8, 9], max_tokens=2, ignore_eos=True)
        plain, kind = service.call(lambda: service.service.metrics.text())
        modern, modern_kind = service.call(
            lambda: service.service.metrics.text("application/openmetrics-text")
        )
    assert kind.startswith("text/plain; version=0.0.4")
    assert modern_kind.startswith("application/openmetrics-text")
    families = [
        family
        for family in text_string_to_metric_families(plain.decode())
        if not family.name.endswith("_created")  # the client library's own, with each counter
    ]
    assert len({f.name for f in families}) == len(families), "a family stands twice"
    for family in families:
        assert family.name.startswith("rlt_")
        counter = family.type == "counter"
        assert all(s.name.endswith("_total") for s in family.samples if counter), family.name
        assert not (family.name.endswith(("_ms", "_us", "_kib", "_mb"))), family.name
        assert set().union(*(s.labels for s in family.samples)) <= {
            *("worker", "role", "outcome", "code", "phase", "status", "le")
        }
    assert {f.name for f in open_families(modern.decode())} == {f.name for f in families}


def test_two_services_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    world = World(observer=first.watch)
    world.generate()
    assert values(first.text()[0])["rlt_prompt_tokens_total"] == 3
    assert values(second.text()[0])["rlt_prompt_tokens_total"] == 0


def test_tokens_that_come_together_share_the_time() -> None:
    metrics = Metrics()
    watch: Watch = metrics.watch
    world = World()
    world.generate()
    (request,) = world.state._desk.live()
    request.last_output_s = 10.0
    watch.output(request, (2, 3), Now(10.5, 0.0))
    now = values(metrics.text()[0])
    assert now["rlt_inter_token_latency_seconds_count"] == 2
    assert now["rlt_inter_token_latency_seconds_sum"] == 0.5


def test_the_codes_are_those_of_the_errors() -> None:
    assert {"overloaded", "worker_lost", "no_decode_worker", "protocol"} <= error_codes()


def full_world() -> Metrics:
    """Every family has at least one sample."""
    world, metrics = watched_world()
    world.state.counters["refused.closed"] += 1
    world.state.counters["retries.worker_lost"] += 1
    beat = world.named("d0").heartbeat()
    beat.statistics.update({f.source: 0.0 for f in (*WORKER_GAUGES, *WORKER_COUNTERS)})
    world.perform(world.state.handle_worker("d0-1", beat, world.now))
    metrics.watch.answered(200)
    return metrics


def documented_rows() -> list[str]:
    """The table of metrics.md."""
    rows = []
    for family in text_string_to_metric_families(full_world().text()[0].decode()):
        if family.name.endswith("_created"):
            continue
        labels = sorted({label for s in family.samples for label in s.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(
            f"| `{name}` | {family.type} | {', '.join(labels) or '-'} | {family.documentation} |"
        )
    return sorted(rows, key=lambda row: (row.startswith("| `rlt_worker_"), row))


def test_metrics_md_has_the_row_of_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `rlt_")] == documented_rows()
