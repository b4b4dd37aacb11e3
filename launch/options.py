"""The one table of options of rlt-coordinator and rlt-worker.

An option that sets a field of a config record takes its default from there, so a default is
written once. The units and defaults in --help come from this table.
"""

from pathlib import Path

from ..connector.config import WorkerConfig
from ..coordinator.config import CoordinatorConfig
from ..runtime.config import EngineConfig
from .parser import Option, checkpoint_dir, endpoint, existing_file, number, on_off, whole

COORDINATOR = "rlt-coordinator"
WORKER = "rlt-worker"
BOTH = (COORDINATOR, WORKER)
ONLY_COORDINATOR = (COORDINATOR,)
ONLY_WORKER = (WORKER,)

_WORKERS = (
    Option(
        flag="--prefill",
        commands=ONLY_COORDINATOR,
        parse=whole(0),
        default=1,
        unit="processes",
        help="prefill workers to start on this machine",
    ),
    Option(
        flag="--decode",
        commands=ONLY_COORDINATOR,
        parse=whole(0),
        default=1,
        unit="processes",
        help="decode workers to start on this machine",
    ),
    Option(
        flag="--role",
        commands=ONLY_WORKER,
        choices=("prefill", "decode"),
        required=True,
        unit="name",
        help="what this worker does: prefill or decode",
    ),
    Option(
        flag="--coordinator",
        commands=ONLY_WORKER,
        parse=endpoint,
        required=True,
        unit="endpoint",
        help="where the coordinator listens for workers (its --worker-listen)",
    ),
    Option(
        flag="--name",
        commands=ONLY_WORKER,
        shown="ROLE-HOST-PID",
        unit="name",
        help="this worker's name, unique in the service",
    ),
    Option(
        flag="--threads",
        commands=BOTH,
        sets=(EngineConfig, "threads"),
        parse=whole(1),
        shown="cores divided by local workers, at least 1",
        unit="threads",
        help="CPU threads of each worker",
    ),
    Option(
        flag="--reconnect-s",
        commands=BOTH,
        sets=(WorkerConfig, "reconnect_s"),
        parse=number(0),
        unit="seconds",
        help="how long a worker goes on dialling a coordinator that is gone",
    ),
)

_ENGINE = (
    Option(
        flag="--model",
        commands=BOTH,
        parse=checkpoint_dir,
        shown="the embedded model",
        unit="folder",
        help="checkpoint in Hugging Face form, the same for all workers",
    ),
    Option(
        flag="--dtype",
        commands=BOTH,
        sets=(EngineConfig, "dtype"),
        choices=("auto", "float32", "bfloat16"),
        unit="name",
        help="auto, float32 or bfloat16; auto is the checkpoint's own",
    ),
    Option(
        flag="--device",
        commands=BOTH,
        sets=(EngineConfig, "device"),
        choices=("auto", "cpu", "cuda"),
        unit="name",
        help="auto, cpu or cuda; auto takes a GPU if there is one",
    ),
    Option(
        flag="--backend",
        commands=BOTH,
        sets=(EngineConfig, "backend"),
        choices=("auto", "torch", "triton"),
        unit="name",
        help="auto, torch or triton; auto takes triton on a GPU and torch on a CPU",
    ),
    Option(
        flag="--block-size",
        commands=BOTH,
        sets=(EngineConfig, "block_size"),
        parse=whole(1),
        unit="positions",
        help="positions in one KV block; all workers must agree",
    ),
    Option(
        flag="--num-blocks",
        commands=BOTH,
        sets=(EngineConfig, "num_blocks"),
        parse=whole(1),
        shown="small and fixed on a CPU, planned from free memory on a GPU",
        unit="blocks",
        help="size of each worker's KV pool; a request needs its blocks once per depth plane",
    ),
    Option(
        flag="--memory-fraction",
        commands=BOTH,
        sets=(EngineConfig, "memory_fraction"),
        parse=number(0, above=True, maximum=1),
        unit="fraction",
        help="share of a GPU's memory, free after the weights are loaded, for a planned pool",
    ),
    Option(
        flag="--num-slots",
        commands=BOTH,
        sets=(EngineConfig, "num_slots"),
        parse=whole(1),
        unit="requests",
        help="requests that one worker executes at once",
    ),
    Option(
        flag="--num-receive-slots",
        commands=BOTH,
        sets=(EngineConfig, "num_receive_slots"),
        parse=whole(1),
        unit="requests",
        help="requests whose prompt one decode worker receives at once",
    ),
    Option(
        flag="--chunk-tokens",
        commands=BOTH,
        sets=(EngineConfig, "chunk_tokens"),
        parse=whole(1),
        unit="tokens",
        help="prompt tokens in one prefill pass",
    ),
    Option(
        flag="--max-positions",
        commands=BOTH,
        sets=(EngineConfig, "max_positions"),
        parse=whole(1),
        shown="the checkpoint's own limit",
        unit="positions",
        help="longest prompt and output together",
    ),
)

