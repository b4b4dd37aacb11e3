"""Ouro: one stack of layers run in loops, with a norm on both sides of attention and of the MLP.

Owns the weights. Writes K and V of a query at its layer before it attends. Holds no request
state: depth shows only in which blocks the segments name.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...kernels.backend import REFERENCE, Kernels
from ...kernels.linear import Linear
from ...kernels.norm_rotary import rotary_phases, swiglu
from ...kernels.segments import Segments
from .config import OuroConfig
from .weights import Wanted

Phases = tuple[Tensor, Tensor]


class OuroLayer(nn.Module):
    def __init__(
        self, config: OuroConfig, index: int, dtype: torch.dtype, device: str, kernels: Kernels
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.index = index
        hidden, inner = config.hidden_size, config.intermediate_size
        self.query_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self.qkv = Linear(hidden, self.query_size + 2 * self.kv_size, dtype=dtype, device=device)
        self.attention_out = Linear(self.query_size, hidden, dtype=dtype, device=device)
        self.gate_up = Linear(hidden, 2 * inner, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, dtype=dtype, device=device)
        norms = torch.empty(4, hidden, dtype=dtype, device=device)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms

    def forward(self, x: Tensor, kv: Tensor, segments: Segments, phases: Phases) -> Tensor:
        norm, epsilon = self.kernels.rms_norm, self.config.norm_epsilon
        attended = self._attention(norm(x, self.before_attention, epsilon), kv, segments, phases)
        x = norm(attended, self.after_attention, epsilon, x)
        expanded = swiglu(self.gate_up(norm(x, self.before_mlp, epsilon)))
        return norm(self.down(expanded), self.after_mlp, epsilon, x)

    def _attention(self, x: Tensor, kv: Tensor, segments: Segments, phases: Phases) -> Tensor:
        qkv: Tensor = self.qkv(x)
        turned = self.query_size + self.kv_size
        heads = qkv[:, :turned].view(len(x), -1, self.config.head_dim)
        rotated = self.kernels.rotate(heads, *phases)
        keys = rotated[:, self.config.num_heads :].reshape(len(x), self.kv_size)
        keys_values = torch.cat((keys, qkv[:, turned:]), -1)
        self.kernels.store_kv(keys_values, kv, self.index, segments)
        query = rotated[:, : self.config.num_heads]
        attended = self.kernels.paged_attention(query, kv, self.index, segments)
        out: Tensor = self.attention_out(attended)
        return out

    def wanted(self) -> Iterator[Wanted]:
        prefix = f"model.layers.{self.index}."
        splits = [self.query_size, self.kv_size, self.kv_size]
        for name, part in zip("qkv", torch.split(self.qkv.dense_weight, splits), strict=True):
            yield Wanted(f"{prefix}self_attn.{name}_proj.weight", part)
        yield Wanted(f"{prefix}self_attn.o_proj.weight", self.attention_out.dense_weight)
        gate, up = self.gate_up.dense_weight.chunk(2)
        yield Wanted(f"{prefix}mlp.gate_proj.weight", gate)
        yield Wanted(f"{prefix}mlp.up_proj.weight", up)
        yield Wanted(f"{prefix}mlp.down_proj.weight", self.down.dense_weight)
        yield Wanted(f"{prefix}input_layernorm.weight", self.before_attention)
        yield Wanted(f"{prefix}input_layernorm_2.weight", self.after_attention)
        yield Wanted(f"{prefix}post_attention_layernorm.weight", self.before_mlp)
        yield Wanted(f"{prefix}post_attention_layernorm_2.weight", self.after_mlp)


class Ouro(nn.Module):
    def __init__(
        self, config: OuroConfig, dtype: torch.dtype, device: str, kernels: Kernels = REFERENCE
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        hidden = config.hidden_size
        self.embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            OuroLayer(config, index, dtype, device, kernels) for index in range(config.num_layers)
        )
        self.norm = torch.empty(hidden, dtype=dtype, device=device)
        self.gate_weight = torch.empty(1, hidden, dtype=dtype, device=device)
        self.gate_bias = torch.empty(1, dtype=dtype, device=device)
        self.lm_head = Linear(hidden, config.vocab_size, dtype=dtype, device=device)
        if config.tied_embeddings:
            self.lm_head.share(self.embedding)
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        self.inverse_frequencies = 1.0 / config.rope_theta**exponents

    def wanted(self) -> Iterator[Wanted]:
        """Every tensor of the checkpoint and where it goes."""
        yield Wanted("model.embed_tokens.weight", self.embedding)
        for layer in self.layers:
            assert isinstance(layer, OuroLayer)
            yield from layer.wanted()
        yield Wanted("model.norm.weight", self.norm)
        yield Wanted("model.early_exit_gate.weight", self.gate_weight)
        yield Wanted("model.early_exit_gate.bias", self.gate_bias)
        if not self.config.tied_embeddings:
            yield Wanted("lm_head.weight", self.lm_head.dense_weight)

    def pack(self) -> None:
        """Bring the loaded weights into their fastest form, one at a time."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    @property
    def num_bytes(self) -> int:
        linears = sum(m.num_bytes for m in self.modules() if isinstance(m, Linear))
        norms = self.norm.nbytes * (4 * self.config.num_layers + 1)
        gate = self.gate_weight.nbytes + self.gate_bias.nbytes
        return linears + norms + gate + self.embedding.nbytes

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding.index_select(0, tokens)

    def loop(self, hidden: Tensor, kv: Tensor, segments: Segments) -> Tensor:
        phases = rotary_phases(segments.positions, self.inverse_frequencies, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, kv, segments, phases)
        return self.kernels.rms_norm(hidden, self.norm, self.config.norm_epsilon)

    def gate_scores(self, hidden: Tensor) -> Tensor:
        scores, _ = self.kernels.gate_scores(hidden, self.gate_weight, self.gate_bias)
        return scores

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden)
        return out.float()
