"""A real service for tests of its HTTP front: launcher, coordinator and workers as processes."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlt.launch.running import running_service

SMALL = ("--num-blocks", "2048", "--threads", "1", "--chunk-tokens", "64")


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, str]]:
    """Where clients and browsers find it."""
    with (
        tempfile.TemporaryDirectory(prefix="rlt-h") as folder,
        running_service(["--http", "127.0.0.1:0", "--runtime-dir", folder, *arguments]) as service,
    ):
        record = Path(service.endpoint.removeprefix("ipc://")).parent / "service.json"
        yield service.endpoint, json.loads(record.read_text())["http"]
