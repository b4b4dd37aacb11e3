"""Which position rows the reference attention gathers, and how segments are padded together.

Pure index arithmetic, done once per pass. Segments of kv_length 0 are left out. Filling up repeats
a segment's own position 0, which is always written, and is masked: a stale position is never even
read.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Padding is cheap next to one more gather and attention call per layer: measured on a CPU, such a
# call costs about as much as copying this many positions of K and V.
FREE_PADDING_POSITIONS = 64
PADDING_SHARE = 0.25
LONGEST_MASKED = 16  # query positions that get a mask of their own; see reference.py for longer


@dataclass(frozen=True)
class GatherGroup:
    """Segments with one query length, padded to one KV length.

    queries: [segments * query_length] int64 rows of q, or None when they are all of q in order.
    rows: [2 * segments * kv_length] int64 rows of the flat pool's layer 0: K's, then V's.
    mask: [segments, 1, query_length, kv_length], 0 or -inf, or None when nothing is hidden.
    causal: long queries of equal kv_length, without a mask: each hides what comes after it.
    """

    segments: int
    query_length: int
    kv_length: int
    queries: Tensor | None
    rows: Tensor
    mask: Tensor | None
    causal: bool


def plan_groups(
    *,
    query_lengths: Ints,
    kv_lengths: Ints,
    tables: Ints,
    block_size: int,
    block_rows: int,
    most_positions: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[GatherGroup]:
    real = kv_lengths > 0
    members = [
        part
        for length in np.unique(query_lengths[real])
        for padded in _alike(
            np.flatnonzero(real & (query_lengths == length)), kv_lengths, int(length)
        )
        for part in _split_by_size(padded, kv_lengths, most_positions)
    ]
    first_query = np.cumsum(query_lengths) - query_lengths
    groups = []
    for chosen in members:
        query_length = int(query_lengths[chosen[0]])
        long = query_length > LONGEST_MASKED
        queries = None
        if len(members) > 1 or not real.all():
            queries = (first_query[chosen][:, None] + np.arange(query_length)).reshape(-1)
        lengths = kv_lengths[chosen]
        rows = _position_rows(tables[chosen], lengths, block_size, block_rows)
        both = np.concatenate((rows.reshape(-1), rows.reshape(-1) + block_size))
        groups.append(
            GatherGroup(
                segments=len(chosen),
                query_length=query_length,
                kv_length=rows.shape[1],
                queries=None if queries is None else torch.from_numpy(queries).to(device),
                rows=torch.from_numpy(both).to(device),
                mask=None if long else _mask(lengths, query_length, device, dtype),
                causal=long,
            )
        )
    return groups


def _alike(chosen: Ints, kv_lengths: Ints, query_length: int) -> list[Ints]:
    """Parts that attend together: long queries of one KV length, short ones padded."""
    if query_length <= LONGEST_MASKED:
        return _split_by_padding(chosen, kv_lengths)
    lengths = kv_lengths[chosen]
    return [chosen[lengths == length] for length in np.unique(lengths)]


def _split_by_padding(chosen: Ints, kv_lengths: Ints) -> list[Ints]:
    """Cut segments of one query length into parts whose padding stays small.

    One part keeps the given order, so that a uniform batch needs no reordering of its queries.
    """
    lengths = kv_lengths[chosen]
    if _padding_is_small(int(lengths.max()), len(chosen), int(lengths.sum())):
        return [chosen]
    order = chosen[np.argsort(-lengths, kind="stable")]
    parts: list[list[int]] = []
    longest = total = 0
    for index in order.tolist():
        length = int(kv_lengths[index])
        if parts and _padding_is_small(longest, len(parts[-1]) + 1, total + length):
            parts[-1].append(index)
            total += length
        else:
            parts.append([index])
            longest = total = length
    return [np.array(part, dtype=np.int64) for part in parts]


def _split_by_size(chosen: Ints, kv_lengths: Ints, most_positions: int) -> list[Ints]:
    """Cut a part so that one gather stays within the scratch buffer, or is a single segment."""
    count = max(1, most_positions // int(kv_lengths[chosen].max()))
    return [chosen[start : start + count] for start in range(0, len(chosen), count)]


def _padding_is_small(longest: int, count: int, total: int) -> bool:
    padding = longest * count - total
    return padding <= max(FREE_PADDING_POSITIONS, PADDING_SHARE * total)


def _position_rows(tables: Ints, lengths: Ints, block_size: int, block_rows: int) -> Ints:
    """[segments, longest] rows of K in layer 0; padding repeats position 0."""
    longest = int(lengths.max())
    blocks = tables[:, : -(-longest // block_size)]
    rows = (blocks[:, :, None] * block_rows + np.arange(block_size)).reshape(len(tables), -1)
    rows = rows[:, :longest]
    if int(lengths.min()) == longest:
        return np.ascontiguousarray(rows)
    return np.where(np.arange(longest) < lengths[:, None], rows, rows[:, :1])


def _mask(
    lengths: Ints, query_length: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    longest = int(lengths.max())
    if query_length == 1 and int(lengths.min()) == longest:
        return None
    last_seen = lengths[:, None] - query_length + np.arange(query_length)
    hidden = torch.from_numpy(np.arange(longest) > last_seen[:, :, None]).to(device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)
