"""The HTTP front of real coordinator processes: addresses, what is loaded, and the end."""

import http.client
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlt.coordinator.discovery import find_services
from rlt.runtime.errors import ConfigError

from ..coordinator.test_process import process, wait_ready
from .calls import call

HEAVY = ("/torch/", "/triton/", "/nixl", "/transformers/")


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlt-b") as folder:
        yield Path(folder)


def addresses(base: Path) -> list[str]:
    return [record.http for record in find_services(base)]


def test_services_that_start_at_once_all_find_a_port(base: Path) -> None:
    with process(base / "a") as first, process(base / "b") as second:
        for child in (first, second):
            wait_ready(child)
        one, two = addresses(base)
        assert one != two
        for address in (one, two):
            answer = call(address, "/health")
            assert (answer.status, answer.error["code"]) == (503, "no_prefill_worker")
            assert call(address, "/v1/models").body["data"][0]["id"] == "embedded"


def test_a_named_address_that_is_taken_is_refused_by_name(base: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process(base / "a", http=f"127.0.0.1:{port}") as child:
            assert child.wait(20.0) == 2
            assert child.stderr is not None and f"127.0.0.1:{port}" in child.stderr.read()


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "127.0.0.1", "127.0.0.1:99999", "http"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    from rlt.coordinator.config import CoordinatorConfig

    with pytest.raises(ConfigError, match="http"):
        CoordinatorConfig(runtime_dir="/x", http=address)


def test_without_http_nothing_of_it_listens(base: Path) -> None:
    with process(base / "a", http=None) as child:
        wait_ready(child)
        assert addresses(base) == [""]
        assert not psutil.Process(child.pid).net_connections("tcp")


def test_a_running_coordinator_has_loaded_nothing_heavy(base: Path) -> None:
    with process(base / "a", http="127.0.0.1:0") as child:
        wait_ready(child)
        [address] = addresses(base)
        assert call(address, "/tokenize", {"prompt": "a"}).status == 200
        mapped = [region.path for region in psutil.Process(child.pid).memory_maps()]
        assert any("tokenizers" in path for path in mapped)  # the look would see what is loaded
        assert not [path for path in mapped if any(name in path for name in HEAVY)]


def test_a_service_that_stops_lets_idle_connections_go(base: Path) -> None:
    with process(base / "a", http="127.0.0.1:0") as child:
        wait_ready(child)
        [address] = addresses(base)
        port = int(address.rpartition(":")[2])
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
        idle.request("GET", "/v1/models")
        assert idle.getresponse().read()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10.0) == 0
        idle.close()
