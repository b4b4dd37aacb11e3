"""The command line: what it accepts, how it refuses, what --help says."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlt.coordinator.config import CoordinatorConfig
from rlt.launch.cli import coordinator_config, worker_configs
from rlt.launch.options import COORDINATOR, TABLE, WORKER
from rlt.launch.parser import Option, build_parser
from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import ConfigError

COMMANDS = {COORDINATOR: "rlt.launch.cli", WORKER: "rlt.launch.worker"}
ALL = [option for options in TABLE.values() for option in options]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_with_its_unit_and_default(command: str) -> None:
    shown = " ".join(run(COMMANDS[command], "--help").stdout.split())
    for option in ALL:
        if command in option.commands:
            unit = re.escape(option.unit or "switch")
            pattern = rf"{option.flag} .*?\[{unit}; (required|default: [^\]]+)\]"
            assert re.search(pattern, shown), option.flag


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prefil", "1"], "--prefil"),
        (["--num-slots", "zero"], "--num-slots"),
        (["--num-slots", "0"], "--num-slots"),
        (["--dtype", "float16"], "--dtype"),
        (["--deadline-s", "-1"], "--deadline-s"),
        (["--deadline-s", "nan"], "--deadline-s"),
        (["--memory-fraction", "1.5"], "--memory-fraction"),
        (["--listen", "somewhere"], "--listen"),
        (["--model", "/nowhere"], "--model"),
        (["--prefill"], "--prefill"),
    ],
)
def test_a_bad_option_is_named_with_exit_code_2(arguments: Sequence[str], named: str) -> None:
    result = run(COMMANDS[COORDINATOR], *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and named in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--listen", "tcp://0.0.0.0:0"], "--insecure"),
        (["--heartbeat-s", "8"], "--heartbeat-timeout-s"),
        (["--worker-listen", "tcp://127.0.0.1:0"], "--worker-listen"),
        (["--runtime-dir", "/proc/nowhere"], "--runtime-dir"),
    ],
)
def test_values_that_cannot_work_together_are_named_too(
    arguments: Sequence[str], named: str, tmp_path: Path
) -> None:
    base = [] if "--runtime-dir" in arguments else ["--runtime-dir", str(tmp_path / "r")]
    result = run(COMMANDS[COORDINATOR], *base, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and named in result.stderr


def test_a_worker_needs_a_role_and_a_coordinator() -> None:
    result = run(COMMANDS[WORKER])
    assert result.returncode == 2
    assert "--role" in result.stderr and "--coordinator" in result.stderr


@pytest.mark.parametrize("name", ["a/b", "x" * 300, "a\nb"])
def test_a_workers_name_must_be_able_to_name_its_connection_and_its_socket(
    name: str, tmp_path: Path
) -> None:
    base = ["--role", "prefill", "--coordinator", "ipc:///x", "--runtime-dir", str(tmp_path / "r")]
    result = run(COMMANDS[WORKER], *base, f"--name={name}")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and "--name" in result.stderr


def test_the_defaults_are_those_of_the_config_records(tmp_path: Path) -> None:
    options = build_parser(COORDINATOR, "", TABLE).parse_args([])
    config = coordinator_config(options, tmp_path)
    assert config == CoordinatorConfig(
        runtime_dir=str(tmp_path), model=config.model, expected_prefill=1, expected_decode=1
    )
    prefill, decode = worker_configs(options, config, tmp_path)
    plain = EngineConfig(model=str(config.model))
    assert prefill.engine == decode.engine
    for name in ("dtype", "block_size", "num_blocks", "chunk_tokens", "num_slots"):
        assert getattr(prefill.engine, name) == getattr(plain, name)
    assert (prefill.worker, decode.worker) == ("prefill-0", "decode-0")
    assert prefill.coordinator == config.workers_at


def test_options_reach_every_worker(tmp_path: Path) -> None:
    words = "--prefill 2 --decode 3 --num-blocks 77 --threads 3 --transfer-timeout-s 4 --listen "
    words += f"ipc://{tmp_path}/a --listen tcp://127.0.0.1:0 --log-level debug"
    options = build_parser(COORDINATOR, "", TABLE).parse_args(words.split())
    config = coordinator_config(options, tmp_path)
    assert config.clients_at == (f"ipc://{tmp_path}/a", "tcp://127.0.0.1:0")
    workers = worker_configs(options, config, tmp_path)
    assert [w.role for w in workers] == ["prefill"] * 2 + ["decode"] * 3
    assert len({w.listen for w in workers}) == 5
    for worker in workers:
        assert (worker.engine.num_blocks, worker.engine.threads) == (77, 3)
        assert (worker.transfer_timeout_s, worker.log_level) == (4.0, "debug")


def test_an_open_peer_address_needs_insecure(tmp_path: Path) -> None:
    words = ["--peer-listen", "tcp://10.0.0.1:0"]
    options = build_parser(COORDINATOR, "", TABLE).parse_args(words)
    with pytest.raises(ConfigError, match="--insecure"):
        worker_configs(options, coordinator_config(options, tmp_path), tmp_path)


def test_no_two_options_share_a_flag_in_one_command() -> None:
    for command in COMMANDS:
        flags = [option.flag for option in ALL if command in option.commands]
        assert len(flags) == len(set(flags))


def test_every_option_that_sets_a_field_names_a_real_one() -> None:
    def names_a_field(option: Option) -> bool:
        return option.sets is None or option.sets[1] in option.sets[0].__struct_fields__

    assert all(names_a_field(option) for option in ALL)
