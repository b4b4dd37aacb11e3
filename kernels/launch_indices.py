"""Device index tensors that a Triton launch reads, made once per pass for every layer.

Pure index arithmetic on the host, one copy to the device per integer size. Never touches K or V.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


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
    parts = [tables.reshape(-1), kv_lengths, starts, query_lengths, decodes, prompts]
    packed = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)
    views = packed.split([len(part) for part in parts])
    return LaunchIndices(
        views[0].view(tables.shape),
        *views[1:],
        longest_decode=int(kv_lengths[decodes].max(initial=0)),
        longest_prompt=int(query_lengths[prompts].max(initial=0)),
    )
