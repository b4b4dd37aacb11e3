"""Many open streams on one coordinator: benchmarks/http_streams.py, small here, whole in soak."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "http_streams.py"


def measured(*options: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-P", str(BENCHMARK), *options],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    assert result["requests"] == result["configuration"]["requests"]
    assert result["wrong"] == 0
    return result


def test_no_token_of_many_streams_is_lost_doubled_or_out_of_order() -> None:
    result = measured("--streams", "100", "--requests", "300", "--tokens", "20", "--step-s", "0.05")
    assert result["tokens"] == 300 * 20
    assert result["lag_p99_ms"] < 50


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_500_streams_leave_the_loop_quick_and_the_memory_flat() -> None:
    result = measured()
    assert result["lag_p99_ms"] < 50
    first, *_, last = result["memory_mb"][1:]  # after the first tenth, caches are full
    assert last - first < 5
