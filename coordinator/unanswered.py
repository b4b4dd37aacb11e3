"""A client's asks that have no answer yet, each with the message that is sent again until it has.

Owns when each is due again. A broken connection loses what was on the way, so everything is due at
once when a new one is welcomed. Never sends anything.
"""

from collections.abc import Hashable

from ..connector.asks import AskBook
from ..connector.messages import ClientToCoordinator

REPEAT_S = 2.0  # a service that is only slow need not hear everything twice
LONGEST_S = 8.0


class Unanswered:
    def __init__(self) -> None:
        self._book: AskBook[Hashable] = AskBook(first_s=REPEAT_S, longest_s=LONGEST_S)
        self._messages: dict[Hashable, ClientToCoordinator] = {}

    def add(self, key: Hashable, message: ClientToCoordinator, mono_s: float) -> None:
        self._book.ask(key, mono_s)
        self._messages[key] = message

    def answered(self, key: Hashable) -> None:
        self._book.answered(key)
        self._messages.pop(key, None)

    def due(self, mono_s: float) -> list[ClientToCoordinator]:
        return [self._messages[key] for key in self._book.due(mono_s)]

    def all(self) -> list[ClientToCoordinator]:
        """Oldest first."""
        return list(self._messages.values())

    def __len__(self) -> int:
        return len(self._messages)
