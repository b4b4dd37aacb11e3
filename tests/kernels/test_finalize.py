"""finalize copies single positions of every layer and nothing else; rows go where they are sent."""

import torch

from rlt.kernels.reference import finalize, gather_rows, scatter_rows


def test_finalize_copies_every_layer_of_one_position_to_each_target() -> None:
    torch.manual_seed(0)
    kv = torch.randn(12, 3, 2, 4, 2, 5)
    before = kv.clone()
    moves = [(0, 1, 5), (0, 1, 6), (3, 3, 7)]  # source, offset, target
    sources, offsets, targets = torch.tensor(moves).unbind(1)
    finalize(kv, sources, offsets, targets, offsets)
    for source, offset, target in moves:
        assert torch.equal(kv[target, :, :, offset], before[source, :, :, offset])
        kv[target, :, :, offset] = before[target, :, :, offset]
    assert torch.equal(kv, before)


def test_finalize_may_move_a_position_to_another_offset() -> None:
    kv = torch.randn(4, 2, 2, 4, 1, 3)
    want = kv[0, :, :, 2].clone()
    one = torch.tensor
    finalize(kv, one([0]), one([2]), one([3]), one([0]))
    assert torch.equal(kv[3, :, :, 0], want)


def test_rows_are_gathered_and_scattered_by_slot() -> None:
    hidden = torch.arange(12.0).view(4, 3)
    slots = torch.tensor([3, 1])
    rows = gather_rows(hidden, slots)
    assert rows.tolist() == [[9, 10, 11], [3, 4, 5]]
    scatter_rows(hidden, slots, rows * 2)
    assert hidden[:, 0].tolist() == [0, 6, 6, 18]
