"""The stamped events of one request, from the coordinator and from both workers.

Owns the list of stamps of a request. Worker stamps keep the time that the worker gave them; sorting
is by that time, so clocks of different machines should agree.
"""

from collections.abc import Iterable

from ..runtime.types import Stamp


class Timeline:
    def __init__(self) -> None:
        self._stamps: dict[Stamp, None] = {}  # the same one may come by two ways

    def mark(self, event: str, at_s: float, worker: str = "") -> None:
        self._stamps[Stamp(event, at_s, worker)] = None

    def add(self, stamps: Iterable[Stamp], worker: str) -> None:
        """Take a worker's stamps over, naming the worker where it did not name itself."""
        for stamp in stamps:
            named = stamp.worker or worker
            copy = Stamp(stamp.event, stamp.at_s, named, stamp.depth, stamp.num_bytes)
            self._stamps[copy] = None

    def stamps(self) -> tuple[Stamp, ...]:
        return tuple(sorted(self._stamps, key=lambda stamp: stamp.at_s))
