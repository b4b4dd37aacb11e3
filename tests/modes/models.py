"""Two tiny random checkpoints of other shapes than the golden one, with mild weights.

The branches are scaled down, so that layout `shared`, a recurrence over positions, does not amplify
rounding; the gate is scaled up, so that tokens leave at every depth.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

BRANCH = 0.35  # size of what attention and MLP add to the residual
GATE = 1.6
LOGITS = 3.0  # spread of the LM head's rows: gaps far above rounding


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    layers: int
    loops: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    seed: int


SHAPES = (
    Shape(
        name="flat",
        layers=1,
        loops=4,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=40,
        inner=56,
        vocab=97,
        seed=1,
    ),
    Shape(
        name="deep",
        layers=3,
        loops=3,
        heads=4,
        kv_heads=4,
        head_dim=16,
        hidden=48,
        inner=72,
        vocab=101,
        seed=2,
    ),
)


def write_checkpoint(folder: Path, shape: Shape) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    save_file(_tensors(shape), folder / "model.safetensors")
    return folder


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "total_ut_steps": shape.loops,
        "early_exit_threshold": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _tensors(shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shape.seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)

    def norm(size: float = 1.0) -> Tensor:
        return size * (1 + 0.2 * torch.randn(shape.hidden, generator=generator))

    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden, generator=generator),
        "model.norm.weight": norm(),
        "model.early_exit_gate.weight": matrix(1, shape.hidden, GATE),
        "model.early_exit_gate.bias": torch.tensor([-0.6]),
        "lm_head.weight": matrix(shape.vocab, shape.hidden, LOGITS),
    }
    for layer in range(shape.layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "self_attn.q_proj": matrix(query, shape.hidden),
                "self_attn.k_proj": matrix(kv, shape.hidden),
                "self_attn.v_proj": matrix(kv, shape.hidden),
                "self_attn.o_proj": matrix(shape.hidden, query),
                "mlp.gate_proj": matrix(shape.inner, shape.hidden),
                "mlp.up_proj": matrix(shape.inner, shape.hidden),
                "mlp.down_proj": matrix(shape.hidden, shape.inner),
                "input_layernorm": norm(),
                "input_layernorm_2": norm(BRANCH),
                "post_attention_layernorm": norm(),
                "post_attention_layernorm_2": norm(BRANCH),
            }.items()
        }
    return tensors
