"""Checkpoints for device tests: the golden one as it is, and changed copies of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig
from rlt.runtime.worker import Worker, load_worker

GOLDEN = Path(__file__).parents[2] / "golden"
CKPT = GOLDEN / "ckpt"


def golden_json() -> dict[str, Any]:
    value: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return value


def golden_worker(**options: Any) -> Worker:
    base: dict[str, Any] = {"model": str(CKPT), "num_blocks": 4096, "device": "cpu"}
    return load_worker(EngineConfig(**(base | options)), SystemClock())


def changed_copy(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, Tensor]], None] | None = None,
) -> Path:
    """A copy of the golden checkpoint with config keys replaced and tensors edited in place."""
    folder.mkdir(exist_ok=True)
    raw = json.loads((CKPT / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors is None:
        shutil.copy(CKPT / "model.safetensors", folder)
    else:
        weights = load_file(CKPT / "model.safetensors")
        tensors(weights)
        save_file(weights, folder / "model.safetensors")
    return folder
