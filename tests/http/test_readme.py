"""The README's curl lines, run as they are written against a service as it is started there."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ..system.service import running

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]
README = (Path(__file__).parents[2] / "README.md").read_text()
WRITTEN = "http://127.0.0.1:8000"


def curl_lines() -> list[str]:
    """Each command of the README that begins with curl, to its end."""
    blocks = [block for block in README.split("```") if block.lstrip().startswith("curl ")]
    return [f"curl {rest.strip()}" for block in blocks for rest in block.split("curl ")[1:]]


def test_the_curl_lines_of_the_readme_work_as_written() -> None:
    lines = curl_lines()
    assert len(lines) == 3
    with running(1, 1, "--threads", "1", model=None) as service:
        said = []
        for line in lines:
            command = line.replace(WRITTEN, service.http)  # the same, unless 8000 is taken
            run = subprocess.run(
                ["bash", "-c", f"{command} -sS --fail-with-body -m 60"],
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stdout + run.stderr
            said.append(run.stdout)
    chat = json.loads(said[0])["choices"][0]
    assert "42" in chat["message"]["content"] and chat["exit_depths"][0] == 4
    assert said[1].count("data: {") > 3 and said[1].endswith("data: [DONE]\n\n")
    assert json.loads(said[2]) == {"status": "ok"}
