"""Attention and norms written as slow dense loops in float64: what the kernels must equal."""

import torch
from torch import Tensor


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query: [q, heads, dim], the last q of kv positions; keys, values: [kv, kv_heads, dim]."""
    count, heads, dim = query.shape
    share = heads // keys.shape[1]
    out = torch.empty(count, heads, dim, dtype=torch.float64)
    for index in range(count):
        seen = len(keys) - count + index + 1
        for head in range(heads):
            k = keys[:seen, head // share].double()
            v = values[:seen, head // share].double()
            weights = torch.softmax(k @ query[index, head].double() / dim**0.5, 0)
            out[index, head] = weights @ v
    return out.reshape(count, heads * dim)


def rotate_one(vector: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector at one position, element by element."""
    half = len(vector) // 2
    out = torch.empty(len(vector), dtype=torch.float64)
    for index in range(half):
        angle = torch.tensor(position / theta ** (2 * index / len(vector)), dtype=torch.float64)
        low, high = vector[index].double(), vector[index + half].double()
        out[index] = low * angle.cos() - high * angle.sin()
        out[index + half] = high * angle.cos() + low * angle.sin()
    return out
