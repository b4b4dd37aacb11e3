"""Metrics read off the state when somebody asks for them: they cost nothing until then.

A collector of the Prometheus client. Counters of a worker are its own since its start; they leave
with the worker. Labels: outcomes, error codes, stages, roles and worker names, nothing of callers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..snapshot import Snapshot, WorkerView
from .families import (
    SERVICE_COUNTERS,
    SERVICE_GAUGES,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    Figure,
    bounded_code,
)

ByWorker = Callable[[WorkerView], float | None]
REFUSED = "Attempts that a worker refused, by reason; the request is tried elsewhere if it can be."
RETRIED = "Attempts that failed or left a draining worker, followed by another one; by reason."
WORKER_LABELS = ("worker", "role")


class StateReading(Collector):
    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self._look = look

    def describe(self) -> Iterable[Metric]:
        return ()  # what there is shows when the state is read; it need not be there yet

    def collect(self) -> Iterator[Metric]:
        seen = self._look()
        yield from _service(seen)
        yield _requests(seen.counters)
        yield _by_code(seen.counters, "refused", "rlt_refused_attempts", REFUSED)
        yield _by_code(seen.counters, "retries", "rlt_retried_attempts", RETRIED)
        yield _handoffs(seen)
        yield _workers_here(seen.workers)
        yield from _of_workers(seen)


def _service(seen: Snapshot) -> Iterator[Metric]:
    for figure in SERVICE_GAUGES:
        yield GaugeMetricFamily(figure.name, figure.help, seen.counters.get(figure.source, 0.0))
    for figure in SERVICE_COUNTERS:
        yield CounterMetricFamily(figure.name, figure.help, seen.counters.get(figure.source, 0.0))


def _requests(counters: dict[str, float]) -> Metric:
    """Endings as the desk counts them: ended.REASON, failed.CODE and rejected.CODE."""
    totals: Counter[tuple[str, ...]] = Counter({(r, ""): 0 for r in ("stop", "length")})
    for name, count in counters.items():
        kind, _, what = name.partition(".")
        match kind:
            case "ended":
                totals[what, ""] += int(count)
            case "failed":
                totals["error", bounded_code(what)] += int(count)
            case "rejected":
                totals["rejected", bounded_code(what)] += int(count)
    help = "Requests by how they ended: stop, length, cancelled, error, rejected; errors by code."
    family = CounterMetricFamily("rlt_requests", help, labels=("outcome", "code"))
    return _filled(family, totals)


def _by_code(counters: dict[str, float], kind: str, name: str, help: str) -> Metric:
    """The counters KIND.CODE."""
    totals: Counter[tuple[str, ...]] = Counter()
    for counter, count in counters.items():
        of, _, code = counter.partition(".")
        if of == kind and code:
            totals[bounded_code(code),] += int(count)
    return _filled(CounterMetricFamily(name, help, labels=("code",)), totals)


def _handoffs(seen: Snapshot) -> Metric:
    help = "Live attempts by how far their handoff is; they live until both workers have let go."
    family = GaugeMetricFamily("rlt_handoffs", help, labels=("phase",))
    return _filled(family, {(stage.value,): count for stage, count in seen.handoffs.items()})


def _workers_here(workers: Iterable[WorkerView]) -> Metric:
    roles = Counter({"prefill": 0, "decode": 0})
    roles.update(worker.role for worker in workers)
    family = GaugeMetricFamily("rlt_workers", "Workers that are registered.", labels=("role",))
    return _filled(family, {(role,): count for role, count in roles.items()})


def _of_workers(seen: Snapshot) -> Iterator[Metric]:
    own: list[tuple[str, str, ByWorker]] = [
        ("rlt_worker_kv_blocks", "Size of the KV pool.", lambda w: w.num_blocks),
        ("rlt_worker_slots", "Requests that execute at once.", lambda w: w.num_slots),
        ("rlt_worker_receive_slots", "Prompts received at once.", lambda w: w.num_receive_slots),
        ("rlt_worker_live_requests", "Generations that the worker holds.", lambda w: w.live),
        ("rlt_worker_draining", "1 while it is to end and gets nothing new.", lambda w: w.draining),
        ("rlt_worker_heard_age_seconds", "Time since it was last heard.", lambda w: w.heard_ago_s),
        (
            "rlt_worker_quarantined_bytes",
            "KV memory withdrawn until its writer is known to have ended.",
            lambda w: w.values.get("blocks_quarantined", 0.0) * seen.block_bytes,
        ),
    ]
    for name, help, value in own:
        yield _by_worker(GaugeMetricFamily(name, help, labels=WORKER_LABELS), seen.workers, value)
    for figure in WORKER_GAUGES:
        gauge = GaugeMetricFamily(figure.name, figure.help, labels=WORKER_LABELS)
        yield _by_worker(gauge, seen.workers, _figure(figure))
    for figure in WORKER_COUNTERS:
        counter = CounterMetricFamily(figure.name, figure.help, labels=WORKER_LABELS)
        yield _by_worker(counter, seen.workers, _figure(figure))


def _figure(figure: Figure) -> ByWorker:
    return lambda worker: worker.values.get(figure.source)


def _by_worker(
    family: GaugeMetricFamily | CounterMetricFamily, workers: Iterable[WorkerView], value: ByWorker
) -> Metric:
    for worker in workers:
        figure = value(worker)
        if figure is not None:  # before its first heartbeat, or nothing of this role
            family.add_metric((worker.name, worker.role), figure)
    return family


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]
) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
