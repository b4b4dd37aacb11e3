"""Metrics that must be seen as they happen: times, and the exit depth of every token.

Owns the histograms and the registry that holds them; no global one is used. Told once per row of
output, so depths are counted in a plain dictionary and become a histogram when somebody asks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import prometheus_client
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ...runtime.types import Stamp
from ..now import Now
from ..request import Request
from ..spans import transfer_bytes, transfer_seconds, unsent_bytes

REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
BYTES = tuple(float(1 << power) for power in range(12, 37, 2))  # 4 KiB to 64 GiB


class Depths(Collector):
    """Loops per token. Every depth that was seen has a bucket of its own."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        buckets, total = [], 0
        for depth in range(1, max(self.seen, default=0) + 1):
            total += self.seen[depth]
            buckets.append((f"{float(depth)}", float(total)))
        loops = sum(depth * count for depth, count in self.seen.items())
        family = HistogramMetricFamily(
            "rlt_exit_depth_loops", "Loops that each output token ran, the first included."
        )
        family.add_metric((), [*buckets, ("+Inf", float(total))], float(loops))
        yield family


class Watch:
    """The Observer that measures."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(
            name: str, help: str, buckets: Sequence[float]
        ) -> prometheus_client.Histogram:
            return prometheus_client.Histogram(name, help, buckets=buckets, registry=registry)

        self._prompt = prometheus_client.Counter(
            "rlt_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self._attempts = prometheus_client.Counter(
            "rlt_attempts",
            "Attempts started: one per request, and one per retry.",
            registry=registry,
        )
        self._retries = prometheus_client.Counter(
            "rlt_retries",
            "Attempts started after an earlier one of the same request.",
            registry=registry,
        )
        self._queued = histogram(
            "rlt_queue_seconds", "From acceptance to the first choice of a pair.", REQUEST_S
        )
        self._first = histogram(
            "rlt_time_to_first_token_seconds", "From acceptance to the first token.", REQUEST_S
        )
        self._between = histogram(
            "rlt_inter_token_latency_seconds",
            "Between two tokens of a request; tokens that come together share the time.",
            TOKEN_S,
        )
        self._whole = histogram(
            "rlt_request_seconds", "From acceptance to the end, whichever it was.", REQUEST_S
        )
        self._transfer = histogram(
            "rlt_transfer_seconds",
            "From the first KV transfer of a prompt to the last arrival, by the workers' clocks.",
            REQUEST_S,
        )
        self._bytes = histogram("rlt_transfer_bytes", "KV transferred per prompt.", BYTES)
        self._unsent = histogram(
            "rlt_compute_end_unsent_bytes", "KV not yet sent when a prompt was computed.", BYTES
        )
        self._answers = prometheus_client.Counter(
            "rlt_http_responses", "HTTP answers by status.", ("status",), registry=registry
        )
        self._depths = Depths()
        self._seen_depths = self._depths.seen
        registry.register(self._depths)

    def answered(self, status: int) -> None:
        """The HTTP front's answer has begun."""
        self._answers.labels(str(status)).inc()

    def accepted(self, request: Request) -> None:
        self._prompt.inc(len(request.prompt))

    def started(self, request: Request, now: Now) -> None:
        self._attempts.inc()
        if request.attempts > 1:
            self._retries.inc()
        else:
            self._queued.observe(now.mono_s - request.received_s)

    def received(self, stamps: Sequence[Stamp]) -> None:
        seconds, unsent = transfer_seconds(stamps), unsent_bytes(stamps)
        if seconds is not None:
            self._transfer.observe(seconds)
            self._bytes.observe(transfer_bytes(stamps))
        if unsent is not None:
            self._unsent.observe(unsent)

    def output(self, request: Request, exit_depths: Sequence[int], now: Now) -> None:
        seen = self._seen_depths
        for depth in exit_depths:
            seen[depth] += 1
        later = len(exit_depths)
        if request.last_output_s is None:
            self._first.observe(now.mono_s - request.received_s)
            return
        share_s = (now.mono_s - request.last_output_s) / later
        for _ in range(later):
            self._between.observe(share_s)

    def ended(self, request: Request, now: Now) -> None:
        self._whole.observe(now.mono_s - request.received_s)
