"""The HTTP front of real coordinator processes: addresses, what is loaded, and the end."""

import http.client
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlt.coordinator.discovery import find_services
from rlt.runtime.errors import ConfigError

from ..coordinator.test_process import process, wait_ready
from ..system.service import eventually
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


GARBAGE = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00\xff\xfe\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /%2e%2e/%00 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\r\n\r\n",
)


def is_healthy_again(address: str) -> bool:
    try:
        return call(address, "/health").status == 503
    except ConnectionError:
        return False


ABORT = struct.pack("ii", 1, 0)  # a linger of no time: closing resets the connection


def test_no_caller_can_end_the_coordinator(base: Path) -> None:
    with process(base / "a", http="127.0.0.1:0") as child:
        wait_ready(child)
        [address] = addresses(base)
        where = ("127.0.0.1", int(address.rpartition(":")[2]))
        for sent in GARBAGE:
            for _ in range(3):
                with socket.create_connection(where, timeout=10.0) as caller:
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
                    caller.sendall(sent)
        with socket.create_connection(where, timeout=10.0) as caller:
            caller.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
            with pytest.raises(ConnectionError):  # a head without an end
                for _ in range(1000):
                    caller.sendall(b"a" * 65536)
        psutil.Process(child.pid).rlimit(psutil.RLIMIT_NOFILE, (60, 60))
        many = [socket.create_connection(where, timeout=10.0) for _ in range(100)]
        time.sleep(0.3)  # more than it has descriptors for
        for caller in many:
            caller.close()
        eventually(lambda: is_healthy_again(address), "answering after it ran out of descriptors")
        child.send_signal(signal.SIGTERM)
        assert child.wait(10.0) == 0


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
