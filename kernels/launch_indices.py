"""Device index tensors that a Triton launch reads, made once per pass for every layer.

Pure index arithmetic on the host, one copy to the device per integer size. Never touches K or V.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
ALIGNED = 4  # int32 in 16 bytes


@dataclass(frozen=True)
class LaunchIndices:
    """tables: [segments, width] int32 block numbers; entries behind a segment's blocks are 0.
    kv_lengths, query_starts, query_lengths: [segments] int32. Queries of segment s are rows
    query_starts[s] .. query_starts[s] + query_lengths[s] - 1.
    decodes, prompts: int32 segment numbers with one query, and with more.
    """

    tables: Tensor
    kv_lengths: Tensor
    query_starts: Tensor
    query_lengths: Tensor
    decodes: Tensor
    prompts: Tensor
    longest_decode: int  # positions that the longest decode segment sees
    longest_prompt: int  # queries of the longest prompt segment


def launch_indices(
    *, query_lengths: Ints, kv_lengths: Ints, tables: Ints, device: torch.device
) -> LaunchIndices:
    decodes = np.flatnonzero(query_lengths == 1)
    prompts = np.flatnonzero(query_lengths > 1)
    starts = np.cumsum(query_lengths) - query_lengths
    table, kv, start, query, decode, prompt = _packed(
        [tables.reshape(-1), kv_lengths, starts, query_lengths, decodes, prompts], device
    )
    return LaunchIndices(
        tables=table.view(tables.shape),
        kv_lengths=kv,
        query_starts=start,
        query_lengths=query,
        decodes=decode,
        prompts=prompt,
        longest_decode=int(kv_lengths[decodes].max(initial=0)),
        longest_prompt=int(query_lengths[prompts].max(initial=0)),
    )


def _packed(parts: list[Ints], device: torch.device) -> list[Tensor]:
    """Each part as int32, all in one tensor. Every part starts on 16 bytes, whatever the lengths:
    Triton compiles a kernel again for each combination of aligned and unaligned pointers."""
    ends = np.cumsum([-(-len(part) // ALIGNED) * ALIGNED for part in parts])
    starts = [0, *ends[:-1].tolist()]
    host = np.zeros(ends[-1], dtype=np.int32)
    for start, part in zip(starts, parts, strict=True):
        host[start : start + len(part)] = part
    device_side = torch.from_numpy(host).to(device)
    return [
        device_side[start : start + len(part)] for start, part in zip(starts, parts, strict=True)
    ]
