"""A service's statistics as records, and as the table that an operator reads. Pure.

Reads what the coordinator tells and believes no figure: a worker's heartbeat may say anything.
"""

from collections.abc import Sequence

import msgspec

HEAD = ("WORKER", "ROLE", "PID", "INCARNATION", "LIVE", "FREE", "QUARANTINED", "STATE", "PAIRS")


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """pairs: names of the workers with which it has a ready pair."""

    worker: str
    incarnation: str
    role: str
    pid: int
    live: int
    values: dict[str, float]
    draining: bool = False
    pairs: tuple[str, ...] = ()


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """workers: prefill workers first, then by name."""

    values: dict[str, float]
    workers: tuple[WorkerRow, ...]

    def find(self, name: str) -> WorkerRow | None:
        return next((worker for worker in self.workers if worker.worker == name), None)


def view_of(statistics: dict[str, object]) -> ServiceView:
    values = {name: value for name, value in statistics.items() if name != "workers"}
    view = msgspec.convert({"values": values, "workers": statistics["workers"]}, ServiceView)
    rows = sorted(view.workers, key=lambda row: (row.role != "prefill", row.worker))
    return msgspec.structs.replace(view, workers=tuple(rows))


def draw_status(address: str, view: ServiceView) -> list[str]:
    figures = ", ".join(
        f"{words} {view.values.get(name, 0):.0f}"
        for name, words in (
            ("ready_pairs", "ready pairs"),
            ("queue_length", "queued"),
            ("live_requests", "live requests"),
            ("retries", "retries"),
            ("replays", "replays"),
            ("expelled", "expelled workers"),
        )
    )
    if not view.workers:
        return [f"{address}: {figures}", "no worker has joined"]
    return [f"{address}: {figures}", *_table([HEAD, *map(_cells, view.workers)])]


def _cells(row: WorkerRow) -> tuple[str, ...]:
    free, total = (row.values.get(name, 0) for name in ("blocks_free", "blocks_total"))
    return (
        row.worker,
        row.role,
        str(row.pid),
        row.incarnation,
        str(row.live),
        f"{free:.0f}/{total:.0f}",
        f"{row.values.get('blocks_quarantined', 0):.0f}",
        "draining" if row.draining else "serving",
        " ".join(sorted(row.pairs)) or "-",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]
