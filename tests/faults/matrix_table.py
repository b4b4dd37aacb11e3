"""The results of the matrix: a file with a line for each cell, and the table in docs/faults.md.

Pure but for those two files. The table is written only from a whole matrix, and its times are in
coarse steps, so that it changes when the behaviour does.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from .matrix import CELLS, FAULTS, STAGES, TRANSPORTS, Result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "fault-matrix.jsonl"
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- table: made by make soak -->\n", "<!-- end of the table -->\n"
STEPS_S = (2.5, 6, 15, 40)
HEAD = (
    "| fault | stage | transport | workers | requests end with | retries | replays "
    "| ended within | released within | quarantined blocks |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def write_results(results: Sequence[Result]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    lines = [msgspec.json.encode(result).decode() + "\n" for result in _sorted(results)]
    RESULTS.write_text("".join(lines))


def write_page(results: Sequence[Result], page: Path = PAGE) -> bool:
    """False, and nothing is written, unless every cell has a result."""
    if len(results) != len(CELLS):
        return False
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table(results) + END + after)
    return True


def table(results: Sequence[Result]) -> str:
    return HEAD + "".join(_row(result) for result in _sorted(results))


def _sorted(results: Sequence[Result]) -> list[Result]:
    transports = list(TRANSPORTS)
    return sorted(
        results,
        key=lambda r: (
            FAULTS.index(r.fault),  # type: ignore[arg-type]
            transports.index(r.transport),
            STAGES.index(r.stage),  # type: ignore[arg-type]
        ),
    )


def _row(result: Result) -> str:
    counts = (result.retries, result.replays)
    within = (_step(result.ended_s), _step(result.released_s))
    words = (result.fault, result.stage, result.transport, result.team, result.end)
    row = (*words, *counts, *within, result.quarantined)
    return f"| {' | '.join(str(cell) for cell in row)} |\n"


def _step(seconds: float) -> str:
    return next((f"{step:g} s" for step in STEPS_S if seconds <= step), f"{seconds:.0f} s")
