"""The table in docs/faults.md: whole, in order, and only from a run of every cell."""

import random
from pathlib import Path

from .matrix import CELLS, FAULTS, STAGES, TRANSPORTS, Result
from .matrix_table import BEGIN, END, HEAD, PAGE, table, write_page

RESULTS = [
    Result(c.fault, c.stage, c.setting.transport, "1P1D", c.end, 1, 0, 0.3, 3.1, 28) for c in CELLS
]


def test_there_is_a_cell_for_every_fault_stage_and_transport() -> None:
    cells = {(cell.fault, cell.stage, cell.setting.transport) for cell in CELLS}
    assert len(CELLS) == len(cells) == len(FAULTS) * len(STAGES) * len(TRANSPORTS) == 96


def test_the_table_does_not_depend_on_the_order_of_the_run() -> None:
    shuffled = random.Random(1).sample(RESULTS, len(RESULTS))
    assert table(shuffled) == table(RESULTS)
    assert table(RESULTS).splitlines()[2] == (
        "| cancel | reserving | default | 1P1D | cancelled | 1 | 0 | 2.5 s | 6 s | 28 |"
    )


def test_only_a_whole_matrix_changes_the_page_and_only_its_table(tmp_path: Path) -> None:
    page = tmp_path / "faults.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert not write_page(RESULTS[:-1], page)
    assert page.read_text() == f"before\n{BEGIN}old\n{END}after\n"
    assert write_page(RESULTS, page)
    assert page.read_text() == f"before\n{BEGIN}{table(RESULTS)}{END}after\n"


def test_the_page_has_the_place_of_the_table_and_a_row_for_every_stage_and_fault() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert all(f"| {stage} |" in text for stage in STAGES)
    assert HEAD.count("|") == 22
