"""Bytes of all kinds into every decoder and state machine: nobody fails, and books stay sound.

`benchmarks/fuzz.py` drives the same targets with coverage as its guide; what it found is below.
"""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt.connector.codec import Decoder, encode
from rlt.connector.messages import CoordinatorToWorker, Prefill, Reserve
from rlt.runtime.errors import ProtocolError

from ..runtime.helpers import engine_request, local_core
from ..runtime.simulated_executor import SimulatedExecutor
from .making import Draw, Maker, fields_of, twisted
from .targets import TARGETS, UNIONS

EXAMPLES = int(os.environ.get("RLT_FUZZ_EXAMPLES", "60"))


def fuzzed(target: Callable[[bytes], None], examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=1, max_size=600))
    def run(data: bytes) -> None:
        target(data)

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_break(name: str) -> None:
    fuzzed(TARGETS[name], EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_break_for_long(name: str) -> None:
    fuzzed(TARGETS[name], 50 * EXAMPLES)


@pytest.mark.parametrize("direction", UNIONS)
def test_every_message_of_every_direction_can_be_made_and_comes_back(direction: str) -> None:
    """The fuzzer itself: it reaches every message, with and without its optional fields."""
    decoder: Decoder[object] = Decoder(UNIONS[direction])
    made = set()
    for seed in range(400):
        maker = Maker(Draw(seed.to_bytes(2, "little") * 200))
        try:
            message = maker.message(UNIONS[direction])
            frame = encode(message)
        except OverflowError:
            continue
        found = decoder.decode(frame)
        assert type(found) is type(message)
        made.add(type(message))
        twisted(frame, maker.draw)
    kinds = getattr(UNIONS[direction], "__args__", (UNIONS[direction],))
    assert made == set(kinds) and all(fields_of(kind) is not None for kind in kinds)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": -(1 << 63)},
        {"prompt": ()},
        {"prompt": (-1,)},
        {"prompt": (1, 20)},
        {"generation": -1},
        {"generation": 1 << 63},
        {"max_loops": 5},
        {"min_loops": 0},
        {"threshold": float("nan")},
        {"mode": "trace", "trace": (4,)},
        {"mode": "trace", "trace": (1,) * 9},
    ],
)
def test_a_request_that_no_coordinator_can_have_made_is_refused_by_the_engine(
    changes: dict[str, object],
) -> None:
    core = local_core(SimulatedExecutor())
    fields = {"generation": 1, **changes}
    request = engine_request(**fields)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        core.add_local(request)
    core.check()
    assert core.idle()


def test_reserve_and_prefill_are_messages_of_the_coordinator() -> None:
    """The two asks that the engines' targets twist."""
    assert {Reserve, Prefill} <= set(CoordinatorToWorker.__args__)
