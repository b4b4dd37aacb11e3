"""A bounded memory of names: who comes in when it is full pushes the oldest out. Pure."""

from collections.abc import Iterator


class Remembered:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: dict[str, None] = {}  # oldest first

    def add(self, name: str) -> None:
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._limit:
            del self._names[next(iter(self._names))]

    def discard(self, name: str) -> None:
        self._names.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._names))

    def __len__(self) -> int:
        return len(self._names)
