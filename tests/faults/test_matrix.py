"""Every fault in every stage over both transports: right tokens or the named error, nothing kept.

Each cell is a test; those of one fault and transport share a service. docs/faults.md tells what the
cells are and shows what came of them: a run of all of them writes its table anew.
"""

from collections.abc import Iterator

import pytest

from ..system.namespaces import Refused
from .answers import local_answers
from .asked import Answer
from .matrix import CELLS, Cell, Result
from .matrix_cell import Run
from .matrix_requests import REQUESTS
from .matrix_service import Services
from .matrix_table import write_page, write_results

SAMPLE = {  # of every run; the others are soak
    "P_killed-committed-default",
    "D_killed-decoding-default",
}


def marked(cell: Cell) -> object:
    marks = [pytest.mark.system, *([] if str(cell) in SAMPLE else [pytest.mark.soak])]
    return pytest.param(cell, id=str(cell), marks=marks)


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return local_answers(REQUESTS)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    services = Services()
    yield services
    services.close()


@pytest.fixture(scope="module")
def results() -> Iterator[list[Result]]:
    results: list[Result] = []
    yield results
    write_results(results)
    write_page(results)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cell", [marked(cell) for cell in CELLS])
def test_each_request_ends_right_or_by_name_and_nothing_is_kept(
    cell: Cell, services: Services, expected: dict[str, Answer], results: list[Result]
) -> None:
    try:
        with services.of(cell.setting) as served:
            run = Run(cell, served.faults, served.client, expected, served.network)
            results.append(run.result())
    except Refused as refused:
        pytest.skip(str(refused))
