"""How the coordinator of a service that has started is started again."""

from pathlib import Path

import msgspec
import pytest

from rlt.connector.config import WorkerConfig
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.discovery import RECORD_NAME, ServiceRecord, write_record
from rlt.launch.console import Console
from rlt.launch.started import StartedService
from rlt.runtime.config import EngineConfig


def worker(role: str, name: str) -> WorkerConfig:
    return WorkerConfig(
        role=role,  # type: ignore[arg-type]
        worker=name,
        coordinator="ipc:///x/c.sock",
        listen="ipc:///x/d.sock",
        engine=EngineConfig(model="m"),
    )


def test_it_takes_its_place_also_where_the_one_before_left_no_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that fails removes its record; the next must not wait for all workers as a first does."""
    at = ("tcp://127.0.0.1:4000",)
    config = CoordinatorConfig(
        runtime_dir=str(tmp_path), client_endpoints=("tcp://127.0.0.1:*",), http="auto"
    )
    workers = [worker("prefill", "prefill-0"), worker("decode", "decode-0")]
    console = Console("launcher")
    started = StartedService(config, workers, tmp_path / RECORD_NAME, console)
    write_record(
        tmp_path,
        ServiceRecord(endpoint=at[0], endpoints=at, pid=1, model="m", http="http://127.0.0.1:4001"),
    )
    started.announce()
    (tmp_path / RECORD_NAME).unlink()
    console.close()
    assert f"READY {at[0]}" in capfd.readouterr().out

    spec = started.coordinator_again(frozenset({"decode-0"}))
    again = msgspec.json.decode(spec.command[-1], type=CoordinatorConfig)
    assert again.resumed and again.client_endpoints == at and again.http == "127.0.0.1:4001"
    assert (again.expected_prefill, again.expected_decode) == (1, 0)
