"""A whole service through its commands: real processes, NIXL, the embedded model."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlt.coordinator.client import Client
from rlt.launch.cli import EMBEDDED_MODEL
from rlt.launch.running import running_service
from rlt.runtime.errors import ServiceError

from .script import wait_gone

pytestmark = pytest.mark.system

QUESTION = "Ana has 17 apples. Ben gives Ana 25 apples. How many apples does Ana have?"
ANSWER = "17 + 25 = 42. The answer is 42."
SMALL = ("--num-blocks", "256", "--num-slots", "8", "--num-receive-slots", "8")


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path: Unix sockets have a limit that pytest's own folders may pass."""
    folder = Path(tempfile.mkdtemp(prefix="rlt-test-"))
    yield folder
    left = list(folder.glob("**/s-*"))
    shutil.rmtree(folder)
    assert left == [], "a service left its folder behind"


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def pids_in(text: str) -> dict[str, int]:
    return {name: int(pid) for name, pid in re.findall(r"started (\S+) \(process (\d+)\)", text)}


def test_one_question_through_the_whole_service(base: Path) -> None:
    log = base / "log"
    with (
        log.open("w") as stderr,
        running_service(["--runtime-dir", str(base), *SMALL], stderr=stderr) as service,
    ):
        asked = run(
            "rlt.launch.ask", QUESTION, "--connect", service.endpoint, "--depths", "--timeline"
        )
        raw = run("rlt.launch.ask", QUESTION, "--connect", service.endpoint, "--json")
        bad = run("rlt.launch.ask", QUESTION, "--connect", service.endpoint, "--max-loops", "9")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.startswith(f"{ANSWER}\nexit depths: 4 ")
    assert re.search(r"decode-0 +received$", asked.stdout, re.M) and "| 60.0 KiB" in asked.stdout
    assert all(line.startswith("{") for line in raw.stdout.splitlines())
    assert bad.returncode == 1 and bad.stderr.startswith("error: invalid_request: ")
    started = pids_in(log.read_text())
    assert set(started) == {"coordinator", "prefill-0", "decode-0"}
    assert all(wait_gone(pid) for pid in started.values())


@pytest.mark.soak  # it starts services one after another
def test_rlt_ask_finds_the_one_service_and_says_when_there_is_none(base: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(base), "RLT_CONNECT": ""}
    none = run("rlt.launch.ask", QUESTION, **environment)
    assert none.returncode == 2
    assert none.stderr.startswith("error: no service is running")
    with running_service(SMALL, environment=environment):
        found = run("rlt.launch.ask", QUESTION, **environment)
        cut = subprocess.run(
            f"{sys.executable} -P -m rlt.launch.ask '{QUESTION}' | head -c 2",
            shell=True,
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
    assert (cut.stdout, cut.stderr) == (ANSWER[:2], "")
    assert (found.returncode, found.stdout) == (0, ANSWER + "\n"), found.stderr


@pytest.mark.soak  # tests/launch/test_operating.py and tests/faults kill workers in every run
def test_a_worker_that_is_killed_is_reported_and_the_rest_serves(base: Path) -> None:
    log = base / "log"
    arguments = ["--runtime-dir", str(base), "--decode", "2", *SMALL]
    with (
        log.open("w") as stderr,
        running_service(arguments, stderr=stderr) as service,
        Client(service.endpoint) as client,
    ):
        os.kill(pids_in(log.read_text())["decode-0"], signal.SIGKILL)
        wait_for_text(log, "decode worker decode-0 is gone: its process")
        answer = client.generate([{"role": "user", "content": QUESTION}], timeout_s=60)
        assert answer.text == ANSWER
    assert "decode-0 (process" in log.read_text()


def wait_for_text(log: Path, text: str) -> None:
    """The launcher's own pipe is the event here; a file can only be read again."""
    with subprocess.Popen(
        ["tail", "-n", "+1", "-F", str(log)], stdout=subprocess.PIPE, text=True
    ) as tail:
        assert tail.stdout is not None
        found = any(text in line for line in tail.stdout)
        tail.kill()
    assert found


@pytest.mark.soak  # tests/system/test_bad_input.py starts with damaged ones in every run
def test_a_damaged_checkpoint_ends_the_launcher_with_its_name(base: Path) -> None:
    damaged = base / "damaged"
    shutil.copytree(EMBEDDED_MODEL, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = run("rlt.launch.cli", "--runtime-dir", str(base), "--model", str(damaged))
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.search(r"^(prefill|decode)-0 +\| error: .*model.safetensors", result.stderr, re.M)
    assert "stopping everything" in result.stderr


def test_an_address_in_use_ends_the_launcher_with_its_name(base: Path) -> None:
    arguments = ["--runtime-dir", str(base), "--prefill", "0", "--decode", "0"]
    with running_service([*arguments, "--listen", "tcp://127.0.0.1:0"]) as service:
        result = run("rlt.launch.cli", *arguments, "--listen", service.endpoint)
    assert result.returncode == 2
    assert f"error: cannot listen at {service.endpoint}" in result.stderr


def test_a_worker_started_elsewhere_joins_by_tcp(base: Path) -> None:
    """Port 0 cannot be told to others before it is known, so this service has no local workers
    and its log says where workers dial in."""
    log = base / "log"
    arguments = ["--runtime-dir", str(base), "--prefill", "0", "--decode", "0"]
    arguments += ["--worker-listen", "tcp://127.0.0.1:0"]
    with log.open("w") as stderr, running_service(arguments, stderr=stderr) as service:
        found = re.search(r"workers dial (tcp://\S+),", log.read_text())
        assert found
        workers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "rlt.launch.worker", "--role", role),
                    *("--coordinator", found[1], "--runtime-dir", str(base), *SMALL),
                    *("--peer-listen", "tcp://127.0.0.1:0"),
                ],
                stderr=subprocess.DEVNULL,
            )
            for role in ("prefill", "decode")
        ]
        with Client(service.endpoint) as client:
            answer = client.generate([{"role": "user", "content": QUESTION}], timeout_s=60)
        assert answer.text == ANSWER
    assert [worker.wait(timeout=30) for worker in workers] == [0, 0]


def test_a_service_that_cannot_start_is_an_error_of_the_helper_too(base: Path) -> None:
    with (
        pytest.raises(ServiceError, match="exit code 2"),
        running_service(["--runtime-dir", str(base), "--num-slots", "none"]),
    ):
        pass


@pytest.mark.soak
def test_eight_services_at_once_do_not_clash(base: Path) -> None:
    def serve(_: int) -> tuple[str, str]:
        arguments = ["--runtime-dir", str(base), "--threads", "1", *SMALL]
        with running_service(arguments) as service, Client(service.endpoint) as client:
            result = client.generate([{"role": "user", "content": QUESTION}], timeout_s=120)
            return service.endpoint, result.text

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(serve, range(8)))
    assert {text for _, text in results} == {ANSWER}
    assert len({endpoint for endpoint, _ in results}) == 8


def test_the_demo_gives_three_right_answers(base: Path) -> None:
    result = run("rlt.launch.demo", XDG_RUNTIME_DIR=str(base))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exit depths: 4 ") == 3
    assert "3 of 3 answers are right" in result.stdout
