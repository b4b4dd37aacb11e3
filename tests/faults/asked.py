"""One request at a service: every delta that came, when, and what it comes to.

Owns nothing but what it heard. It is heard on the client's thread, so times are those of the
arrival, whatever the test waits for meanwhile.
"""

import threading
import time

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import Delta, GenerateRequest
from rlt.runtime.types import FinishReason

Answer = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, exit depths


class Asked:
    def __init__(self, client: Client, request: GenerateRequest) -> None:
        self.request = request
        self.ended_s: float | None = None
        self._deltas: list[Delta] = []
        self._over = threading.Event()
        self.asked_s = time.monotonic()
        client.submit_to(request, self._hear)

    def _hear(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self.ended_s = time.monotonic()
            self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._over.wait(timeout_s)

    @property
    def tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in list(self._deltas))

    @property
    def end(self) -> str:
        """`right` is not its business: the finish reason, or the error's code."""
        last = self._deltas[-1]
        if last.finish_reason is FinishReason.ERROR:
            return last.error_code or ""
        return last.finish_reason.value if last.finish_reason is not None else "not ended"

    @property
    def error(self) -> str | None:
        return self._deltas[-1].error

    @property
    def retries(self) -> int:
        return sum(stamp.event == "retried" for stamp in self._deltas[-1].timeline)

    def answer(self) -> Answer:
        """Of a stream that must be whole: no gap, nothing twice, nothing after its end."""
        tokens: list[int] = []
        depths: list[int] = []
        for delta in list(self._deltas):
            assert delta.start_index == len(tokens), (delta, tokens)
            tokens += delta.token_ids
            depths += delta.exit_depths
        ends = [d for d in self._deltas if d.finish_reason is not None]
        assert ends == self._deltas[-1:], f"{self.request.request_id} did not end once: {ends}"
        return tuple(tokens), tuple(depths)
