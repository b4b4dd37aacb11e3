"""Paged KV operations in plain torch: the oracle for every other kernel, and the CPU path.

The pool is kv: [num_blocks, layers, K|V, block_size, kv_heads, head_dim], contiguous. Owns no
memory. Reads only positions below a segment's kv_length, whatever stands behind them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .gather_plan import GatherGroup
from .scratch import GatherScratch
from .segments import Segments

CAUSAL_ROWS = 128  # query rows in one call, over the heads that share a KV head


def store_kv(keys_values: Tensor, kv: Tensor, layer: int, segments: Segments) -> None:
    """keys_values: [tokens, 2 * kv_heads * head_dim]. Writes each query's own K and V in place;
    padding is skipped."""
    width = kv.shape[4] * kv.shape[5]
    if segments.stored is not None:
        keys_values = keys_values.index_select(0, segments.stored)
    _layer_rows(kv, layer).index_copy_(0, segments.write_rows, keys_values.reshape(-1, width))


def paged_attention(query: Tensor, kv: Tensor, layer: int, segments: Segments) -> Tensor:
    """query: [tokens, heads, head_dim] -> [tokens, heads * head_dim].

    Query i of a segment attends to positions 0..kv_length - query_length + i of its plane. Heads
    h * groups .. (h + 1) * groups - 1 share KV head h. Padding gets zeros.
    """
    pool = _layer_rows(kv, layer)
    groups = segments.groups
    if len(groups) == 1 and groups[0].queries is None:
        return _attend(query, pool, kv.shape[4], groups[0], segments.scratch).reshape(
            query.shape[0], -1
        )
    out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
    for group in groups:
        assert group.queries is not None
        part = _attend(
            query.index_select(0, group.queries), pool, kv.shape[4], group, segments.scratch
        )
        out.index_copy_(0, group.queries, part.reshape(len(group.queries), -1))
    return out


def finalize(
    kv: Tensor, sources: Tensor, offsets: Tensor, targets: Tensor, target_offsets: Tensor
) -> None:
    """Copy single positions, every layer, K and V, between blocks.

    sources, offsets, targets, target_offsets: [rows] int64 each. Sources and targets are disjoint.
    """
    kv[targets, :, :, target_offsets] = kv[sources, :, :, offsets]


def gather_rows(hidden: Tensor, slots: Tensor) -> Tensor:
    """hidden: [slots, hidden_size]; slots: [rows] int64 -> [rows, hidden_size]."""
    return hidden.index_select(0, slots)


def scatter_rows(hidden: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows: [rows, hidden_size] to hidden[slots] in place; slots are distinct."""
    hidden.index_copy_(0, slots, rows)


def _layer_rows(kv: Tensor, layer: int) -> Tensor:
    """The pool as rows of one position's K or V, starting at `layer` of block 0.

    Index b * layers * 2 * block_size + offset is then K at (block b, this layer, offset), and V
    lies block_size rows behind it.
    """
    return kv.view(-1, kv.shape[4] * kv.shape[5])[layer * 2 * kv.shape[3] :]


def _attend(
    query: Tensor, pool: Tensor, kv_heads: int, group: GatherGroup, scratch: GatherScratch
) -> Tensor:
    """-> [segments, query_length, heads, head_dim]. Query heads that share a KV head become more
    query positions of that head, so K and V are never repeated."""
    segments, length = group.segments, group.query_length
    head_dim = query.shape[-1]
    share = query.shape[1] // kv_heads
    gathered = scratch.rows(len(group.rows), pool)
    torch.index_select(pool, 0, group.rows, out=gathered)
    both = gathered.view(2, segments, group.kv_length, kv_heads, head_dim)
    keys, values = both.transpose(2, 3).unbind(0)
    split = query.view(segments, length, kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    if group.causal:
        return _attend_causally(split, keys, values, scratch).permute(0, 3, 1, 2, 4)
    mask = group.mask
    if mask is not None and share > 1 and length > 1:
        mask = mask.repeat(1, 1, share, 1)
    return _attend_stacked(split, keys, values, mask).permute(0, 3, 1, 2, 4)


def _attend_stacked(split: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """split: [segments, kv_heads, share, queries, head_dim] -> the same shape."""
    stacked = split.flatten(2, 3)
    return F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask).view(split.shape)


def _attend_causally(split: Tensor, keys: Tensor, values: Tensor, scratch: GatherScratch) -> Tensor:
    """Blocks of queries, each with the keys up to its last query: one small triangle serves all of
    them, and what a whole block may not see is not computed."""
    share, length, total = split.shape[2], split.shape[3], keys.shape[2]
    rows = max(1, CAUSAL_ROWS // share)
    triangle = scratch.triangle(share, rows, total, split)
    out = torch.empty_like(split, memory_format=torch.contiguous_format)
    for start in range(0, length, rows):
        block = slice(start, min(start + rows, length))
        seen = total - length + block.stop
        mask = triangle[:, rows - (block.stop - start) :, triangle.shape[2] - seen :].flatten(0, 1)
        out[:, :, :, block] = _attend_stacked(
            split[:, :, :, block], keys[:, :, :seen], values[:, :, :seen], mask
        )
    return out
