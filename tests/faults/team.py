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
from rlt.launch.children import ChildSpec
from rlt.launch.console import Console
from rlt.launch.processes import coordinator_process, worker_process
from rlt.launch.restart import RestartPolicy
from rlt.launch.supervisor import Supervisor


class Team(msgspec.Struct, frozen=True):
    """supervised_at: where the supervisor dials. scripts: folder of the workers' scripts, logs.
    most_s: the longest wait before anybody is started again, however often it has ended; None: as
    the product does. hosts: by worker, the command that runs a command on its host."""

    coordinator: CoordinatorConfig
    workers: list[WorkerConfig]
    supervised_at: str
    scripts: str
    most_s: float | None = None
    hosts: dict[str, tuple[str, ...]] = {}


def main(text: str) -> int:
    team = msgspec.json.decode(text, type=Team)
    program = Path(__file__).parent / "worker.py"
    workers = []
    for config in team.workers:
        spec = worker_process(config)
        files = [f"{team.scripts}/{config.worker}.{kind}" for kind in ("script", "log")]
        host = team.hosts.get(config.worker, ())
        command = (*host, sys.executable, "-P", str(program), spec.command[-1], *files)
        workers.append(_restarted(dataclasses.replace(spec, command=command), team.most_s))
    return Supervisor(
        _restarted(coordinator_process(team.coordinator), team.most_s),
        workers,
        console=Console("launcher"),
        coordinator=team.supervised_at,
    ).run()


def _restarted(spec: ChildSpec, most_s: float | None) -> ChildSpec:
    if most_s is None:
        return spec
    return dataclasses.replace(spec, policy=RestartPolicy(most_s=most_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
