"""The HTTP front of a coordinator whose workers are scripted, all in this process."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlt.coordinator.http.serving import http_front
from rlt.coordinator.text import CheckpointTokenizer

from ..coordinator.running import Running, running

EMBEDDED = Path(__file__).parents[2] / "launch" / "embedded"


@functools.cache
def tokenizer() -> CheckpointTokenizer:
    return CheckpointTokenizer(EMBEDDED)


@contextmanager
def front(prefill: int = 1, decode: int = 1, **options: Any) -> Iterator[tuple[Running, str]]:
    """The service's handle and its HTTP address."""
    with running(
        prefill,
        decode,
        tokenizer(),
        lambda service, config: http_front(service, config, tokenizer()),
        **{"http": "127.0.0.1:0", **options},
    ) as service:
        yield service, service.service.http_address
