"""The exit gate in plain torch: one score per row, and the chance that a token is still running.

Pure functions. The scheduler's own product of the scores decides who exits; this one is the same
number on the device, for work that must not wait for the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gate_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, survival: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """hidden: [rows, size]; weight: [1, size]; bias: [1]; survival: [rows] float64, the product of
    1 - score over this token's earlier loops, or None before the first.

    -> scores [rows] float32, and survival after this loop, float64. The cumulative exit
    probability is 1 - survival. Given the same scores, it is bit for bit the scheduler's.
    """
    scores = F.linear(hidden, weight, bias).squeeze(-1).float().sigmoid()
    left = 1.0 - scores.to(torch.float64)
    return scores, left if survival is None else survival * left
