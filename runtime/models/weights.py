"""Reads safetensors into a model's own memory and accounts for every tensor.

Owns nothing. Each tensor is copied once, straight to its place, cast on the way; a missing, extra,
misshapen or unreadable one is a CheckpointError that names it, its file and what to do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from .config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE = {torch.float32, torch.bfloat16, torch.float16}
DERIVED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from rope_theta
TIED_HEAD = "lm_head.weight"  # may be stored beside a tied embedding, and must then equal it


@dataclass(frozen=True)
class Wanted:
    """One tensor of the checkpoint and the memory it is copied to."""

    name: str
    destination: Tensor


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, in the order of their names."""
    if (folder / INDEX_FILE).exists():
        files = sorted({folder / name for name in _weight_map(folder).values()})
    else:
        files = [folder / SINGLE_FILE]
    for path in files:
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; --model needs {SINGLE_FILE} or {INDEX_FILE} with all "
                "the files it lists"
            )
    return files


def load_weights(folder: Path, wanted: Sequence[Wanted], tied_to: Tensor | None = None) -> None:
    """Fill every destination. tied_to: the embedding that the LM head shares, if it does."""
    waiting = {item.name: item.destination for item in wanted}
    placed: dict[str, Path] = {}
    stored_head: Tensor | None = None
    for path in weight_files(folder):
        for name, tensor in _tensors(path):
            if name in placed:
                raise CheckpointError(
                    f"{path}: tensor {name} is in {placed[name].name} too; fetch the checkpoint "
                    "again"
                )
            placed[name] = path
            if name == TIED_HEAD and tied_to is not None:
                stored_head = tensor
            elif not name.endswith(DERIVED_SUFFIX):
                _place(name, tensor, path, waiting)
    _check_index(folder, placed)
    if waiting:
        raise _missing(folder, sorted(waiting))
    if tied_to is not None and stored_head is not None:
        _check_tied(stored_head, tied_to, placed[TIED_HEAD])


def _place(name: str, tensor: Tensor, path: Path, waiting: dict[str, Tensor]) -> None:
    destination = waiting.pop(name, None)
    if destination is None:
        raise CheckpointError(
            f"{path}: tensor {name} is not part of this architecture; serve a checkpoint whose "
            "config.json matches its weights"
        )
    if tensor.shape != destination.shape:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}, config.json implies "
            f"{list(destination.shape)}; use the config.json that belongs to these weights"
        )
    if tensor.dtype not in READABLE:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {tensor.dtype}; convert the checkpoint to float32, "
            "bfloat16 or float16"
        )
    destination.copy_(tensor)


def _check_tied(tensor: Tensor, tied_to: Tensor, path: Path) -> None:
    if tensor.shape != tied_to.shape or not torch.equal(tensor.to(tied_to), tied_to):
        raise CheckpointError(
            f"{path}: tensor {TIED_HEAD} differs from model.embed_tokens.weight though config.json "
            "sets tie_word_embeddings; set it to false to serve this head"
        )


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off ({error}); fetch it again") from error


def _weight_map(folder: Path) -> dict[str, str]:
    index: Any = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in index.values()
    ):
        raise CheckpointError(
            f"{folder / INDEX_FILE} has no weight_map of tensor names to file names; fetch it again"
        )
    return index


def _check_index(folder: Path, placed: dict[str, Path]) -> None:
    if not (folder / INDEX_FILE).exists():
        return
    for name, file in _weight_map(folder).items():
        if name in placed and placed[name].name != file:
            raise CheckpointError(
                f"{folder / INDEX_FILE} says that {name} is in {file}, but it is in "
                f"{placed[name].name}; fetch the index again"
            )


def _missing(folder: Path, names: list[str]) -> CheckpointError:
    first, more = names[0], len(names) - 1
    where = folder / (INDEX_FILE if (folder / INDEX_FILE).exists() else SINGLE_FILE)
    if first.startswith("model.early_exit_gate"):
        return CheckpointError(
            f"{where}: tensor {first} is missing; rlt needs a looped checkpoint with an exit gate "
            "(early_exit_gate), serve one that was trained with it"
        )
    others = f" and {more} more" if more else ""
    return CheckpointError(
        f"{where}: tensor {first}{others} is missing; fetch the checkpoint again or use the "
        "config.json that belongs to it"
    )
