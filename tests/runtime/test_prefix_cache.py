"""Shared pages: found by their tokens, never written, evicted when nobody reads them."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.runtime.errors import InvariantBroken
from rlt.runtime.kv_manager import KVManager, Lease
from rlt.runtime.types import Generation, KVGeometry, KVLayout, TokenRange

G, H, K = Generation(1), Generation(2), Generation(3)
OWNER = (Lease.OWNER,)
PROMPT = tuple(range(1, 10))  # 9 tokens: two pages of 4, and one token


def manager(
    num_blocks: int = 16, layout: KVLayout = "last_exited", prefix_cache: bool = True
) -> KVManager:
    geometry = KVGeometry(
        num_layers=1,
        num_depths=2,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        block_size=4,
        dtype="float32",
        layout=layout,
    )
    return KVManager(num_blocks=num_blocks, geometry=geometry, prefix_cache=prefix_cache)


def compute(kv: KVManager, generation: Generation, prompt: tuple[int, ...]) -> None:
    """Everything of the prompt that is not there yet, then share what may be shared."""
    for depth in range(2):
        start = kv.valid_tokens(generation, depth)
        if start < len(prompt):
            kv.mark_valid(generation, depth, TokenRange(start, len(prompt)))
    kv.publish(generation, len(prompt))
    kv.check()


def run(kv: KVManager, generation: Generation, prompt: tuple[int, ...]) -> int:
    """A whole request; the tokens that it found cached."""
    granted = kv.allocate(generation, len(prompt), OWNER, prompt)
    assert granted is not None
    compute(kv, generation, prompt)
    kv.end_lease(generation, Lease.OWNER)
    kv.check()
    return granted.cached_tokens


def test_a_prompt_finds_the_full_pages_of_an_equal_one() -> None:
    kv = manager()
    assert [run(kv, G, PROMPT), run(kv, H, PROMPT)] == [0, 8]
    usage = kv.usage()
    assert (usage.prefix_hits, usage.prefix_hit_tokens, usage.blocks_cached) == (2, 8, 4)


def test_the_last_prompt_token_is_always_computed() -> None:
    kv = manager()
    run(kv, G, PROMPT[:8])
    assert run(kv, H, PROMPT[:8]) == 4
    assert run(kv, K, PROMPT) == 8


def test_a_prompt_that_differs_in_one_token_finds_only_what_comes_before() -> None:
    kv = manager()
    run(kv, G, PROMPT)
    assert run(kv, H, (*PROMPT[:5], 99, *PROMPT[6:])) == 4
    assert run(kv, K, (99, *PROMPT[1:])) == 0


def test_equal_tokens_after_another_beginning_are_another_page() -> None:
    kv = manager(num_blocks=32)
    run(kv, G, (1, 1, 1, 1, 7, 7, 7, 7, 0))
    run(kv, H, (2, 2, 2, 2))
    assert run(kv, K, (2, 2, 2, 2, 7, 7, 7, 7, 0)) == 4


def test_shared_columns_are_the_same_blocks_and_the_others_are_not() -> None:
    kv = manager()
    first = kv.allocate(G, 9, OWNER, PROMPT)
    compute(kv, G, PROMPT)
    second = kv.allocate(H, 9, OWNER, PROMPT)
    assert first and second
    for mine, other in zip(second.tables, first.tables, strict=True):
        assert mine[:2] == other[:2] and mine[2] != other[2]
    assert kv.valid_tokens(H, 1) == 8
    kv.check()


def test_only_what_is_valid_in_every_plane_can_be_published() -> None:
    kv = manager()
    kv.allocate(G, 9, OWNER, PROMPT)
    kv.mark_valid(G, 0, TokenRange(0, 9))
    with pytest.raises(InvariantBroken, match="before it was written"):
        kv.publish(G, 9)
    assert kv.usage().prefix_hits == 0
    kv.allocate(H, 4, OWNER, PROMPT)
    assert kv.allocation(H).cached_tokens == 0


def test_generated_positions_are_never_published() -> None:
    kv = manager()
    kv.allocate(G, 12, OWNER, PROMPT[:6])
    for depth in range(2):
        kv.mark_valid(G, depth, TokenRange(0, 12))
    kv.publish(G, 12)
    kv.end_lease(G, Lease.OWNER)
    assert kv.usage().blocks_cached == 2, "one page: the second holds generated positions"


def test_of_two_that_compute_the_same_page_at_once_one_publishes_it() -> None:
    kv = manager()
    for generation in (G, H):
        kv.allocate(generation, 9, OWNER, PROMPT)
    compute(kv, G, PROMPT)
    compute(kv, H, PROMPT)
    kv.end_lease(G, Lease.OWNER)
    kv.check()
    assert kv.usage().blocks_cached == 4, "nobody who has its own copy pins the page"
    kv.end_lease(H, Lease.OWNER)
    kv.check()
    assert kv.usage().blocks_cached == 4


def test_unreferenced_pages_are_evicted_least_recently_used_first() -> None:
    kv = manager(num_blocks=12)
    run(kv, G, (1, 1, 1, 1, 0))
    run(kv, H, (2, 2, 2, 2, 0))
    run(kv, K, (1, 1, 1, 1, 0))  # used again
    assert kv.free_blocks() == 12
    kv.allocate(G, 20, OWNER)  # 10 blocks: one page must go
    assert kv.usage().prefix_evictions == 1
    kv.end_lease(G, Lease.OWNER)
    assert [run(kv, H, (2, 2, 2, 2, 0)), run(kv, K, (1, 1, 1, 1, 0))] == [0, 4]


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    kv = manager(num_blocks=8)
    run(kv, G, PROMPT)
    kv.allocate(H, 12, OWNER)  # 6 blocks, 4 are free
    kv.end_lease(H, Lease.OWNER)
    assert run(kv, K, PROMPT) == 4


def test_a_page_that_a_table_reads_is_not_evicted() -> None:
    kv = manager(num_blocks=8)
    kv.allocate(G, 9, OWNER, PROMPT)
    compute(kv, G, PROMPT)
    assert kv.free_blocks() == 2
    assert kv.allocate(H, 5, OWNER) is None
    assert kv.takes(9, PROMPT) == 2
    assert kv.allocate(H, 9, OWNER, PROMPT) is not None
    kv.end_lease(G, Lease.OWNER)
    kv.check()
    assert kv.free_blocks() == 2, "H still reads both pages"


def test_a_writer_that_may_still_write_withdraws_only_what_was_not_shared() -> None:
    kv = manager()
    run(kv, G, PROMPT)
    kv.allocate(H, 9, (Lease.OWNER, Lease.RECEIVE), PROMPT)
    assert kv.quarantine(H) == 2
    kv.end_lease(H, Lease.OWNER)
    kv.check()
    usage = kv.usage()
    assert (usage.blocks_quarantined, usage.blocks_cached, usage.blocks_free) == (2, 4, 14)
    kv.end_quarantine(H)
    kv.check()
    usage = kv.usage()
    assert (usage.blocks_quarantined, usage.blocks_cached, usage.blocks_free) == (0, 4, 16)


def test_growth_takes_a_column_at_a_time_and_says_when_there_is_none() -> None:
    kv = manager(num_blocks=6)
    kv.allocate(G, 4, OWNER)
    assert kv.grow(G, 4) and kv.free_blocks() == 4
    assert kv.grow(G, 5) and kv.free_blocks() == 2
    assert kv.grow(G, 8) and kv.free_blocks() == 2
    assert kv.grow(G, 9) and not kv.grow(G, 13)
    assert len(kv.plane_row(G, 1, 12)) == 3
    kv.check()


def test_truncation_takes_back_validity_and_columns_but_never_a_shared_page() -> None:
    kv = manager()
    kv.allocate(G, 16, OWNER, PROMPT)
    compute(kv, G, PROMPT)
    kv.mark_valid(G, 0, TokenRange(9, 14))
    kv.truncate(G, 10)
    assert [kv.valid_tokens(G, depth) for depth in range(2)] == [10, 9]
    assert kv.free_blocks() == 8
    kv.truncate(G, 10, give_back=True)
    assert kv.free_blocks() == 10
    kv.check()
    with pytest.raises(InvariantBroken, match="shared page"):
        kv.truncate(G, 7)
    kv.lease(G, Lease.PASS)
    with pytest.raises(InvariantBroken, match="cannot go back"):
        kv.truncate(G, 8, give_back=True)


def test_a_suspended_request_comes_back_into_blocks_of_its_own_as_valid_as_it_was() -> None:
    kv = manager()
    run(kv, H, PROMPT)
    kv.allocate(G, 12, OWNER, PROMPT)
    compute(kv, G, PROMPT)
    kv.mark_valid(G, 0, TokenRange(9, 10))
    before = kv.allocation(G)
    kv.suspend(G)
    kv.check()
    assert kv.free_blocks() == 16 and kv.leases(G) == frozenset()
    after = kv.resume(G)
    assert after is not None and after.id != before.id
    assert after.cached_tokens == 0, "a snapshot is written into every block: none may be shared"
    assert [kv.valid_tokens(G, depth) for depth in range(2)] == [10, 9]
    kv.publish(G, 9)
    kv.check()


def test_what_is_leased_to_others_cannot_be_suspended() -> None:
    kv = manager()
    for lease in (Lease.PASS, Lease.SEND, Lease.RECEIVE):
        kv.allocate(G, 4, (Lease.OWNER, lease))
        with pytest.raises(InvariantBroken, match="cannot be suspended"):
            kv.suspend(G)
        kv.end_lease(G, lease)
        kv.end_lease(G, Lease.OWNER)


def test_a_forgotten_suspension_leaves_nothing() -> None:
    kv = manager()
    kv.allocate(G, 4, OWNER)
    kv.suspend(G)
    kv.forget(G)
    assert kv.usage().suspended == 0
    kv.allocate(G, 4, OWNER)
    kv.check()


class Written:
    """What the blocks of a KV manager hold, kept beside it: who may read what, checked apart."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> tokens up to it

    def write(self, generation: Generation, tokens: tuple[int, ...]) -> None:
        for depth in range(2):
            start = self.kv.valid_tokens(generation, depth)
            row = self.kv.plane_row(generation, depth, len(tokens))
            for position in range(start, len(tokens)):
                self.held[row[position // 4], position % 4] = tokens[: position + 1]
            if start < len(tokens):
                self.kv.mark_valid(generation, depth, TokenRange(start, len(tokens)))

    def check(self, generation: Generation, tokens: tuple[int, ...]) -> None:
        for depth in range(2):
            valid = self.kv.valid_tokens(generation, depth)
            row = self.kv.plane_row(generation, depth, max(valid, 1))
            for position in range(valid):
                assert self.held[row[position // 4], position % 4] == tokens[: position + 1]

    def save(self, generation: Generation) -> list[list[dict[int, tuple[int, ...]]]]:
        tables = self.kv.allocation(generation).tables
        return [
            [{o: self.held[b, o] for o in range(4) if (b, o) in self.held} for b in row]
            for row in tables
        ]

    def load(self, generation: Generation, saved: list[list[dict[int, tuple[int, ...]]]]) -> None:
        for row, columns in zip(self.kv.allocation(generation).tables, saved, strict=True):
            for block, entries in zip(row, columns, strict=True):
                self.held |= {(block, offset): tokens for offset, tokens in entries.items()}


ACTIONS = (
    *("start", "start", "write", "write", "grow", "truncate"),
    *("suspend", "resume", "end", "withdraw", "prove"),
)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(1, 4), st.integers(1, 14)), max_size=80
    ),
    layout=st.sampled_from(["last_exited", "shared"]),
    num_blocks=st.integers(8, 24),
)
def test_whatever_happens_nobody_reads_what_was_not_written_for_it(
    steps: list[tuple[str, int, int]], layout: KVLayout, num_blocks: int
) -> None:
    kv = manager(num_blocks, layout)
    memory = Written(kv)
    tokens: dict[Generation, tuple[int, ...]] = {}
    saved: dict[Generation, list[list[dict[int, tuple[int, ...]]]]] = {}
    started: Counter[int] = Counter()
    for action, number, size in steps:
        generation = Generation(number)
        runs = Lease.OWNER in kv.leases(generation)
        prompt = tokens.get(generation, ())
        match action:
            case "start" if not kv.leases(generation) and generation not in saved:
                started[number] += 1
                prompt = (*PROMPT, *range(9, 20))[:size] if number < 4 else (number,) * size
                if kv.allocate(generation, size, OWNER, prompt) is not None:
                    tokens[generation] = prompt
            case "write" if runs:
                reach = min(size, kv.granted_tokens(generation))
                part = prompt[: max(reach, kv.valid_tokens(generation, 0))]
                memory.write(generation, part)
                kv.publish(generation, len(part))
            case "grow" if runs:
                kv.grow(generation, size)
            case "truncate" if kv.leases(generation) == {Lease.OWNER}:
                with suppress(InvariantBroken):  # it would cut a shared page
                    kv.truncate(generation, size, give_back=size % 2 == 0)
            case "suspend" if kv.leases(generation) == {Lease.OWNER}:
                saved[generation] = memory.save(generation)
                kv.suspend(generation)
            case "resume" if generation in saved and kv.resume(generation) is not None:
                memory.load(generation, saved.pop(generation))
            case "end" if runs:
                kv.end_lease(generation, Lease.OWNER)
            case "withdraw" if runs:
                kv.lease(generation, Lease.RECEIVE)
                kv.quarantine(generation)
                kv.end_lease(generation, Lease.OWNER)
            case "prove" if kv.leases(generation) == {Lease.QUARANTINE}:
                kv.end_quarantine(generation)
            case _:
                pass
        kv.check()
        for live, mine in tokens.items():
            if Lease.OWNER in kv.leases(live):
                memory.check(live, mine)
