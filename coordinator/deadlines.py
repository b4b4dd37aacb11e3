"""When each live request runs out of time. Owns nothing but that."""

import heapq

from .request import Request, RequestPhase


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0

    def add(self, request: Request) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (request.deadline_s, self._serial, request))

    def expired(self, mono_s: float) -> list[Request]:
        """Requests whose time is up. Each is named once; ended ones are forgotten on the way."""
        expired: list[Request] = []
        while self._heap and (
            self._heap[0][0] <= mono_s or self._heap[0][2].phase is RequestPhase.ENDED
        ):
            _, _, request = heapq.heappop(self._heap)
            if request.phase is not RequestPhase.ENDED:
                expired.append(request)
        return expired
