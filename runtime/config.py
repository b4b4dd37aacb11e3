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
    backend: Literal["auto", "torch", "triton"] = "auto"
    block_size: int = 16  # positions
    num_blocks: int | None = None
    memory_fraction: float = 0.9  # of free CUDA memory after loading the weights
    num_slots: int = 64  # rows that may execute at once
    num_receive_slots: int = 64
    chunk_tokens: int = 512  # prompt positions in one pass
    token_budget: int | None = None  # prompt positions and decode rows in one mixed pass
    prefill_passes: int = 1  # prompt passes between two loop passes, where they are not mixed
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
    canary: bool = False  # fill free blocks with a pattern and watch it, for debugging
    random_head_seed: int = 0  # of the frozen head of exit mode random_lookahead

    def __post_init__(self) -> None:
        _require(bool(self.model), "--model must name a checkpoint folder, got {!r}", self.model)
        for option, value in (
            ("--block-size", self.block_size),
            ("--num-blocks", self.num_blocks),
            ("--num-slots", self.num_slots),
            ("--chunk-tokens", self.chunk_tokens),
            ("--prefill-passes", self.prefill_passes),
            ("--threads", self.threads),
            ("--max-positions", self.max_positions),
        ):
            _require(value is None or value >= 1, option + " must be at least 1, got {}", value)
        for option, value in (
            ("--num-receive-slots", self.num_receive_slots),
            ("--snapshot-bytes", self.snapshot_bytes),
            ("--random-head-seed", self.random_head_seed),
        ):
            _require(value >= 0, option + " must not be negative, got {}", value)
        _require(
            self.token_budget is None or self.token_budget >= self.chunk_tokens,
            "--token-budget must be at least --chunk-tokens ({1}), got {0}",
            self.token_budget,
            self.chunk_tokens,
        )
        grows = self.admission == "incremental"
        _require(
            not grows or (self.num_slots >= 2 and self.snapshot_bytes > 0),
            "--admission incremental preempts: it needs --num-slots of at least 2, got {}, and "
            "--snapshot-bytes above 0, got {}",
            self.num_slots,
            self.snapshot_bytes,
        )
        _require(
            0.0 <= self.watermark < 1.0,
            "--watermark must be at least 0 and below 1, got {}",
            self.watermark,
        )
        _require(
            0.0 < self.memory_fraction <= 1.0,
            "--memory-fraction must be above 0 and at most 1, got {}",
            self.memory_fraction,
        )
        for option, text, allowed in (
            ("--dtype", self.dtype, ("auto", "float32", "bfloat16")),
            ("--device", self.device, ("auto", "cpu", "cuda")),
            ("--backend", self.backend, ("auto", "torch", "triton")),
            ("--layout", self.layout, ("last_exited", "shared")),
            ("--admission", self.admission, ("full", "incremental")),
        ):
            _require(
                text in allowed,
                "{} must be one of {}, got {!r}",
                option,
                ", ".join(allowed),
                text,
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an EngineConfig that decides what runs when.

    max_in_flight: passes submitted and not yet collected; 1 is synchronous, 2 lets submission run
    ahead of results. token_budget None bounds a mixed pass's prompt rows by chunk_tokens alone.
    """

    chunk_tokens: int
    token_budget: int | None = None
    prefill_passes: int = 1
    max_in_flight: int = 1
    refill: bool = True
    mixed_batches: bool = True
    prefix_cache: bool = False
    admission: Literal["full", "incremental"] = "full"
    watermark: float = 0.01
    max_waiting: int = 1024

    @staticmethod
    def from_engine(config: EngineConfig, *, max_waiting: int = 1024) -> "SchedulerConfig":
        return SchedulerConfig(
            chunk_tokens=config.chunk_tokens,
            token_budget=config.token_budget,
            prefill_passes=config.prefill_passes,
            max_in_flight=2 if config.async_scheduling else 1,
            refill=config.refill,
            mixed_batches=config.mixed_batches,
            prefix_cache=config.prefix_cache,
            admission=config.admission,
            watermark=config.watermark,
            max_waiting=max_waiting,
        )


def _require(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise ConfigError(message.format(*values))
