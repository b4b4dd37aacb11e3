"""The command lines of the processes that a service is made of, and their environment.

Pure: turns configs into ChildSpecs. Never starts anything.
"""

import os
import sys

import msgspec

from ..connector.config import WorkerConfig
from ..coordinator.config import CoordinatorConfig
from .children import ChildSpec
from .restart import FOR_EVER, RestartPolicy

_QUIET = {  # unless the user says otherwise
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# A coordinator that fails again and again does not serve; its end is everybody's.
COORDINATOR_POLICY = RestartPolicy(most_failures=5)
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def coordinator_process(config: CoordinatorConfig) -> ChildSpec:
    return ChildSpec(
        name="coordinator",
        command=_module("rlt.coordinator", config),
        environment=_environment(threads=1),
        policy=COORDINATOR_POLICY,
    )


def worker_process(config: WorkerConfig, policy: RestartPolicy = FOR_EVER) -> ChildSpec:
    return ChildSpec(
        name=config.worker,
        command=_module(f"rlt.{config.role}", config),
        environment=_environment(threads=config.engine.threads or 1),
        policy=policy,
        worker=True,
    )


def default_threads(local_workers: int) -> int:
    """CPU threads of each worker: two workers that spin on the same cores slow each other down by
    a factor of ten and more."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_workers))


def _module(name: str, config: msgspec.Struct) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", name, msgspec.json.encode(config).decode())


def _environment(threads: int) -> dict[str, str]:
    quiet = {name: value for name, value in _QUIET.items() if name not in os.environ}
    counts = {name: str(threads) for name in _THREAD_COUNTS}
    return {**quiet, **counts, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
