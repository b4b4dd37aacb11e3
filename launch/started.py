"""A service that has started: what it says of itself once, and how its coordinator starts again.

Owns the addresses that the first coordinator was given: a later one listens at the same places,
so that workers and clients find it. Never starts anything.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..connector.config import WorkerConfig
from ..coordinator.config import CoordinatorConfig
from ..coordinator.discovery import ServiceRecord
from .children import ChildSpec
from .console import Console
from .processes import coordinator_process


class StartedService:
    def __init__(
        self,
        coordinator: CoordinatorConfig,
        workers: Sequence[WorkerConfig],
        record: Path,
        console: Console,
    ) -> None:
        self._coordinator = coordinator
        self._workers = workers
        self._record = record
        self._console = console

    def announce(self) -> None:
        """Once, when the service is ready."""
        service = msgspec.json.decode(self._record.read_bytes(), type=ServiceRecord)
        for address in service.endpoints:
            self._console.say(f"serving {service.model} at {address}")
        if service.http:
            http = service.http
            self._console.say(f"serving HTTP at {http} (OpenAI's API at {http}/v1)")
        self._console.say(f"try: rlt-ask --connect {service.endpoint} 'What is 17 + 25?'")
        self._console.announce(f"READY {service.endpoint}")
        self._coordinator = msgspec.structs.replace(
            self._coordinator,
            client_endpoints=service.endpoints,
            worker_endpoint=service.workers_at,
            http=service.http.removeprefix("http://") or None,
        )

    def coordinator_again(self, ended_for_good: frozenset[str]) -> ChildSpec:
        """It waits for no worker that will not come back, and knows, also where the one before it
        left no record, that it takes a place."""
        roles = [worker.role for worker in self._workers if worker.worker not in ended_for_good]
        return coordinator_process(
            msgspec.structs.replace(
                self._coordinator,
                resumed=True,
                expected_prefill=roles.count("prefill"),
                expected_decode=roles.count("decode"),
            )
        )


def is_remote(endpoint: str) -> bool:
    return endpoint.startswith("tcp://") and not endpoint.startswith("tcp://127.")


def dialled(endpoint: str) -> str:
    """The address at which a process of this machine reaches a listener."""
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace(
        "tcp://*:", "tcp://127.0.0.1:"
    )
