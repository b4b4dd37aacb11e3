"""A looped model computed one token and one loop at a time: what every other path is judged by.

Plain torch over the checkpoint's own tensors: no pages, no batches, no chunks, no early finish of
anything. Never imports the engine. Position by position is the definition of both layouts.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Memory:
    """K and V of one sequence, as later tokens read them.

    `last_exited` has a plane per depth. Loop r writes plane r - 1 and every deeper one, so plane d
    of a token that ran e loops holds version min(d, e - 1). `shared` has one plane, which holds the
    last version.
    """

    def __init__(self, model: "DenseModel", layout: str) -> None:
        assert layout in ("last_exited", "shared")
        self._planes = model.num_loops if layout == "last_exited" else 1
        shape = (model.num_layers, self._planes, 2, model.max_positions, model.kv_heads)
        nan = torch.full((*shape, model.head_dim), float("nan"), dtype=model.dtype)
        self._kv = nan  # a read of what nobody wrote shows in every later number
        self._written = 0  # positions

    def write(self, layer: int, depth: int, position: int, key: Tensor, value: Tensor) -> None:
        assert position in (self._written - 1, self._written)
        self._written = position + 1
        first = depth if self._planes > 1 else 0
        self._kv[layer, first:, 0, position] = key
        self._kv[layer, first:, 1, position] = value

    def read(self, layer: int, depth: int) -> tuple[Tensor, Tensor]:
        """[positions, kv_heads, head_dim] each, up to the token that runs now."""
        plane = depth if self._planes > 1 else 0
        keys, values = self._kv[layer, plane, :, : self._written]
        return keys, values


class DenseModel:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.dtype = dtype
        self.num_layers: int = config["num_hidden_layers"]
        self.num_loops: int = config["total_ut_steps"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.hidden_size: int = config["hidden_size"]
        self.max_positions: int = min(config["max_position_embeddings"], 512)
        self.eos_token_id: int = config["eos_token_id"]
        self._epsilon: float = config["rms_norm_eps"]
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        self._frequencies = config["rope_theta"] ** -exponents
        weights = load_file(folder / "model.safetensors")
        self._weights = {name: tensor.to(dtype) for name, tensor in weights.items()}

    def memory(self, layout: str) -> Memory:
        return Memory(self, layout)

    def embed(self, token: int) -> Tensor:
        return self._weights["model.embed_tokens.weight"][token]

    def loop(self, x: Tensor, memory: Memory, position: int, depth: int) -> Tensor:
        """One pass of the stack, the final norm included."""
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            normed = self._norm(x, name + "input_layernorm")
            attended = self._attention(normed, memory, layer, position, depth)
            x = x + self._norm(attended, name + "input_layernorm_2")
            normed = self._norm(x, name + "post_attention_layernorm")
            gate = F.silu(self._linear(normed, name + "mlp.gate_proj"))
            expanded = gate * self._linear(normed, name + "mlp.up_proj")
            contracted = self._linear(expanded, name + "mlp.down_proj")
            x = x + self._norm(contracted, name + "post_attention_layernorm_2")
        return self._norm(x, "model.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden, "lm_head")

    def gate_logit(self, hidden: Tensor) -> Tensor:
        bias = self._weights["model.early_exit_gate.bias"]
        return (self._linear(hidden, "model.early_exit_gate") + bias).squeeze()

    def _attention(
        self, x: Tensor, memory: Memory, layer: int, position: int, depth: int
    ) -> Tensor:
        name = f"model.layers.{layer}.self_attn."
        query = self._linear(x, name + "q_proj").view(self.heads, self.head_dim)
        key = self._linear(x, name + "k_proj").view(self.kv_heads, self.head_dim)
        value = self._linear(x, name + "v_proj").view(self.kv_heads, self.head_dim)
        memory.write(layer, depth, position, self._rotate(key, position), value)
        keys, values = memory.read(layer, depth)
        group = self.heads // self.kv_heads  # query heads that share one K/V head
        grouped = self._rotate(query, position).view(self.kv_heads, group, self.head_dim)
        scores = torch.einsum("kgd,pkd->kgp", grouped, keys) / self.head_dim**0.5
        mixed = torch.einsum("kgp,pkd->kgd", scores.softmax(-1), values)
        return self._linear(mixed.reshape(-1), name + "o_proj")

    def _rotate(self, heads: Tensor, position: int) -> Tensor:
        """By halves: (low, high) -> (low cos - high sin, high cos + low sin)."""
        angles = position * self._frequencies
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        low, high = heads.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean() + self._epsilon)
        return x * scale * self._weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._weights[f"{name}.weight"] @ x
