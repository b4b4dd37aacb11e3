"""All metrics of one service, and their text for whoever scrapes them.

Owns the registry. Nothing of it is global, so that several services may live in one process.
"""

from collections.abc import Callable

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from ..snapshot import Snapshot
from .reading import StateReading
from .watching import Watch


class Metrics:
    """watch: what the state is to tell. read(): where the rest is looked up; once."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.watch = Watch(self._registry)

    def read(self, look: Callable[[], Snapshot]) -> None:
        self._registry.register(StateReading(look))

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type: what `accept` (an HTTP header) prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
