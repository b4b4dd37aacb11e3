"""A supervised service whose workers are scripted ones: TEAM, as JSON. Run as a program.

The product's own supervisor with the product's own coordinator; only the workers' command lines are
others, and they and the supervisor dial where the test says.
"""

import dataclasses
import sys
from pathlib import Path

import msgspec

from rlt.connector.config import WorkerConfig
from rlt.coordinator.config import CoordinatorConfig
from rlt.launch.console import Console
from rlt.launch.processes import coordinator_process, worker_process
from rlt.launch.supervisor import Supervisor


class Team(msgspec.Struct, frozen=True):
    """supervised_at: where the supervisor dials. scripts: folder of the workers' scripts, logs."""

    coordinator: CoordinatorConfig
    workers: list[WorkerConfig]
    supervised_at: str
    scripts: str


def main(text: str) -> int:
    team = msgspec.json.decode(text, type=Team)
    program = Path(__file__).parent / "worker.py"
    workers = []
    for config in team.workers:
        spec = worker_process(config)
        files = [f"{team.scripts}/{config.worker}.{kind}" for kind in ("script", "log")]
        command = (sys.executable, "-P", str(program), spec.command[-1], *files)
        workers.append(dataclasses.replace(spec, command=command))
    return Supervisor(
        coordinator_process(team.coordinator),
        workers,
        console=Console("launcher"),
        coordinator=team.supervised_at,
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
