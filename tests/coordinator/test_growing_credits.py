"""Credits at a decode worker whose requests grow: what they begin with, not what they may need."""

import pytest

from rlt.coordinator.credits import Books
from rlt.coordinator.router import Choice, Pair, choose_pair, need_of
from rlt.runtime.events import Refuse, Wait
from rlt.runtime.interfaces import AdmissionLimits
from rlt.runtime.types import EngineRequest, ExitSettings, Generation, KVGeometry, SamplingParams

GEOMETRY = KVGeometry(
    num_layers=1,
    num_depths=4,
    num_kv_heads=1,
    head_dim=1,
    hidden_size=1,
    block_size=4,
    dtype="float32",
)
PAIR = Pair("p", "d")


def request(max_tokens: int) -> EngineRequest:
    return EngineRequest(
        generation=Generation(1),
        prompt=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        exit=ExitSettings(1.0, 1, 4),
    )


def choose(max_tokens: int, *, grows: bool, taken_columns: int) -> Choice:
    """A pool of 10 columns at D, some of which are promised away."""
    books = Books()
    for worker, can_grow in (("p", False), ("d", grows)):
        books.open(
            worker,
            AdmissionLimits(
                num_blocks=40,
                num_slots=4,
                num_receive_slots=4,
                max_positions=100,
                grows=can_grow,
            ),
        )
    held = need_of(request(4 * taken_columns - 2), GEOMETRY)
    if taken_columns:
        books.take("d", Generation(9), held.decode)
    need = need_of(request(max_tokens), GEOMETRY)
    return choose_pair(need, [PAIR], ["p"], ["d"], books, {}, {})


@pytest.mark.parametrize("grows", [False, True])
def test_a_long_answer_is_routed_to_a_pool_that_has_room_for_its_beginning(grows: bool) -> None:
    choice = choose(38, grows=grows, taken_columns=9)
    assert choice == PAIR if grows else isinstance(choice, Wait)


def test_where_not_even_the_beginning_fits_it_waits() -> None:
    assert isinstance(choose(38, grows=True, taken_columns=10), Wait)


def test_what_can_never_fit_is_refused_though_it_could_begin() -> None:
    assert isinstance(choose(39, grows=True, taken_columns=0), Refuse)


def test_a_request_that_never_grows_takes_what_it_needs() -> None:
    need = need_of(request(1), GEOMETRY)
    assert need.decode == need.decode_first
