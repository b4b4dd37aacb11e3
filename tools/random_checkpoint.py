"""Write a random Ouro checkpoint of a given shape, to try sizes that need no trained weights.

    python -P tools/random_checkpoint.py FOLDER --shape ouro-1.4b

Weights are seeded and scaled so that activations neither vanish nor blow up. There is no tokenizer:
such a checkpoint is asked with token IDs.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "ouro-1.4b": {
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 65536,
    },
    "small": {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    },
}
COMMON = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}
SHARD_LAYERS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="ouro-1.4b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = {**COMMON, **SHAPES[options.shape], "torch_dtype": options.dtype}
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    write_shards(options.folder, config, getattr(torch, options.dtype), options.seed)


def write_shards(folder: Path, config: dict, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    where: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards(config)):
        name = f"model-{number:05d}.safetensors"
        tensors = {key: fill(key, shape, dtype, generator) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        print(f"{name}: {len(tensors)} tensors, {total / 1e9:.2f} GB so far", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def shards(config: dict) -> Iterator[dict[str, tuple[int, ...]]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (vocab, hidden),
    }
    layers = range(config["num_hidden_layers"])
    for first in layers[::SHARD_LAYERS]:
        shard: dict[str, tuple[int, ...]] = {}
        for layer in layers[first : first + SHARD_LAYERS]:
            shard |= {f"model.layers.{layer}.{k}": v for k, v in layer_shapes(config).items()}
        yield shard


def layer_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    norms = ("input_layernorm", "input_layernorm_2")
    norms += tuple(name.replace("input", "post_attention") for name in norms)
    return {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
        **{f"{norm}.weight": (hidden,) for norm in norms},
    }


def fill(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    scale = 0.5 if "embed" in name else 0.6 / math.sqrt(shape[-1])
    tensor = torch.empty(shape, dtype=torch.float32).normal_(generator=generator).mul_(scale)
    return tensor.to(dtype)


if __name__ == "__main__":
    main()
