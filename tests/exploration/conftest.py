"""Every exploration runs on channels without sockets, and says nothing of the faults it plays."""

import logging
from collections.abc import Iterator

import pytest

from .loop import channels_without_sockets


@pytest.fixture(autouse=True)
def no_sockets_and_no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with channels_without_sockets():
        yield
    logging.disable(logging.NOTSET)
