"""Blocks: granted once, kept while anybody has a reason, readable only where written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.errors import InvariantBroken
from rlt.runtime.kv_manager import KVManager, Lease
from rlt.runtime.types import Generation, KVGeometry, TokenRange

G, H = Generation(1), Generation(2)


def manager(num_blocks: int = 12) -> KVManager:
    geometry = KVGeometry(
        num_layers=1,
        num_depths=2,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        block_size=4,
        dtype="float32",
    )
    return KVManager(num_blocks=num_blocks, geometry=geometry)


def test_an_allocation_covers_every_plane_and_shares_no_block() -> None:
    kv = manager()
    granted = kv.allocate(G, 5, (Lease.OWNER,))
    assert granted is not None
    assert [len(row) for row in granted.tables] == [2, 2]
    assert len({block for row in granted.tables for block in row}) == 4
    assert kv.plane_row(G, 1, 4) == granted.tables[1][:1]
    assert kv.plane_row(G, 1, 5) == granted.tables[1]


def test_what_does_not_fit_now_takes_nothing() -> None:
    kv = manager()
    kv.allocate(G, 20, (Lease.OWNER,))
    assert kv.allocate(H, 9, (Lease.OWNER,)) is None
    assert kv.usage().blocks_free == 2
    kv.check()


def test_blocks_return_only_with_the_last_lease_and_then_the_epoch_moves() -> None:
    kv = manager()
    kv.allocate(G, 4, (Lease.OWNER, Lease.RECEIVE))
    kv.lease(G, Lease.PASS)
    kv.lease(G, Lease.PASS)
    for reason in (Lease.OWNER, Lease.PASS, Lease.RECEIVE):
        kv.end_lease(G, reason)
        assert (kv.usage().blocks_free, kv.usage().epoch) == (10, 0)
    assert kv.leases(G) == {Lease.PASS}
    kv.end_lease(G, Lease.PASS)
    assert (kv.usage().blocks_free, kv.usage().epoch) == (12, 1)
    assert kv.leases(G) == frozenset()


def test_an_allocation_id_is_never_given_again() -> None:
    kv = manager()
    first = kv.allocate(G, 4, (Lease.OWNER,))
    kv.end_lease(G, Lease.OWNER)
    second = kv.allocate(G, 4, (Lease.OWNER,))
    assert first and second and first.id != second.id


def test_quarantined_blocks_are_held_and_counted_until_the_quarantine_ends() -> None:
    kv = manager()
    kv.allocate(G, 4, (Lease.OWNER, Lease.RECEIVE))
    assert kv.quarantine(G) == 2
    with pytest.raises(InvariantBroken, match="no quarantine to end"):
        kv.end_quarantine(G)  # its request lives
    kv.end_lease(G, Lease.OWNER)
    usage = kv.usage()
    assert (usage.blocks_quarantined, usage.blocks_free, kv.usable_blocks()) == (2, 10, 10)
    with pytest.raises(InvariantBroken):
        kv.end_lease(G, Lease.QUARANTINE)
    assert kv.allocate(H, 24, (Lease.OWNER,)) is None
    kv.check()
    kv.end_quarantine(G)
    after = kv.usage()
    assert (after.blocks_quarantined, after.blocks_free, kv.usable_blocks()) == (0, 12, 12)
    assert after.epoch > usage.epoch and kv.leases(G) == frozenset()
    kv.check()
    assert kv.allocate(H, 24, (Lease.OWNER,)) is not None


def test_only_what_a_peer_may_write_is_quarantined_and_only_once() -> None:
    kv = manager()
    kv.allocate(G, 4, (Lease.OWNER, Lease.RECEIVE))
    kv.allocate(H, 4, (Lease.OWNER, Lease.SEND))
    kv.quarantine(G)
    for generation in (G, H):
        with pytest.raises(InvariantBroken, match="no writer"):
            kv.quarantine(generation)
    kv.end_lease(G, Lease.OWNER)
    kv.end_quarantine(G)
    with pytest.raises(InvariantBroken):
        kv.end_quarantine(G)
    assert kv.usage().blocks_quarantined == 0
    kv.check()


def test_a_lease_that_is_not_held_cannot_end() -> None:
    kv = manager()
    kv.allocate(G, 4, (Lease.OWNER,))
    with pytest.raises(InvariantBroken, match="no send lease"):
        kv.end_lease(G, Lease.SEND)


def test_validity_grows_per_plane_and_without_gaps() -> None:
    kv = manager()
    kv.allocate(G, 8, (Lease.OWNER,))
    kv.mark_valid(G, 0, TokenRange(0, 5))
    assert (kv.valid_tokens(G, 0), kv.valid_tokens(G, 1)) == (5, 0)
    for gap in (TokenRange(6, 7), TokenRange(4, 6), TokenRange(5, 9)):
        with pytest.raises(InvariantBroken):
            kv.mark_valid(G, 0, gap)
    kv.mark_valid(G, 0, TokenRange(5, 8))


def test_a_granted_generation_cannot_be_granted_again() -> None:
    kv = manager()
    kv.allocate(G, 4, (Lease.OWNER,))
    with pytest.raises(InvariantBroken):
        kv.allocate(G, 4, (Lease.OWNER,))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 12)), max_size=80))
def test_whatever_is_granted_and_ended_no_block_is_lost(steps: list[tuple[int, int, int]]) -> None:
    kv = manager()
    for action, number, tokens in steps:
        generation = Generation(number)
        leases = kv.leases(generation)
        if action == 0 and not leases:
            kv.allocate(generation, tokens, (Lease.OWNER, Lease.RECEIVE))
        elif action == 1 and Lease.OWNER in leases:
            kv.end_lease(generation, Lease.OWNER)
        elif action == 2 and Lease.RECEIVE in leases:
            kv.end_lease(generation, Lease.RECEIVE)
        elif action == 3 and Lease.RECEIVE in leases:
            kv.quarantine(generation)
        elif action == 4 and leases == {Lease.QUARANTINE}:
            kv.end_quarantine(generation)
        kv.check()
        held = sum(kv.quarantined_blocks(Generation(n)) for n in range(1, 6))
        assert kv.usage().blocks_quarantined == held
