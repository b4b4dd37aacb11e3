"""What the coordinator asks of workers about an attempt, and repeats until it is answered.

Owns which asks are open and what each of them says. A message is built anew at every repeat, from
the attempt as it is then.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import assert_never

from ..connector.asks import AskBook
from ..connector.messages import Cancel, CoordinatorToWorker, Prefill, Resend, Reserve
from ..runtime.errors import InvariantBroken
from ..runtime.types import Generation
from .attempt import Attempt, Role
from .effects import Effect, SendWorker


class AskKind(Enum):
    RESERVE = "reserve"
    PREFILL = "prefill"
    RESEND = "resend"
    CANCEL_PREFILL = "cancel prefill"
    CANCEL_DECODE = "cancel decode"


CANCEL: dict[Role, AskKind] = {
    "prefill": AskKind.CANCEL_PREFILL,
    "decode": AskKind.CANCEL_DECODE,
}


class OpenAsks:
    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self._book: AskBook[tuple[AskKind, Attempt]] = AskBook()

    def ask(self, kind: AskKind, attempt: Attempt, mono_s: float) -> None:
        """Send it, unless it is open already."""
        if self._book.ask((kind, attempt), mono_s):
            self.send(kind, attempt)

    def answered(self, kind: AskKind, attempt: Attempt) -> None:
        self._book.answered((kind, attempt))

    def is_open(self, kind: AskKind, attempt: Attempt) -> bool:
        return (kind, attempt) in self._book

    def drop(self, attempt: Attempt) -> None:
        """Nobody waits for any answer about this attempt."""
        for kind in AskKind:
            self._book.answered((kind, attempt))

    def due(self, mono_s: float) -> list[tuple[AskKind, Attempt, int]]:
        """What is to be sent again now, and how often it was repeated, this time included."""
        return [(*key, self._book.tries(key)) for key in self._book.due(mono_s)]

    def send(self, kind: AskKind, attempt: Attempt) -> None:
        to_prefill = kind in (AskKind.PREFILL, AskKind.CANCEL_PREFILL)
        leg = attempt.prefill if to_prefill else attempt.decode
        self._emit(SendWorker(leg.worker, _message(kind, attempt)))

    @property
    def repeats(self) -> int:
        return self._book.repeats

    def check(self, live: Mapping[Generation, Attempt]) -> None:
        orphans = [
            (kind.value, attempt.generation)
            for kind, attempt in self._book
            if live.get(attempt.generation) is not attempt
        ]
        if orphans:
            raise InvariantBroken(f"asks without an attempt: {orphans}")


def _message(kind: AskKind, attempt: Attempt) -> CoordinatorToWorker:
    generation = attempt.generation
    match kind:
        case AskKind.RESERVE:
            return Reserve(
                generation=generation,
                request=attempt.engine_request,
                prefill=attempt.prefill.worker,
            )
        case AskKind.PREFILL:
            if attempt.reservation is None:
                raise InvariantBroken(f"generation {generation} is to start unreserved")
            return Prefill(
                generation=generation,
                request=attempt.engine_request,
                decode=attempt.decode.worker,
                reservation=attempt.reservation,
            )
        case AskKind.RESEND:
            return Resend(generation=generation, start_index=attempt.request.delivered)
        case AskKind.CANCEL_PREFILL | AskKind.CANCEL_DECODE:
            return Cancel(generation=generation, writer_never_started=attempt.writer_never_started)
        case _:
            assert_never(kind)
