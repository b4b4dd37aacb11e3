"""What one engine process is told at start. Frozen, checked once, never written back.

What is measured later (free memory, the number of blocks) goes into a KVPlan, not in here. A bad
value is named as the command line spells it.
"""

from typing import Literal

import msgspec

from .errors import ConfigError
from .types import KVLayout


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """num_blocks None: a small fixed pool on a CPU, planned from measured memory on CUDA.

    threads None leaves torch's default. max_positions None takes the checkpoint's.
    """

    model: str  # folder of a Hugging Face checkpoint
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int = 16  # positions
    num_blocks: int | None = None
    memory_fraction: float = 0.9  # of free CUDA memory after loading the weights
    num_slots: int = 64  # rows that may execute at once
    num_receive_slots: int = 64
    chunk_tokens: int = 512  # prompt positions in one pass
    threads: int | None = None
    max_positions: int | None = None
    layout: KVLayout = "last_exited"
    async_scheduling: bool = False  # submit ahead of results and delivery
    refill: bool = True  # a token that exits frees its row at once
    mixed_batches: bool = True  # prompt chunks share passes with decode rows
    prefix_cache: bool = False
    admission: Literal["full", "incremental"] = "full"  # incremental: grow, and preempt when full
    watermark: float = 0.01  # share of blocks kept free when a request is let in (incremental)
    snapshot_bytes: int = 1 << 30  # bound on what preempted requests may keep in host memory
    random_head_seed: int = 0  # of the frozen head of exit mode random_lookahead

    def __post_init__(self) -> None:
        _require(bool(self.model), "--model must name a checkpoint folder, got {!r}", self.model)
        for option, value in (
            ("--block-size", self.block_size),
            ("--num-blocks", self.num_blocks),
            ("--num-slots", self.num_slots),
            ("--chunk-tokens", self.chunk_tokens),
            ("--threads", self.threads),
            ("--max-positions", self.max_positions),
        ):
            _require(value is None or value >= 1, option + " must be at least 1, got {}", value)
        _require(
            self.num_receive_slots >= 0,
            "--num-receive-slots must not be negative, got {}",
            self.num_receive_slots,
        )
        _require(
            0.0 < self.memory_fraction <= 1.0,
            "--memory-fraction must be above 0 and at most 1, got {}",
            self.memory_fraction,
        )
        for option, text, allowed in (
            ("--dtype", self.dtype, ("auto", "float32", "bfloat16")),
            ("--device", self.device, ("auto", "cpu", "cuda")),
        ):
            _require(
                text in allowed,
                "{} must be one of {}, got {!r}",
                option,
                ", ".join(allowed),
                text,
            )


def _require(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise ConfigError(message.format(*values))