_SCHEDULING = (
    Option(
        flag="--layout",
        commands=BOTH,
        sets=(EngineConfig, "layout"),
        choices=("last_exited", "shared"),
        unit="name",
        help="last_exited keeps KV per depth; shared keeps one plane that every loop overwrites",
    ),
    Option(
        flag="--async-scheduling",
        commands=BOTH,
        sets=(EngineConfig, "async_scheduling"),
        parse=on_off,
        shown="off",
        unit="on or off",
        help="submit passes ahead of results and delivery",
    ),
    Option(
        flag="--refill",
        commands=BOTH,
        sets=(EngineConfig, "refill"),
        parse=on_off,
        shown="on",
        unit="on or off",
        help="a token that exits frees its row at once; off: tokens wait for the deepest",
    ),
    Option(
        flag="--mixed-batches",
        commands=BOTH,
        sets=(EngineConfig, "mixed_batches"),
        parse=on_off,
        shown="on",
        unit="on or off",
        help="prompt chunks share passes with decode rows",
    ),
    Option(
        flag="--token-budget",
        commands=BOTH,
        sets=(EngineConfig, "token_budget"),
        parse=whole(1),
        shown="--chunk-tokens, decode rows not counted",
        unit="tokens",
        help="prompt and decode tokens together in one mixed pass",
    ),
    Option(
        flag="--prefill-passes",
        commands=BOTH,
        sets=(EngineConfig, "prefill_passes"),
        parse=whole(1),
        unit="passes",
        help="prompt passes between two decode passes, where they are not mixed",
    ),
    Option(
        flag="--prefix-cache",
        commands=BOTH,
        sets=(EngineConfig, "prefix_cache"),
        parse=on_off,
        shown="off",
        unit="on or off",
        help="keep full blocks of prompts for later prompts that begin alike",
    ),
    Option(
        flag="--admission",
        commands=BOTH,
        sets=(EngineConfig, "admission"),
        choices=("full", "incremental"),
        unit="name",
        help="full reserves room for the longest output; incremental grows and preempts",
    ),
    Option(
        flag="--watermark",
        commands=BOTH,
        sets=(EngineConfig, "watermark"),
        parse=number(0, maximum=0.99),
        unit="fraction",
        help="share of blocks kept free when a request is let in (incremental)",
    ),
    Option(
        flag="--snapshot-bytes",
        commands=BOTH,
        sets=(EngineConfig, "snapshot_bytes"),
        parse=whole(0),
        unit="bytes",
        help="host memory for preempted requests; one that could need more never grows",
    ),
    Option(
        flag="--random-head-seed",
        commands=BOTH,
        sets=(EngineConfig, "random_head_seed"),
        parse=whole(0),
        unit="seed",
        help="of the frozen head of exit mode random_lookahead",
    ),
)

_TRANSFERS = (
    Option(
        flag="--max-inflight-bytes",
        commands=BOTH,
        sets=(WorkerConfig, "max_inflight_bytes"),
        parse=whole(1),
        unit="bytes",
        help="KV that a prefill worker may have posted, and not finished, to one decode worker",
    ),
    Option(
        flag="--transfer-timeout-s",
        commands=BOTH,
        sets=(WorkerConfig, "transfer_timeout_s"),
        parse=number(0, above=True),
        unit="seconds",
        help="longest time that one KV transfer may take",
    ),
)

