"""A dense looped language model for training: Ouro's architecture and parameter names, no KV cache.

The one stack of layers runs LOOPS times over the same positions; the final norm is inside every
loop, and its output feeds the next loop, the exit gate and the LM head.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOOPS = 4
HEAD_DIM = 32
ROPE_THETA = 10_000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Shape:
    vocab_size: int = 512
    hidden: int = 128
    layers: int = 2
    intermediate: int = 384

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    def hugging_face_config(self) -> dict[str, Any]:
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "total_ut_steps": LOOPS,
            "early_exit_threshold": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
        }


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            projection(x).view(batch, length, self.heads, HEAD_DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden)
        self.input_layernorm_2 = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm_2 = Norm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.early_exit_gate = nn.Linear(shape.hidden, 1)


class LoopedLM(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.6 / math.sqrt(module.weight.shape[1]))
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)
        gate = self.model.early_exit_gate
        nn.init.constant_(gate.bias, -1.0)
        nn.init.zeros_(gate.weight)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """ids: [batch, positions]. The hidden state after every loop's final norm."""
        cos, sin = _rope(ids.shape[1])
        x = self.model.embed_tokens(ids)
        states = []
        for _ in range(LOOPS):
            for layer in self.model.layers:
                x = layer(x, cos, sin)
            x = self.model.norm(x)
            states.append(x)
        return states

    def hazards(self, states: list[Tensor]) -> Tensor:
        """[..., LOOPS]: the gate's probability of exiting after each loop, if not before."""
        scores = torch.cat([self.model.early_exit_gate(state) for state in states], -1)
        return torch.sigmoid(scores).float()


def exit_distribution(hazards: Tensor) -> Tensor:
    """[..., LOOPS]: the probability of exiting after exactly that loop. The last takes the rest."""
    remaining = torch.ones_like(hazards[..., 0])
    parts = []
    for loop in range(LOOPS - 1):
        parts.append(hazards[..., loop] * remaining)
        remaining = remaining * (1 - hazards[..., loop])
    return torch.stack([*parts, remaining], -1)


def _rope(length: int) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / (ROPE_THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    angles = torch.arange(length).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()
