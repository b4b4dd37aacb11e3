"""rlt-worker: starts and supervises one engine process that joins a coordinator elsewhere.

The same supervisor as rlt-coordinator's, with the engine as its main child: started again when it
fails, killed when the coordinator asks for it. SIGTERM is passed on, and the engine drains.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ..coordinator.discovery import default_base
from ..runtime.errors import ConfigError
from .children import ChildSpec
from .cli import named_errors, worker_config
from .console import Console
from .options import TABLE, WORKER
from .parser import build_parser
from .processes import default_threads, worker_process
from .restart import RestartPolicy
from .runtime_dir import service_dir
from .started import is_remote
from .supervisor import Grace, Supervisor

ENGINE_POLICY = RestartPolicy(must_start=True)
MOVING_S = 10.0  # beyond the drain: the coordinator moves what is left to other workers
DESCRIPTION = "Run one prefill or decode worker and join it to a running coordinator."


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser(WORKER, DESCRIPTION, TABLE).parse_args(arguments)
    return named_errors(lambda: work(options))


def work(options: argparse.Namespace) -> int:
    if options.role == "decode" and is_remote(options.coordinator) and not options.peer_listen:
        raise ConfigError(
            f"--peer-listen is needed with --coordinator {options.coordinator}: prefill workers "
            "elsewhere must reach this decode worker (tcp://HOST:0 takes any free port)"
        )
    with service_dir(options.runtime_dir or default_base()) as folder:
        return Supervisor(
            _engine(options, folder),
            [],
            console=Console("launcher"),
            coordinator=options.coordinator,
            grace=Grace(draining_s=options.drain_s + MOVING_S),
        ).run()


def _engine(options: argparse.Namespace, folder: Path) -> ChildSpec:
    name = options.name or f"{options.role}-{socket.gethostname()}-{os.getpid()}"
    return worker_process(
        worker_config(
            options,
            role=options.role,
            worker=name,
            coordinator=options.coordinator,
            folder=folder,
            threads=options.threads or default_threads(1),
        ),
        ENGINE_POLICY,
    )


if __name__ == "__main__":
    sys.exit(main())
