"""Tokens that were produced and not yet confirmed by the coordinator. Nothing else.

A row is kept until the coordinator confirms that it has everything, so that it can ask again on a
gap. Confirmed generations are forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..connector.messages import OutputRow
from ..runtime.types import Generation


@dataclass
class _Log:
    rows: list[OutputRow] = field(default_factory=list)
    outputs: int = 0
    finished: bool = False


class OutputLog:
    def __init__(self) -> None:
        self._logs: dict[Generation, _Log] = {}

    def add(self, row: OutputRow) -> None:
        log = self._logs.setdefault(row.generation, _Log())
        log.rows.append(row)
        log.outputs = row.start_index + len(row.token_ids)
        log.finished = row.finish_reason is not None

    def confirm(self, generation: Generation, outputs: int) -> None:
        """Tokens 0..outputs-1 arrived."""
        log = self._logs.get(generation)
        if log is None:
            return
        log.rows = [row for row in log.rows if row.start_index + len(row.token_ids) > outputs]
        if log.finished and outputs >= log.outputs:
            del self._logs[generation]

    def since(self, generation: Generation, start_index: int) -> tuple[OutputRow, ...]:
        """Every kept row that says something about tokens from start_index on."""
        log = self._logs.get(generation)
        if log is None:
            return ()
        return tuple(r for r in log.rows if r.start_index + len(r.token_ids) > start_index)

    def forget(self, generation: Generation) -> None:
        self._logs.pop(generation, None)

    def outputs(self, generation: Generation) -> int:
        log = self._logs.get(generation)
        return log.outputs if log else 0

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._logs)

    def __len__(self) -> int:
        return len(self._logs)
