"""The device side of one engine: model, KV storage and runner, made in order from a config.

Owns them and counts what ran. Computes on the caller's thread; the executor gives it one.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from ..kernels.backend import REFERENCE, BackendUnavailable, Kernels, choose_kernels
from ..kernels.segments import Segment, Segments
from .batch import pool_shape
from .broken_requests import BrokenRequests
from .config import EngineConfig
from .errors import ConfigError
from .interfaces import Clock
from .kv_storage import KVStorage, plan_storage
from .model_runner import ModelRunner
from .models.base import LoopedModel
from .models.registry import LoadedModel, load_model
from .plans import ModelRunnerOutput, SchedulerOutput
from .snapshots import Snapshot, load_blocks, poison, save_blocks
from .types import BlockTables, Generation, KVGeometry, ModelDescription

logger = logging.getLogger(__name__)


class WorkCounters(msgspec.Struct, frozen=True):
    """What the model has run since start.

    prefill_tokens: prompt positions (counted at depth 0); prefill_loop_tokens: those times loops.
    """

    passes: int = 0
    failed_passes: int = 0
    prefill_tokens: int = 0
    prefill_loop_tokens: int = 0
    recurrent_row_loops: int = 0
    coda_rows: int = 0

    def plus(self, plan: SchedulerOutput) -> "WorkCounters":
        return WorkCounters(
            passes=self.passes + 1,
            failed_passes=self.failed_passes,
            prefill_tokens=self.prefill_tokens
            + sum(len(row.range) for row in plan.prefill if row.depth == 0),
            prefill_loop_tokens=self.prefill_loop_tokens
            + sum(len(row.range) for row in plan.prefill),
            recurrent_row_loops=self.recurrent_row_loops + len(plan.loops),
            coda_rows=self.coda_rows + len(plan.coda),
        )


@dataclass(frozen=True)
class WorkerParts:
    model: LoopedModel
    description: ModelDescription
    storage: KVStorage
    device: str
    kernels: Kernels = REFERENCE


class Worker:
    def __init__(
        self,
        parts: WorkerParts,
        clock: Clock,
        threads: int | None = None,
        random_head_seed: int = 0,
    ) -> None:
        self.parts = parts
        self.runner = ModelRunner(
            parts.model, parts.storage, clock, random_head_seed, parts.kernels
        )
        self.broken = BrokenRequests()
        self.settled = 0  # saves, loads and truncates done; written by the compute thread alone
        self._threads = threads
        self._counters = WorkCounters()

    @property
    def counters(self) -> WorkCounters:
        return self._counters

    def enter_thread(self) -> None:
        """To be called on the thread that will compute: thread counts are partly per thread."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Never raises: a pass that fails comes back with its error, and computing goes on."""
        plan, failures = self.broken.split(plan)
        try:
            output = self.runner.run(plan)
        except Exception as error:
            logger.exception("pass %d (%s) failed", plan.sequence, plan.stage)
            self._counters = msgspec.structs.replace(
                self._counters, failed_passes=self._counters.failed_passes + 1
            )
            reason = f"pass {plan.sequence} ({plan.stage}): {type(error).__name__}: {error}"
            self.broken.add_all(plan, reason)
            return ModelRunnerOutput(sequence=plan.sequence, stage=plan.stage, error=reason)
        self._counters = self._counters.plus(plan)
        if not failures:
            return output
        return msgspec.structs.replace(output, failed=failures + output.failed)

    def save(self, generation: Generation, slot: int, snapshot: Snapshot) -> None:
        """Fill a snapshot. Never raises: a failure is told when it is restored."""
        try:
            with torch.inference_mode():
                save_blocks(self.parts.storage.kv, snapshot)
                snapshot.hidden.copy_(self.parts.storage.hidden[slot])
                snapshot.token = self.runner.tokens.take(generation, slot)
                chunk = self.runner.take_chunk(generation)
                snapshot.chunk = None if chunk is None else chunk.cpu()
        except Exception as error:
            logger.exception("generation %d: suspending it failed", generation)
            snapshot.error = f"suspending it failed: {type(error).__name__}: {error}"
        finally:
            self.settled += 1

    def load(
        self, generation: Generation, slot: int, snapshot: Snapshot, tables: BlockTables
    ) -> None:
        """Write a snapshot back. Never raises: a failure fails the request's next pass."""
        try:
            if snapshot.error is not None:
                self.broken.add(generation, snapshot.error)
                return
            with torch.inference_mode():
                load_blocks(self.parts.storage.kv, snapshot, tables)
                self.parts.storage.hidden[slot] = snapshot.hidden.to(self.parts.device)
                self.runner.tokens.put(generation, slot, snapshot.token)
                if snapshot.chunk is not None:
                    self.runner.put_chunk(generation, snapshot.chunk.to(self.parts.device))
            self._finish_writing()
        except Exception as error:
            logger.exception("generation %d: restoring it failed", generation)
            self.broken.add(generation, f"restoring it failed: {type(error).__name__}: {error}")
        finally:
            self.settled += 1

    def truncate(self, generation: Generation, tokens: int, tables: BlockTables) -> None:
        """Never raises: a failure fails the request's next pass."""
        storage = self.parts.storage
        try:
            with torch.inference_mode():
                poison(storage.kv, tokens, storage.geometry.block_size, tables)
            self._finish_writing()
        except Exception as error:
            logger.exception("generation %d: truncating it failed", generation)
            self.broken.add(generation, f"truncating it failed: {type(error).__name__}: {error}")
        finally:
            self.settled += 1

    def _finish_writing(self) -> None:
        """Afterwards a peer may write where this thread has written."""
        if self.parts.storage.kv.is_cuda:
            torch.cuda.current_stream().synchronize()

    def forget(self, generation: Generation) -> None:
        self.runner.forget(generation)
        self.broken.forget(generation)

    def warm_up(self) -> None:
        """Run every kind of work once on scratch memory, so that the first request does not pay."""
        storage, model = self.parts.storage, self.parts.model
        scratch = torch.zeros_like(storage.kv[:1])
        segments = Segments(
            [Segment(1, 1, (0,))], pool_shape(storage.geometry), scratch.device, scratch.dtype
        )
        with torch.inference_mode():
            hidden = model.embed(torch.zeros(1, dtype=torch.int64, device=scratch.device))
            hidden = model.loop(hidden, scratch, segments)
            model.gate_scores(hidden)
            model.logits(hidden)

    def memory_breakdown(self) -> dict[str, int]:
        return {
            "weights": self.parts.model.num_bytes,
            "kv": self.parts.storage.kv.nbytes,
            "hidden": self.parts.storage.hidden.nbytes,
            "tokens": self.runner.tokens.num_bytes,
            "prompt_chunks": self.runner.chunk_bytes,
        }


