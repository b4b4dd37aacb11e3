"""Paged attention of one pass on Triton: single queries and prompt chunks, each by its own kernel.

Owns the output alone. Same signature and meaning as reference.paged_attention.
"""

from torch import Tensor

from .segments import Segments
from .triton_decode import decode_attention
from .triton_prefill import prefill_attention


def paged_attention(query: Tensor, kv: Tensor, layer: int, segments: Segments) -> Tensor:
    """query: [tokens, heads, head_dim] -> [tokens, heads * head_dim], in the query's dtype.

    Every row is written once: the segments cover all tokens, and each is a decode or a prompt.
    Bytes and bounds: see decode_attention and prefill_attention.
    """
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    decode_attention(query, kv, layer, segments, out)
    prefill_attention(query, kv, layer, segments, out)
    return out
