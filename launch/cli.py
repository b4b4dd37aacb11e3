"""rlt-coordinator: starts a whole service on this machine and stays until it has stopped.

Turns the command line into one config per process and hands them to the supervisor. Loads no model
and no torch itself.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..connector.config import WorkerConfig
from ..coordinator.config import CoordinatorConfig, check_endpoint
from ..coordinator.discovery import RECORD_NAME, default_base
from ..runtime.config import EngineConfig
from ..runtime.errors import ConfigError, RltError
from .arrival import FileArrival
from .console import Console
from .options import COORDINATOR, TABLE
from .parser import build_parser, spell_options, values_for
from .processes import coordinator_process, default_threads, worker_process
from .runtime_dir import service_dir
from .silence import ENDLESS, Patience
from .started import StartedService, dialled, is_remote
from .supervisor import Supervisor

EMBEDDED_MODEL = Path(__file__).parent / "embedded"
BAD_OPTION = 2
FAILED = 1
HUNG_S = 15.0  # clients give a silent service up after 10 s
DESCRIPTION = "Serve a looped language model with prefill and decode in separate processes."


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser(COORDINATOR, DESCRIPTION, TABLE).parse_args(arguments)
    return named_errors(lambda: serve(options))


def named_errors(run: Callable[[], int]) -> int:
    """Run; an error that rlt raises on purpose becomes one line and an exit code."""
    try:
        return run()
    except ConfigError as error:
        print(f"error: {spell_options(str(error), TABLE)}", file=sys.stderr)
        return BAD_OPTION
    except RltError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def serve(options: argparse.Namespace) -> int:
    console = Console("launcher")
    with ExitStack() as stack:
        folder = stack.enter_context(service_dir(options.runtime_dir or default_base()))
        coordinator = coordinator_config(options, folder)
        workers = worker_configs(options, coordinator, folder)
        record = folder / RECORD_NAME
        ready = FileArrival(record)
        stack.callback(ready.close)
        workers_at = dialled(coordinator.workers_at)
        watched = not is_remote(workers_at) and not _any_port(workers_at)
        hung_s = max(HUNG_S, coordinator.heartbeat_timeout_s)
        started = StartedService(coordinator, workers, record, console)
        return Supervisor(
            coordinator_process(coordinator),
            [worker_process(worker) for worker in workers],
            console=console,
            coordinator=workers_at if workers or watched else None,
            patience=Patience(between_s=hung_s) if watched else ENDLESS,
            ready=ready,
            on_ready=started.announce,
            main_again=started.coordinator_again,
        ).run()


def coordinator_config(options: argparse.Namespace, folder: Path) -> CoordinatorConfig:
    values = values_for(CoordinatorConfig, options, TABLE)
    return CoordinatorConfig(
        runtime_dir=str(folder),
        model=options.model or str(EMBEDDED_MODEL),
        expected_prefill=options.prefill,
        expected_decode=options.decode,
        insecure=options.insecure,
        log_level=options.log_level.upper(),
        **{
            **values,
            "client_endpoints": tuple(values["client_endpoints"] or ()),
            "http": None if options.no_http else values["http"],
        },
    )


def worker_configs(
    options: argparse.Namespace, coordinator: CoordinatorConfig, folder: Path
) -> list[WorkerConfig]:
    names = [("prefill", f"prefill-{n}") for n in range(options.prefill)]
    names += [("decode", f"decode-{n}") for n in range(options.decode)]
    workers_at = dialled(coordinator.workers_at)
    if names and _any_port(workers_at):
        raise ConfigError("--worker-listen needs a port of its own when workers start here too")
    return [
        worker_config(
            options,
            role=role,
            worker=worker,
            coordinator=workers_at,
            folder=folder,
            threads=options.threads or default_threads(len(names)),
        )
        for role, worker in names
    ]


def _any_port(endpoint: str) -> bool:
    return endpoint.endswith((":*", ":0"))


def worker_config(
    options: argparse.Namespace,
    *,
    role: Any,
    worker: str,
    coordinator: str,
    folder: Path,
    threads: int,
) -> WorkerConfig:
    if options.peer_listen is not None:
        check_endpoint(options.peer_listen, insecure=options.insecure)
    engine = values_for(EngineConfig, options, TABLE)
    return WorkerConfig(
        role=role,
        worker=worker,
        coordinator=coordinator,
        listen=options.peer_listen or f"ipc://{folder}/{worker}.sock",
        engine=EngineConfig(
            **{**engine, "model": options.model or str(EMBEDDED_MODEL), "threads": threads}
        ),
        log_level=options.log_level,
        **values_for(WorkerConfig, options, TABLE),
    )


if __name__ == "__main__":
    sys.exit(main())
