"""Which architectures can be served, and how a checkpoint folder becomes a loaded model.

No remote code: an architecture that is not listed here is refused by name. A loaded checkpoint is
frozen; its weights are held once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

import torch

from ...kernels.backend import REFERENCE, Kernels
from ..errors import CheckpointError
from ..types import Dtype, ModelDescription
from .base import LoopedModel
from .config import OuroConfig, parse_config, read_json
from .fingerprint import fingerprint
from .ouro import Ouro
from .weights import load_weights, weight_files

ARCHITECTURES = {"OuroForCausalLM": Ouro}
TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    model: LoopedModel
    config: OuroConfig
    description: ModelDescription
    dtype: Dtype


def load_model(
    folder: Path,
    *,
    dtype: Literal["auto"] | Dtype,
    device: str,
    max_positions: int | None = None,
    kernels: Kernels = REFERENCE,
) -> LoadedModel:
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or []
    kind = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if kind is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures {names!r} cannot be served; --model takes "
            f"{', '.join(ARCHITECTURES)}"
        )
    config = parse_config(raw, folder)
    chosen = _choose_dtype(dtype, config, folder)
    files = weight_files(folder)
    model = kind(config, TORCH_DTYPES[chosen], device, kernels)
    load_weights(
        folder, list(model.wanted()), tied_to=model.embedding if config.tied_embeddings else None
    )
    model.pack()
    description = ModelDescription(
        name=folder.resolve().name,
        fingerprint=fingerprint(config, files),
        vocab_size=config.vocab_size,
        max_positions=min(config.max_positions, max_positions or config.max_positions),
        num_loops=config.num_loops,
        eos_token_ids=config.eos_token_ids,
        default_exit_threshold=config.exit_threshold,
    )
    return LoadedModel(model, config, description, chosen)


def _choose_dtype(dtype: Literal["auto"] | Dtype, config: OuroConfig, folder: Path) -> Dtype:
    match dtype:
        case "float32" | "bfloat16":
            return dtype
        case "auto":
            for known in TORCH_DTYPES:
                if config.dtype == known:
                    return known
            raise CheckpointError(
                f"{folder / 'config.json'}: torch_dtype {config.dtype} has no kernels here; give "
                "--dtype float32 or --dtype bfloat16"
            )
        case _:
            assert_never(dtype)
