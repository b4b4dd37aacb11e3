"""P and D with shared prefixes, growth and preemption: every answer exact, and nothing lost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rlt.runtime.config import SchedulerConfig
from rlt.runtime.events import Released, Reservation, Wait
from rlt.runtime.interfaces import Quarantined, QuarantineEnded, ReceiveEnded
from rlt.runtime.types import EngineRequest, Generation, KVLayout

from .growing_executor import GrowingExecutor
from .helpers import at_rest, engine_request, outcomes
from .oracle import oracle
from .scripted_handoff import Pair, Side

G = Generation(1)
PROMPT = (1, 2, 3, 4, 5, 6, 7)


class GrowingPair(Pair):
    def __init__(
        self,
        *,
        layout: KVLayout = "last_exited",
        p_blocks: int = 80,
        d_blocks: int = 80,
        d_slots: int = 3,
        **settings: Any,
    ) -> None:
        sides = [
            Side(
                GrowingExecutor(
                    num_blocks=blocks, num_slots=slots, num_receive_slots=3, layout=layout
                ),
                config=SchedulerConfig(**{"chunk_tokens": 3, "prefix_cache": True} | settings),
            )
            for blocks, slots in ((p_blocks, 4), (d_blocks, d_slots))
        ]
        super().__init__(*sides)

    def start(self, request: EngineRequest) -> Any:
        for side in (self.prefill, self.decode):
            assert isinstance(side.executor, GrowingExecutor)
            side.executor.know(request)
        return super().start(request)

    def seed(self, side: Side, tokens: tuple[int, ...]) -> None:
        """Let one side compute a prompt that begins with `tokens`, for its cache."""
        assert isinstance(side.executor, GrowingExecutor)
        request = engine_request(1000 + len(side.executor.plans), (*tokens, 19), max_tokens=1)
        side.core.add_local(side.executor.know(request))
        while not side.core.idle():
            side.step()

    def sent(self) -> list[tuple[int, int, int]]:
        """(plane, start, stop) of what is posted and not delivered yet."""
        orders = self.prefill.transfers.posted
        return sorted((o.depth, *_bounds(o.range)) for o in orders if o.depth is not None)


def _bounds(span: Any) -> tuple[int, int]:
    return span.start, span.stop


@pytest.mark.parametrize("on_d", range(4))
@pytest.mark.parametrize("on_p", range(4))
def test_p_sends_what_d_lacks_whoever_had_it_cached(on_d: int, on_p: int) -> None:
    pair = GrowingPair()
    if on_d:
        pair.seed(pair.decode, PROMPT[: 2 * on_d])
    if on_p:
        pair.seed(pair.prefill, PROMPT[: 2 * on_p])
    computed = pair.prefill.core.statistics()["prefill_tokens"]
    request = engine_request(1, PROMPT, max_tokens=5)
    answer = pair.start(request)
    assert isinstance(answer, Reservation) and answer.cached_tokens == 2 * on_d
    for _ in range(30):
        pair.prefill.step()
    assert pair.prefill.core.statistics()["prefill_tokens"] - computed == 7 - 2 * on_p
    for plane in range(4):
        ranges = [(start, stop) for depth, start, stop in pair.sent() if depth == plane]
        positions = [p for start, stop in ranges for p in range(start, stop)]
        assert positions == list(range(2 * on_d, 7))
    pair.settle()
    assert outcomes(pair.decode.events)[G].result == oracle(request)
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)


def test_a_peer_that_may_still_write_withdraws_only_what_was_not_shared() -> None:
    pair = GrowingPair()
    pair.seed(pair.decode, PROMPT[:4])
    pair.start(engine_request(1, PROMPT, max_tokens=4))
    pair.decode.core.cancel(G)
    assert pair.decode.step(Quarantined(G)) == [Released(G, quarantined_blocks=3 * 4)]
    numbers = pair.decode.core.statistics()
    assert numbers["blocks_cached"] == 2 * 4
    at_rest(pair.decode.core)
    assert pair.decode.step(QuarantineEnded(G)) == []
    numbers = pair.decode.core.statistics()
    assert numbers["blocks_quarantined"] == 0 and numbers["blocks_cached"] == 2 * 4
    at_rest(pair.decode.core)


def test_a_receive_that_ends_early_publishes_nothing() -> None:
    pair = GrowingPair()
    pair.decode.core.reserve(engine_request(1, PROMPT))
    pair.decode.step(ReceiveEnded(G))
    assert pair.decode.core.statistics()["blocks_cached"] == 0
    at_rest(pair.decode.core)


def test_d_preempts_for_an_older_request_and_both_answers_stand() -> None:
    pair = GrowingPair(d_blocks=7 * 4, admission="incremental", prefix_cache=False)
    made = [engine_request(n, (n, 2, 3), max_tokens=11, threshold=1.0) for n in (1, 2)]
    for request in made:
        assert isinstance(pair.start(request), Reservation)
    pair.settle()
    assert isinstance(pair.decode.executor, GrowingExecutor)
    assert pair.decode.executor.suspended, "the pool held both: the test shows nothing"
    assert G not in pair.decode.executor.suspended, "the older one was preempted"
    for request in made:
        assert outcomes(pair.decode.events)[request.generation].result == oracle(request)
    at_rest(pair.decode.core)


def test_nothing_is_reserved_while_a_suspended_request_waits_to_come_back() -> None:
    pair = GrowingPair(d_blocks=7 * 4, admission="incremental", prefix_cache=False)
    for n in (1, 2):
        pair.start(engine_request(n, (n, 2, 3), max_tokens=11, threshold=1.0))
    while "suspended" not in pair.decode.core.live().values():
        pair.prefill.step()
        pair.deliver()
        pair.decode.step()
    answer = pair.decode.core.reserve(engine_request(3, (1,), max_tokens=1))
    assert isinstance(answer, Wait) and "suspended" in answer.reason
    pair.settle()
    assert isinstance(pair.start(engine_request(3, (1,), max_tokens=1)), Reservation)


def test_who_does_not_fit_beside_a_quarantine_waits_alone_until_it_ends() -> None:
    pair = GrowingPair(d_blocks=7 * 4, admission="incremental", prefix_cache=False)
    large, small, lost = (
        engine_request(n, (n, 2, 3), max_tokens=most, threshold=1.0)
        for n, most in ((1, 11), (2, 3), (3, 3))
    )
    for request in (large, small, lost):
        assert isinstance(pair.start(request), Reservation)
    pair.cancel(lost.generation)
    pair.stop_writer(lost.generation, proof=False)  # 2 or 3 of 7 columns; the large one needs 7

    def run_until_ended(generation: Generation) -> None:
        for _ in range(300):
            pair.prefill.step()
            pair.deliver()
            pair.decode.step()
            if generation not in pair.decode.core.live():
                return
        raise AssertionError(f"live: {pair.decode.core.live()}")

    run_until_ended(small.generation)
    while pair.decode.core.live() != {large.generation: "suspended"}:
        pair.decode.step()
    later = engine_request(4, (4, 2), max_tokens=4, threshold=1.0)
    assert isinstance(pair.start(later), Reservation), "nobody is held back for it"
    run_until_ended(later.generation)
    numbers = pair.decode.core.statistics()
    pair.decode.step()
    assert pair.decode.core.statistics()["passes"] == numbers["passes"], "and it does not spin"
    pair.prove(lost.generation)
    pair.settle()
    ended = outcomes(pair.decode.events)
    for request in (large, small, later):
        assert ended[request.generation].result == oracle(request)
    at_rest(pair.decode.core)


def test_small_reservations_do_not_starve_a_large_one() -> None:
    pair = GrowingPair(d_blocks=10 * 4, prefix_cache=False)
    held = engine_request(1, (1, 2), max_tokens=9)
    assert isinstance(pair.start(held), Reservation)
    large = engine_request(2, (3, 4), max_tokens=17)
    assert isinstance(pair.decode.core.reserve(large), Wait)
    passed = 0
    for number in range(3, 30):
        small = engine_request(number, (5,), max_tokens=1)
        if isinstance(pair.decode.core.reserve(small), Reservation):
            passed += 1
            pair.decode.core.cancel(small.generation)
            pair.decode.step(ReceiveEnded(small.generation))
    assert passed == 8, "the bound on passing is 8"
    pair.settle()
    assert isinstance(pair.decode.core.reserve(large), Reservation)


def test_a_cancelled_waiting_reservation_holds_nobody_back() -> None:
    pair = GrowingPair(d_blocks=10 * 4, prefix_cache=False)
    pair.start(engine_request(1, (1, 2), max_tokens=9))
    core, large = pair.decode.core, engine_request(2, (3, 4), max_tokens=17)
    assert isinstance(core.reserve(large), Wait)
    for number in range(3, 11):
        assert isinstance(core.reserve(engine_request(number, (5,), max_tokens=1)), Reservation)
        core.cancel(Generation(number))
        pair.decode.step(ReceiveEnded(Generation(number)))
    small = engine_request(99, (5,), max_tokens=1)
    held_back = core.reserve(small)
    assert isinstance(held_back, Wait) and "passed" in held_back.reason
    assert not core.cancel(large.generation), "it is not live: it only waits"
    assert isinstance(core.reserve(small), Reservation)


@st.composite
def requests(draw: st.DrawFn) -> list[EngineRequest]:
    return [
        engine_request(
            generation,
            (
                *PROMPT[: draw(st.integers(0, 7))],
                *draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)),
            ),
            max_tokens=draw(st.integers(1, 10)),
            threshold=draw(st.sampled_from([0.4, 1.0])),
            ignore_eos=draw(st.booleans()),
            priority=draw(st.integers(0, 1)),
        )
        for generation in range(1, draw(st.integers(1, 7)) + 1)
    ]


ACTIONS = [
    *("start", "start", "p", "p", "d", "d", "deliver", "deliver", "deliver"),
    *("cancel", "lose", "lose", "prove"),
]


@examples(max_examples=250, deadline=None)
@given(
    made=requests(),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 9)), max_size=150),
    layout=st.sampled_from(["last_exited", "shared"]),
    d_columns=st.integers(10, 16),
    d_slots=st.integers(1, 4),
    max_in_flight=st.integers(1, 2),
    admission=st.sampled_from(["full", "incremental", "incremental"]),
    prefix_cache=st.booleans(),
)
def test_whatever_the_order_every_request_ends_once_and_is_exact(
    made: list[EngineRequest],
    actions: list[tuple[str, int]],
    layout: KVLayout,
    d_columns: int,
    d_slots: int,
    max_in_flight: int,
    admission: str,
    prefix_cache: bool,
) -> None:
    planes = 4 if layout == "last_exited" else 1
    pair = GrowingPair(
        layout=layout,
        p_blocks=9 * planes,
        d_blocks=d_columns * planes,
        d_slots=d_slots,
        max_in_flight=max_in_flight,
        admission=admission,
        prefix_cache=prefix_cache,
    )
    left, started, cancelled = list(made), set[Generation](), set[Generation]()
    lost: set[Generation] = set()  # withdrawn at D, and not proved yet
    for action, number in actions:
        generation = Generation(number)
        match action:
            case "start" if left:
                if isinstance(pair.start(left[0]), Reservation):
                    started.add(left.pop(0).generation)
            case "p":
                pair.prefill.step()
            case "d":
                pair.decode.step()
            case "deliver":
                pair.deliver(number)
            case "cancel" | "lose" if generation in started - cancelled:
                cancelled.add(generation)
                pair.cancel(generation)
                pair.stop_writer(generation, proof=action == "cancel")
                if action == "lose":
                    lost.add(generation)
            case "prove":  # perhaps of one that was never withdrawn
                pair.prove(generation)
                lost.discard(generation)
            case _:
                pass
        pair.prefill.core.check()
        pair.decode.core.check()
    for generation in lost:
        pair.prove(generation)
    while left:
        answer = pair.start(left[0])
        if isinstance(answer, Reservation):
            started.add(left.pop(0).generation)
        pair.prefill.step()
        pair.deliver()
        pair.decode.step()
    pair.settle()
    at_rest(pair.prefill.core)
    at_rest(pair.decode.core)
    assert isinstance(pair.decode.executor, GrowingExecutor)
    assert not pair.decode.executor.snapshots
    numbers = pair.decode.core.statistics()
    assert (numbers["blocks_quarantined"], numbers["slots_withdrawn"]) == (0, 0)
    limits = pair.decode.executor.admission_limits()
    assert numbers["receive_slots_free"] == limits.num_receive_slots
    decoded, computed = outcomes(pair.decode.events), outcomes(pair.prefill.events)
    for request in made:
        if request.generation in started:
            outcome, expected = decoded[request.generation], oracle(request, layout)
            assert outcome.released == computed[request.generation].released == 1
            assert outcome.tokens == expected[0][: len(outcome.tokens)]
            assert request.generation in cancelled or outcome.result == expected


def _let_end_who_fits(
    pair: GrowingPair, wanted: set[Generation], made: list[EngineRequest]
) -> None:
    """Whatever is quarantined, nobody waits for those that do not fit beside it."""
    core, geometry = pair.decode.core, pair.decode.executor.capabilities().geometry
    for _ in range(3000):
        pair.prefill.step()
        pair.deliver()
        pair.decode.step()
        numbers = core.statistics()
        usable = numbers["blocks_total"] - numbers["blocks_quarantined"]
        fits = {r.generation for r in made if geometry.blocks(r.capacity_tokens) <= usable}
        if not fits & wanted & core.live().keys():
            return
    raise AssertionError(f"live: {core.live()}")


@examples(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 14)), min_size=2, max_size=6),
    losing=st.sets(st.integers(1, 6), min_size=1, max_size=3),
    actions=st.lists(st.sampled_from(["start", "p", "d", "deliver", "lose"]), max_size=80),
    spare_columns=st.integers(0, 3),
    max_in_flight=st.integers(1, 3),
    prefix_cache=st.booleans(),
)
def test_beside_a_quarantine_whoever_fits_ends_and_the_others_when_it_ends(
    sizes: list[tuple[int, int]],
    losing: set[int],
    actions: list[str],
    spare_columns: int,
    max_in_flight: int,
    prefix_cache: bool,
) -> None:
    made = [
        engine_request(number, (number, *range(1, prompt)), max_tokens=most, threshold=1.0)
        for number, (prompt, most) in enumerate(sizes, start=1)
    ]
    largest = max(-(-request.capacity_tokens // 2) for request in made)
    pair = GrowingPair(
        d_blocks=(largest + spare_columns) * 4,
        admission="incremental",
        prefix_cache=prefix_cache,
        max_in_flight=max_in_flight,
    )
    left, to_lose = list(made), sorted(losing, reverse=True)
    started, lost = set[Generation](), set[Generation]()
    for action in (*actions, "start", "start"):
        if action == "start" and left and isinstance(pair.start(left[0]), Reservation):
            started.add(left.pop(0).generation)
        elif action == "lose" and to_lose:
            generation = Generation(to_lose.pop())
            if generation in started:
                lost.add(generation)
                pair.cancel(generation)
                pair.stop_writer(generation, proof=False)
        elif action == "p":
            pair.prefill.step()
        elif action == "d":
            pair.decode.step()
        elif action == "deliver":
            pair.deliver()
    _let_end_who_fits(pair, started - lost, made)
    for generation in lost:
        pair.prove(generation)
    pair.settle()
    at_rest(pair.decode.core)
    ended = outcomes(pair.decode.events)
    for request in made:
        if request.generation in started - lost:
            assert ended[request.generation].result == oracle(request)
