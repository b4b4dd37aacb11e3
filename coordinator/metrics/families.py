"""Which figures of the state become which metrics: their names, kinds and help texts.

Owns the tables and nothing that changes. Names follow Prometheus: base units, `_total` for what
only grows. A figure that is in no table is not exported, so a worker cannot invent a metric.
"""

import msgspec

from ...runtime.errors import error_codes

OTHER = "other"
# Reasons that workers give besides the errors that callers see.
CODES = error_codes() | {"closed", "pair_closed", "worker_draining"}


def bounded_code(code: str) -> str:
    """A label takes few values, and a worker's word for a fault may be any."""
    return code if code in CODES else OTHER


class Figure(msgspec.Struct, frozen=True):
    source: str  # the name in the statistics
    name: str
    help: str


SERVICE_GAUGES = (
    Figure("queue_length", "rlt_queued_requests", "Requests that wait for a pair of workers."),
    Figure("live_requests", "rlt_live_requests", "Requests that have not ended, queued ones too."),
    Figure("ready_pairs", "rlt_ready_pairs", "Pairs of workers that can serve."),
    Figure("expels_open", "rlt_expels_open", "Expelled processes not known to be dead yet."),
    Figure("supervisors", "rlt_supervisors", "Supervisors of workers that are heard."),
    Figure("credits_outstanding", "rlt_credits", "Credits of workers taken; 0 when nothing runs."),
)
SERVICE_COUNTERS = (
    Figure("accepted", "rlt_accepted_requests", "Requests that were taken."),
    Figure("output_tokens", "rlt_generated_tokens", "Output tokens given to clients."),
    Figure("replays", "rlt_replays", "Retries that went on behind tokens already given out."),
    Figure("expelled", "rlt_expelled_workers", "Processes to be killed because they were lost."),
    Figure("repeated_asks", "rlt_repeated_asks", "Asks of workers sent again for want of answer."),
    Figure("late_messages", "rlt_late_messages", "Messages of workers about what is over."),
    Figure("malformed_frames", "rlt_malformed_frames", "Frames of clients and workers dropped."),
    Figure("output_gaps", "rlt_output_gaps", "Outputs asked for again because one was missing."),
    Figure(
        "decode_prefill_tokens",
        "rlt_decode_prefill_tokens",
        "Prompt tokens that decode workers computed before activation; always 0.",
    ),
    Figure(
        "decode_loops_before_activation",
        "rlt_decode_loops_before_activation",
        "Loops that decode workers ran before activation; always 0.",
    ),
)
WORKER_GAUGES = (
    Figure("blocks_free", "rlt_worker_kv_blocks_free", "KV blocks that can be given out."),
    Figure(
        "blocks_cached",
        "rlt_worker_kv_blocks_cached",
        "KV blocks kept for later prompts; they count as free.",
    ),
    Figure("blocks_quarantined", "rlt_worker_kv_blocks_quarantined", "KV blocks withdrawn."),
    Figure("slots_free", "rlt_worker_slots_free", "Slots for requests that execute."),
    Figure("receive_slots_free", "rlt_worker_receive_slots_free", "Slots for prompts coming in."),
    Figure("running", "rlt_worker_running_requests", "Requests that execute."),
    Figure("writes_queued", "rlt_worker_transfers_queued", "KV transfers not posted yet."),
    Figure("handles_in_flight", "rlt_worker_transfers_in_flight", "KV transfers posted."),
    Figure("handles_stuck", "rlt_worker_transfers_stuck", "KV transfers without an end in time."),
    Figure("bytes_in_flight", "rlt_worker_in_flight_bytes", "KV posted that has not arrived."),
)
WORKER_COUNTERS = (
    Figure("passes", "rlt_worker_passes", "Passes computed."),
    Figure("failed_passes", "rlt_worker_failed_passes", "Passes that the device failed."),
    Figure("prefill_tokens", "rlt_worker_prefill_tokens", "Prompt positions computed."),
    Figure("recurrent_loops", "rlt_worker_recurrent_loops", "Loops run for output tokens."),
    Figure("output_tokens", "rlt_worker_output_tokens", "Tokens sampled."),
    Figure("preemptions", "rlt_worker_preemptions", "Requests set aside for lack of blocks."),
    Figure("resumes", "rlt_worker_resumes", "Requests taken up again."),
    Figure("prefix_hits", "rlt_worker_prefix_cache_hits", "Prompts that began in the cache."),
    Figure(
        "prefix_hit_tokens", "rlt_worker_prefix_cache_hit_tokens", "Positions found in the cache."
    ),
    Figure("prefix_evictions", "rlt_worker_prefix_cache_evictions", "Cached blocks given up."),
    Figure("bytes_posted", "rlt_worker_transfer_posted_bytes", "KV handed to the transport."),
    Figure("bytes_sent", "rlt_worker_transfer_sent_bytes", "KV whose transfer has ended well."),
    Figure("writes_done", "rlt_worker_transfers_done", "KV transfers that ended well."),
    Figure("writes_failed", "rlt_worker_transfers_failed", "KV transfers that failed."),
    Figure("notifications_received", "rlt_worker_chunks_received", "KV chunks that arrived."),
    Figure(
        "canary_hits",
        "rlt_worker_canary_hits",
        "Free KV blocks found written by somebody; watched only with --canary on.",
    ),
    Figure("late_messages", "rlt_worker_late_messages", "Messages about what is over."),
    Figure("malformed_frames", "rlt_worker_malformed_frames", "Frames dropped."),
)