_ADDRESSES = (
    Option(
        flag="--listen",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "client_endpoints"),
        parse=endpoint,
        repeat=True,
        shown="a socket in the service's runtime folder",
        unit="endpoint",
        help="where clients connect; may be given several times",
    ),
    Option(
        flag="--http",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "http"),
        shown="127.0.0.1:8000, or any free port where that is taken",
        unit="HOST:PORT",
        help="where the OpenAI-compatible HTTP API listens; port 0 takes any free one",
    ),
    Option(flag="--no-http", commands=ONLY_COORDINATOR, parse=None, help="serve no HTTP at all"),
    Option(
        flag="--http-token-file",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "http_token_file"),
        parse=existing_file,
        shown="none: everybody who reaches the address is served",
        unit="file",
        help="HTTP requests must carry the token that stands in this file",
    ),
    Option(
        flag="--http-max-body-bytes",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "http_max_body_bytes"),
        parse=whole(1),
        unit="bytes",
        help="largest HTTP request body",
    ),
    Option(
        flag="--worker-listen",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "worker_endpoint"),
        parse=endpoint,
        shown="a socket in the service's runtime folder",
        unit="endpoint",
        help="where workers dial in, of this machine and of others",
    ),
    Option(
        flag="--peer-listen",
        commands=BOTH,
        parse=endpoint,
        shown="a socket in the service's runtime folder",
        unit="endpoint",
        help="where decode workers listen for prefill workers; tcp://HOST:0 takes any free port",
    ),
    Option(
        flag="--insecure",
        commands=BOTH,
        parse=None,
        help="allow TCP addresses beyond this machine, unencrypted",
    ),
    Option(
        flag="--runtime-dir",
        commands=BOTH,
        parse=Path,
        shown="$XDG_RUNTIME_DIR/rlt, else /tmp/rlt-UID",
        unit="folder",
        help="where each service makes a folder of its own for its sockets",
    ),
)

_SERVICE = (
    Option(
        flag="--max-queue",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "max_queue"),
        parse=whole(1),
        unit="requests",
        help="requests that may wait for a worker; more are refused as overloaded",
    ),
    Option(
        flag="--max-bypasses",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "max_bypasses"),
        parse=whole(0),
        unit="times",
        help="how often smaller requests may pass one that waits for room",
    ),
    Option(
        flag="--deadline-s",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "default_deadline_s"),
        parse=number(0, above=True),
        unit="seconds",
        help="when a request fails that names no deadline of its own",
    ),
    Option(
        flag="--pair-wait-s",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "pair_wait_s"),
        parse=number(0),
        shown="until its deadline",
        unit="seconds",
        help="how long a request waits while no pair of workers is ready",
    ),
    Option(
        flag="--heartbeat-s",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "heartbeat_s"),
        parse=number(0, above=True),
        unit="seconds",
        help="time between a worker's signs of life",
    ),
    Option(
        flag="--heartbeat-timeout-s",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "heartbeat_timeout_s"),
        parse=number(0, above=True),
        unit="seconds",
        help="silence after which a worker counts as lost",
    ),
    Option(
        flag="--drain-s",
        commands=ONLY_COORDINATOR,
        sets=(CoordinatorConfig, "drain_s"),
        parse=number(0),
        unit="seconds",
        help="time that running requests get to finish after Ctrl-C",
    ),
    Option(
        flag="--log-level",
        commands=BOTH,
        choices=("debug", "info", "warning", "error"),
        default="info",
        unit="name",
        help="debug, info, warning or error: what the processes write to stderr",
    ),
)

TABLE = {
    "workers": _WORKERS,
    "model and memory": _ENGINE,
    "scheduling": _SCHEDULING,
    "KV transfers": _TRANSFERS,
    "addresses": _ADDRESSES,
    "service": _SERVICE,
}
