"""The fences that rlt relies on, tried on real processes: a sample of benchmarks/fences.py.

A writer is hit in the middle of WRITEs of 128 MiB; what lands after the memory was used again
counts.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fences.py"
FENCED = ("killed-destroyed", "destroyed-killed", "stopped-destroyed-killed")


def tried(*options: str, timeout_s: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", str(BENCHMARK), "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    relied_on = [one for one in results if one["must_hold"]]
    assert [one for one in relied_on if one["landed_most"] or one["faults"]] == [], run.stderr
    assert run.returncode == 0, run.stderr
    return results


@pytest.mark.parametrize(
    ("transport", "repeat"), [("default", "1"), pytest.param("tcp", "1", marks=pytest.mark.soak)]
)
def test_memory_is_safe_from_a_writer_that_was_reaped_and_whose_agent_was_destroyed(
    transport: str, repeat: str
) -> None:
    rows = ("--only", *FENCED)
    results = tried(
        *rows, "--transport", transport, "--repeat", repeat, "--polled-s", "0.2", timeout_s=90
    )
    assert [one["name"] for one in results] == list(FENCED)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_fence_holds_again_and_again() -> None:
    results = tried("--repeat", "20", timeout_s=1700)
    by_name = {(one["name"], one["transport"]): one for one in results}
    for transport in ("default", "tcp"):
        assert by_name["stopped", transport]["landed_in"], "the experiment sees no write at all"
        for name in FENCED:
            assert by_name[name, transport]["in_flight"], f"{name} never met a write"
