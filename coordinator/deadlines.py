"""When each live request runs out of time. Owns nothing but that.

Holds no request that has ended, and never more than two entries for each that lives.
"""

import heapq

from .request import Request


class Deadlines:
    def __init__(self) -> None:
        self._live: dict[int, Request] = {}  # by number
        self._heap: list[tuple[float, int]] = []  # some of these numbers have ended

    def add(self, request: Request) -> None:
        self._live[request.number] = request
        heapq.heappush(self._heap, (request.deadline_s, request.number))

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._live.pop(request.number, None)
        if len(self._heap) > 2 * len(self._live):
            self._heap = [(live.deadline_s, number) for number, live in self._live.items()]
            heapq.heapify(self._heap)

    def expired(self, mono_s: float) -> list[Request]:
        """Requests whose time is up. Each is named once."""
        expired: list[Request] = []
        while self._heap and self._heap[0][0] <= mono_s:
            _, number = heapq.heappop(self._heap)
            request = self._live.pop(number, None)
            if request is not None:
                expired.append(request)
        return expired
