"""A client of the service: asks, cancels, and complains about what it must not hear.

Owns two of the properties: its requests end once and get the right tokens without gap or double,
and nothing more comes of a request after its cancel was answered.
"""

from typing import Any

from rlt.connector.messages import Accepted, CancelDone, CancelRequest, Deltas, Generate, Rejected
from rlt.runtime.interfaces import Delta
from rlt.runtime.types import FinishReason

from .bounds import Bounds
from .records import Broken, Came, Look


class ClientProcess:
    name = "K"
    now_s = 0.0

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.next = 0  # which request is asked for next
        self.live: dict[str, list[int]] = {}  # request ID -> tokens so far
        self.cancelling: set[str] = set()
        self.asked: dict[int, str] = {}
        self.outcomes: list[str] = []

    def apply(self, event: tuple[Any, ...]) -> Came:
        match event:
            case ("begin",):
                return Came()
            case ("submit",):
                return self._submit()
            case ("cancel", str(name)):
                self.cancelling.add(name)
                return Came((("C", CancelRequest(request_id=name)),))  # type: ignore[arg-type]
            case ("hear", "C", message):
                self._hear(message)
                return Came()
            case _:
                raise AssertionError(event)

    def _submit(self) -> Came:
        asked = self._bounds.requests[self.next]
        self.next += 1
        name = str(asked.request_id)
        assert name not in self.live
        self.live[name] = []
        self.asked[self.next] = name
        return Came((("C", Generate(submission=self.next, request=asked)),))

    def _hear(self, message: Any) -> None:
        match message:
            case Accepted() | Rejected():
                if isinstance(message, Rejected):
                    raise Broken(f"rejected: {message.code}: {message.error}")
            case CancelDone(request_id=name):
                self.cancelling.discard(name)
                if name in self.live:
                    raise Broken(f"request {name} was cancelled and not ended")
            case Deltas(deltas=deltas):
                for delta in deltas:
                    self._take(delta)
            case _:
                pass

    def _take(self, delta: Delta) -> None:
        name = str(delta.request_id)
        tokens = self.live.get(name)
        if tokens is None:
            raise Broken(f"output of request {name}, which has ended: {delta}")
        if delta.start_index != len(tokens):
            raise Broken(f"request {name} has {len(tokens)} tokens and hears of {delta}")
        tokens += delta.token_ids
        right = self._bounds.right_tokens(name)
        if tokens != right[: len(tokens)]:
            raise Broken(f"request {name} got {tokens}, right is {right}")
        if delta.finish_reason is None:
            return
        if delta.finish_reason is FinishReason.LENGTH and tokens != right:
            raise Broken(f"request {name} ended with {tokens}, right is {right}")
        del self.live[name]
        self.outcomes.append(delta.error_code or delta.finish_reason.value)

    def look(self) -> Look:
        return Look(clean=not self.live and not self.cancelling)
