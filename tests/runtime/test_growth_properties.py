"""Growth, preemption and shared prefixes in pools that are too small: exact, fair, nothing lost."""

from typing import Any

from hypothesis import given, note
from hypothesis import settings as examples
from hypothesis import strategies as st

from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import EngineEvent
from rlt.runtime.types import EngineRequest, Generation, KVLayout

from .growing_executor import GrowingExecutor
from .helpers import at_rest, engine_request, local_core, outcomes
from .oracle import oracle

PREFIXES = ((), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7), (1, 2, 9, 9, 9))


@st.composite
def requests(draw: st.DrawFn) -> list[EngineRequest]:
    made = []
    for generation in range(1, draw(st.integers(1, 8)) + 1):
        tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        made.append(
            engine_request(
                generation,
                (*draw(st.sampled_from(PREFIXES)), *tail),
                max_tokens=draw(st.integers(1, 6) | st.integers(8, 16)),
                threshold=draw(st.sampled_from([0.3, 1.0])),
                mode=draw(st.sampled_from(["ouro", "ouro_delayed"])),
                ignore_eos=draw(st.booleans()),
                priority=draw(st.integers(0, 1)),
            )
        )
    return made


@st.composite
def scheduling(draw: st.DrawFn) -> dict[str, Any]:
    chunk_tokens = draw(st.integers(1, 6))
    return {
        "chunk_tokens": chunk_tokens,
        "max_in_flight": draw(st.integers(1, 3)),
        "refill": draw(st.booleans()),
        "mixed_batches": draw(st.booleans()),
        "prefix_cache": draw(st.booleans()),
        "admission": draw(st.sampled_from(["full", "incremental", "incremental"])),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.2])),
    }


def columns_of(request: EngineRequest, block_size: int) -> int:
    return -(-request.capacity_tokens // block_size)


class Watch:
    """Whoever is suspended gives way to someone more urgent who still runs."""

    def __init__(self, executor: GrowingExecutor, made: list[EngineRequest]) -> None:
        self._executor = executor
        self._urgency = {r.generation: (r.priority, r.generation) for r in made}
        self._seen = 0

    def check(self, core: EngineCore) -> None:
        fresh = self._executor.suspended[self._seen :]
        self._seen += len(fresh)
        runs = [g for g, phase in core.live().items() if phase not in ("waiting", "suspended")]
        for generation in fresh:
            assert any(self._urgency[g] < self._urgency[generation] for g in runs)


ACTIONS = ["add", "add", "step", "step", "step", "finish", "finish", "cancel"]


@examples(max_examples=400, deadline=None)
@given(
    made=requests(),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=150),
    victims=st.lists(st.integers(1, 8), max_size=6),
    spare_columns=st.integers(0, 4),
    num_slots=st.integers(1, 5),
    settings=scheduling(),
    block_size=st.integers(1, 4),
    layout=st.sampled_from(["last_exited", "shared"]),
    snapshot_bytes=st.sampled_from([0, 2000, 1 << 30]),
    real_bytes=st.sampled_from([None, 1500]),
)
def test_whatever_grows_shares_or_is_preempted_gives_what_it_gives_alone(
    made: list[EngineRequest],
    actions: list[str],
    victims: list[int],
    spare_columns: int,
    num_slots: int,
    settings: dict[str, Any],
    block_size: int,
    layout: KVLayout,
    snapshot_bytes: int,
    real_bytes: int | None,
) -> None:
    planes = 4 if layout == "last_exited" else 1
    largest = max(columns_of(request, block_size) for request in made)
    executor = GrowingExecutor(
        num_blocks=(largest + spare_columns) * planes,
        num_slots=num_slots,
        block_size=block_size,
        eager=False,
        layout=layout,
        snapshot_bytes=snapshot_bytes,
        real_bytes=None if real_bytes is None else max(real_bytes, snapshot_bytes),
    )
    core = local_core(executor, **settings)
    events: list[EngineEvent] = []
    to_add, to_cancel = list(made), list(victims)
    cancelled: set[Generation] = set()
    watch = Watch(executor, made)

    def step() -> None:
        events.extend(core.step())
        watch.check(core)

    for action in actions:
        if action == "add" and to_add:
            core.add_local(executor.know(to_add.pop(0)))
        elif action == "cancel" and to_cancel:
            generation = Generation(to_cancel.pop(0))
            if core.cancel(generation):
                cancelled.add(generation)
        elif action == "finish" and executor.pass_queued:
            executor.finish_pass()
        else:
            step()
        core.check()
    for request in to_add:
        core.add_local(executor.know(request))
    executor.eager = True
    for _ in range(3000):
        step()
        core.check()
        if core.idle():
            break
    assert core.idle(), core.live()
    at_rest(core)
    assert not executor.snapshots, "a snapshot outlived its request"
    note(f"{len(executor.suspended)} suspended, {core.statistics()['prefix_hits']} hits")
    ended = outcomes(events)
    assert {request.generation for request in made} == set(ended)
    for request in made:
        outcome, expected = ended[request.generation], oracle(request, layout)
        assert outcome.released == 1 and outcome.error is None
        if request.generation in cancelled:
            assert outcome.tokens == expected[0][: len(outcome.tokens)]
        else:
            assert outcome.result == expected
