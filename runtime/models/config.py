"""An Ouro checkpoint's config.json, as far as it decides the maths.

Takes the keys it knows and ignores the others; refuses exactly those values that would change what
is computed. Every refusal names the file and the key.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class OuroConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_loops: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    exit_threshold: float
    eos_token_ids: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; --model must name a folder with a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch it again")
    return value


def read_config(folder: Path) -> OuroConfig:
    return parse_config(read_json(folder / "config.json"), folder)


def parse_config(raw: Mapping[str, Any], folder: Path) -> OuroConfig:
    where = folder / "config.json"
    _refuse_other_maths(raw, where)
    heads = _integer(raw, "num_attention_heads", where)
    hidden = _integer(raw, "hidden_size", where)
    kv_heads = _integer(raw, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}; fetch the file again"
        )
    head_dim = _integer(raw, "head_dim", where, default=hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {head_dim} is odd; rotary halves need it even")
    rope = raw.get("rope_parameters") or {}
    return OuroConfig(
        vocab_size=_integer(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size", where),
        num_layers=_integer(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_loops=_integer(raw, "total_ut_steps", where),
        max_positions=_integer(raw, "max_position_embeddings", where),
        norm_epsilon=_number(raw, "rms_norm_eps", where, default=1e-6),
        rope_theta=_number({**rope, **raw}, "rope_theta", where, default=10000.0),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        exit_threshold=_number(raw, "early_exit_threshold", where, default=1.0),
        eos_token_ids=_eos(raw, folder),
        dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "float32"),
    )


def _refuse_other_maths(raw: Mapping[str, Any], where: Path) -> None:
    layer_types = raw.get("layer_types") or []
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    problems = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in layer_types),
        "rope_scaling": scaling.get("rope_type", scaling.get("type", "default")) != "default"
        if isinstance(scaling, dict)
        else True,
        "rope_parameters": not isinstance(rope, dict)
        or rope.get("rope_type", "default") != "default",
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, refused in problems.items():
        if refused:
            raise CheckpointError(
                f"{where}: {key} = {raw[key]!r} is not supported; serve a checkpoint with plain "
                "RoPE, full attention, SiLU and no biases"
            )


def _eos(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """config.json's EOS IDs, then those of generation_config.json."""
    found = _token_ids(raw.get("eos_token_id"), folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        found += _token_ids(read_json(generation).get("eos_token_id"), generation)
    return tuple(dict.fromkeys(found))


def _token_ids(value: object, where: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"{where}: eos_token_id {value!r} is neither an ID nor a list of IDs")
    return tuple(ids)


def _integer(raw: Mapping[str, Any], key: str, where: Path, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where}: {key} must be a positive integer, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, where: Path, default: float) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{where}: {key} must be a positive number, got {value!r}")
    return float(value)