def load_worker(
    config: EngineConfig, clock: Clock, progress: Callable[[str], None] = logger.info
) -> Worker:
    started_s = clock.now_s()
    device = _choose_device(config)
    kernels = _choose_kernels(config, device)
    progress(f"kernels: {kernels}")
    progress(f"loading weights from {config.model}")
    loaded = load_model(
        Path(config.model),
        dtype=config.dtype,
        device=device,
        max_positions=config.max_positions,
        kernels=kernels,
    )
    geometry = _geometry(loaded, config)
    plan = plan_storage(config, geometry, device)
    storage = KVStorage(plan, geometry, device)
    progress(
        f"loaded {loaded.description.name} in {clock.now_s() - started_s:.1f} s: "
        f"{loaded.model.num_bytes / 1e6:.1f} MB of weights ({loaded.dtype}, {device}), "
        f"{plan.num_blocks} KV blocks ({storage.kv.nbytes / 1e6:.1f} MB)"
    )
    parts = WorkerParts(loaded.model, loaded.description, storage, device, kernels)
    return Worker(parts, clock, config.threads, config.random_head_seed)


def _choose_device(config: EngineConfig) -> str:
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is usable here; give --device cpu")
    return config.device


def _choose_kernels(config: EngineConfig, device: str) -> Kernels:
    try:
        return choose_kernels(config.backend, device)
    except BackendUnavailable as error:
        raise ConfigError(f"--backend {config.backend}: {error}") from None


def _geometry(loaded: LoadedModel, config: EngineConfig) -> KVGeometry:
    model = loaded.config
    return KVGeometry(
        num_layers=model.num_layers,
        num_depths=model.num_loops,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        block_size=config.block_size,
        dtype=loaded.dtype,
        layout=config.layout,
    )
