"""What the model runner asks of a looped model, whatever its architecture.

One call of `loop` is one pass of the whole stack over a batch of query positions, each layer's
linear maps called once. The final norm is part of every loop.
"""

from typing import Protocol

from torch import Tensor

from ...kernels.segments import Segments


class LoopedModel(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they are held."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: [rows] int64 -> [rows, hidden_size]."""
        ...

    def loop(self, hidden: Tensor, kv: Tensor, segments: Segments) -> Tensor:
        """[tokens, hidden_size] -> the same after one loop and its norm; K and V are written."""
        ...

    def gate_scores(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows] float32: the exit gate, after its sigmoid."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size] float32."""
        ...
