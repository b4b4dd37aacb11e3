"""Scores that exit policies read: the checkpoint's gate, and a frozen random head beside it.

Owns the random head's weight, which comes from its seed alone and is no part of the checkpoint or
its fingerprint. Each head runs once per pass, over the rows that ask for it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.backend import REFERENCE, Kernels
from .batch import integers
from .models.base import LoopedModel
from .plans import GateScore, LoopRow


def random_head_weight(seed: int, hidden_size: int) -> Tensor:
    """[hidden_size] float32: standard normal over sqrt(hidden_size), no bias."""
    generator = torch.Generator().manual_seed(seed)
    weight: Tensor = torch.randn(hidden_size, generator=generator) / hidden_size**0.5
    return weight


class ExitScores:
    def __init__(
        self, model: LoopedModel, seed: int, hidden: Tensor, kernels: Kernels = REFERENCE
    ) -> None:
        """hidden: a tensor with the device and last dimension of the hidden states."""
        self._model = model
        self._kernels = kernels
        self._random_head = random_head_weight(seed, hidden.shape[-1])[None].to(hidden.device)

    def of(self, rows: Sequence[LoopRow], hidden: Tensor) -> tuple[GateScore, ...]:
        """hidden: [rows, hidden_size] after the loop. In the order of rows."""
        gate = [index for index, row in enumerate(rows) if row.want_score and not row.random_head]
        random = [index for index, row in enumerate(rows) if row.want_score and row.random_head]
        scores = self._evaluate(self._model.gate_scores, gate, hidden)
        scores |= self._evaluate(self._random_scores, random, hidden)
        return tuple(
            GateScore(row.generation, row.position, row.depth, scores[index])
            for index, row in enumerate(rows)
            if row.want_score
        )

    def _random_scores(self, hidden: Tensor) -> Tensor:
        scores, _ = self._kernels.gate_scores(hidden.float(), self._random_head, None)
        return scores

    def _evaluate(
        self, head: Callable[[Tensor], Tensor], wanted: Sequence[int], hidden: Tensor
    ) -> dict[int, float]:
        if not wanted:
            return {}
        if len(wanted) < len(hidden):
            hidden = self._kernels.gather_rows(hidden, integers(wanted, hidden))
        return dict(zip(wanted, head(hidden).tolist(), strict=True))
