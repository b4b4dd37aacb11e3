"""The coordinator as a process: configuration, discovery, signals, and what is left behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rlt.coordinator.client import Client
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.discovery import (
    ServiceRecord,
    discover,
    find_services,
    write_record,
)
from rlt.coordinator.predecessor import in_place_of_predecessor
from rlt.coordinator.service import CoordinatorService
from rlt.runtime.errors import ConfigError, NoPrefillWorker, ServiceUnreachable

from .test_text import EMBEDDED


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlt-b") as folder:  # tmp_path is too long for sockets
        yield Path(folder)


@contextmanager
def process(folder: Path, **options: object) -> Iterator["subprocess.Popen[str]"]:
    config = CoordinatorConfig(
        runtime_dir=str(folder),
        model=str(EMBEDDED),
        **options,  # type: ignore[arg-type]
    )
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "rlt.coordinator",
        msgspec.json.encode(config).decode(),
    ]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.kill()


def wait_ready(child: "subprocess.Popen[str]") -> None:
    assert child.stderr is not None
    for line in child.stderr:
        if "READY" in line:
            return
    raise AssertionError(f"ended with {child.wait()}")


def test_a_killed_service_is_followed_by_one_at_the_same_addresses(base: Path) -> None:
    folder = base / "one"
    anywhere = {
        "worker_endpoint": "tcp://127.0.0.1:*",
        "client_endpoints": (f"ipc://{folder}/c.sock", "tcp://127.0.0.1:0"),
        "http": "127.0.0.1:0",
    }
    records = []
    for _ in range(3):
        with process(folder, **anywhere) as child:
            wait_ready(child)
            [record] = find_services(base)
            records.append(record)
            with Client(record.endpoints[1]) as client:
                assert client.stats()["ready_pairs"] == 0.0
            child.kill()
            child.wait(10.0)
            assert find_services(base) == []
    first, *later = [msgspec.structs.replace(record, pid=0) for record in records]
    assert later == [first, first]
    with process(folder, **anywhere) as child:
        wait_ready(child)
        child.terminate()
        assert child.wait(10.0) == 0
    assert list(folder.iterdir()) == []


def test_a_coordinator_that_takes_anothers_place_is_found_although_a_worker_is_missing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlt.coordinator.service.RESETTLE_S", 0.3)
    folder = base / "one"
    folder.mkdir(mode=0o700)
    config = CoordinatorConfig(runtime_dir=str(folder), expected_prefill=1, expected_decode=1)

    async def run(config: CoordinatorConfig, seconds: float) -> list[int]:
        service = CoordinatorService(config, folder, None)
        with contextlib.closing(service):
            service.bind()
            task = asyncio.ensure_future(service.run())
            await asyncio.sleep(seconds)
            found = [record.pid for record in find_services(base)]
            task.cancel()
            return found

    assert asyncio.run(run(config, 0.6)) == []
    end = subprocess.Popen(["true"])
    end.wait()
    left = ServiceRecord(endpoint="ipc:///x", endpoints=("ipc:///x",), pid=end.pid, model="m")
    write_record(folder, left)
    again = in_place_of_predecessor(config, folder)
    assert (config.resumed, again.resumed) == (False, True)
    assert in_place_of_predecessor(config, folder).resumed  # also if that one is killed, too
    assert asyncio.run(run(again, 0.1)) == []
    write_record(folder, left)
    assert asyncio.run(run(again, 0.8)) == [os.getpid()]
    assert not (folder / "service.json").exists()


@pytest.mark.parametrize("left", [b"", b"{}", b"\x00" * 100])
def test_a_damaged_record_of_a_predecessor_does_not_matter(base: Path, left: bytes) -> None:
    folder = base / "one"
    folder.mkdir(mode=0o700)
    (folder / "service.json").write_bytes(left)
    with process(folder, http=None) as child:
        wait_ready(child)
        assert len(find_services(base)) == 1
        child.terminate()
        assert child.wait(10.0) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_is_found_serves_and_leaves_nothing_behind(base: Path, number: int) -> None:
    folder = base / "one"
    with process(folder) as child:
        wait_ready(child)
        assert folder.stat().st_mode & 0o777 == 0o700
        [record] = find_services(base)
        assert record.pid == child.pid
        with Client(discover(base)) as client:
            assert client.stats()["ready_pairs"] == 0.0
            with pytest.raises(NoPrefillWorker):
                client.generate("hello", deadline_s=0.1)
        child.send_signal(number)
        assert child.wait(10.0) == 0
    assert list(folder.iterdir()) == []


def test_two_services_do_not_share_a_runtime_folder(base: Path) -> None:
    with process(base / "one") as first:
        wait_ready(first)
        with process(base / "one") as second:
            assert second.wait(20.0) == 2
            assert second.stderr is not None and "runtime_dir" in second.stderr.read()
        with Client(discover(base)) as client:
            assert client.active() == ()


def test_a_bad_configuration_is_one_line_that_names_the_option() -> None:
    for text, word in (
        ("{", "configuration"),
        (json.dumps({"runtime_dir": "/tmp/x", "max_quue": 1}), "max_quue"),
        (json.dumps({"runtime_dir": "/tmp/x", "max_queue": 0}), "max_queue"),
    ):
        arguments = [sys.executable, "-P", "-m", "rlt.coordinator", text]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert word in done.stderr and len(done.stderr.splitlines()) == 1


def test_listening_beyond_this_machine_needs_insecure() -> None:
    for endpoint in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:1", "tcp://host:1"):
        with pytest.raises(ConfigError, match="--insecure"):
            CoordinatorConfig(runtime_dir="/tmp/x", client_endpoints=(endpoint,))
        CoordinatorConfig(runtime_dir="/tmp/x", client_endpoints=(endpoint,), insecure=True)
    for endpoint in ("tcp://127.0.0.1:0", "tcp://[::1]:*", "tcp://localhost:1", "ipc:///tmp/x"):
        CoordinatorConfig(runtime_dir="/tmp/x", worker_endpoint=endpoint)


@pytest.mark.parametrize("endpoint", ["inproc://x", "tcp://127.0.0.1", "tcp://:1", "ipc://", "x"])
def test_an_address_that_cannot_work_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        CoordinatorConfig(runtime_dir="/tmp/x", client_endpoints=(endpoint,))


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="runtime_dir"):
        CoordinatorConfig(runtime_dir="/tmp/" + "x" * 100)


# Discovery


def _record(base: Path, name: str, pid: int) -> None:
    (base / name).mkdir(mode=0o700)
    endpoint = f"ipc://{base}/{name}/client.sock"
    record = ServiceRecord(endpoint=endpoint, endpoints=(endpoint,), pid=pid, model="m")
    write_record(base / name, record)


def test_several_services_are_listed_and_one_must_be_named(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLT_CONNECT", raising=False)
    _record(base, "one", os.getpid())
    assert discover(base) == f"ipc://{base}/one/client.sock"
    _record(base, "two", os.getppid())
    with pytest.raises(ServiceUnreachable, match=r"(?s)2 services.*one/client.*two/client"):
        discover(base)
    monkeypatch.setenv("RLT_CONNECT", "tcp://127.0.0.1:1")
    assert discover(base) == "tcp://127.0.0.1:1"


def test_a_dead_services_record_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLT_CONNECT", raising=False)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    _record(base, "dead", ended.pid)
    (base / "broken").mkdir()
    (base / "broken" / "service.json").write_text("{")
    assert find_services(base) == []
    with pytest.raises(ServiceUnreachable, match="no service is running"):
        discover(base)


# Imports


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "rlt.coordinator.client",
            "torch nixl transformers triton numpy tokenizers jinja2 uvloop safetensors",
        ),
        ("rlt.coordinator.service", "torch nixl transformers triton numpy"),
        ("rlt.coordinator.text", "torch nixl transformers triton"),
    ],
)
def test_what_is_imported_stays_light(module: str, heavy: str) -> None:
    code = (
        f"import sys, {module}\n"
        f"loaded = [name for name in {heavy.split()!r} if name in sys.modules]\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_a_program_that_never_closes_its_client_still_ends(base: Path) -> None:
    with process(base / "one") as child:
        wait_ready(child)
        code = f"from rlt.coordinator.client import Client; c = Client({discover(base)!r})"
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code], timeout=20.0, check=False
        )
        assert done.returncode == 0
