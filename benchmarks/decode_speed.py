"""Decode rate of the engine over a plain Hugging Face style loop, alternating in one run.

    python -P benchmarks/decode_speed.py [--rounds 5] [--threads 1] [--batches 1 16]

Same random weights, float32, every token at full depth, prompts of 128 tokens, 24 decoded ones (so
the context is about 140). Times decoding alone, and checks that both chose the same tokens.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import TokensProduced
from rlt.runtime.executor import ThreadExecutor, build_executor
from rlt.runtime.types import EngineRequest, ExitSettings, Generation, SamplingParams

CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "total_ut_steps": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
PROMPT_TOKENS = 128
NEW_TOKENS = 24
CHUNK_TOKENS = 16 * PROMPT_TOKENS
BLOCK_SIZE = 16


def random_checkpoint(folder: Path) -> None:
    """Weights that keep activations near 1, under the checkpoint's names."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    weights = {
        "model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
        "model.early_exit_gate.weight": matrix(1, hidden),
        "model.early_exit_gate.bias": torch.zeros(1),
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(hidden, hidden)
        weights[f"{prefix}mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{prefix}mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(hidden)
            weights[f"{prefix}{norm}_2.weight"] = torch.full((hidden,), 0.5)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


class Engine:
    """A whole local engine, from scheduler to model, driven as its owner would."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self._executor = executor
        loops = executor.capabilities().geometry.num_depths
        self._exit = ExitSettings(threshold=1.0, min_loops=loops, max_loops=loops)
        self._core = EngineCore(
            executor, SchedulerConfig(chunk_tokens=CHUNK_TOKENS), clock=SystemClock()
        )
        self._generations = itertools.count(1)

    def decode(self, prompts: Tensor) -> tuple[float, list[list[int]]]:
        """Greedy; -> seconds of decoding alone, and the tokens of each row.

        All prompts fit one prefill pass, so all rows start to decode together.
        """
        tokens: dict[Generation, list[int]] = {}
        for prompt in prompts.tolist():
            generation = Generation(next(self._generations))
            tokens[generation] = []
            self._core.add_local(
                EngineRequest(
                    generation=generation,
                    prompt=tuple(prompt),
                    sampling=SamplingParams(max_tokens=NEW_TOKENS, seed=0, ignore_eos=True),
                    exit=self._exit,
                )
            )
        started_s = 0.0
        while not self._core.idle():
            produced = [e for e in self._core.step() if isinstance(e, TokensProduced)]
            for event in produced:
                tokens[event.generation] += event.token_ids
            if produced and produced[-1].start_index == 0:
                started_s = time.perf_counter()
            if not self._core.idle():
                self._executor.wait(60.0)
        return time.perf_counter() - started_s, list(tokens.values())


def decode_plainly(loop: Any, prompts: Tensor) -> tuple[float, list[list[int]]]:
    loop.cache = {}
    ids = loop.forward(prompts).argmax(-1, keepdim=True)
    out = [ids]
    started_s = time.perf_counter()
    for _ in range(1, NEW_TOKENS):
        ids = loop.forward(ids).argmax(-1, keepdim=True)
        out.append(ids)
    return time.perf_counter() - started_s, torch.cat(out, 1).tolist()


def load_baseline() -> ModuleType:
    path = Path(__file__).with_name("hf_loop.py")
    spec = importlib.util.spec_from_file_location("hf_loop", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), float32, {json.dumps(CONFIG)}")
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder))
        executor = build_executor(
            EngineConfig(model=folder, block_size=BLOCK_SIZE, threads=args.threads, device="cpu"),
            progress=print,
        )
        loop = load_baseline().HfLoop(CONFIG, load_file(Path(folder) / "model.safetensors"))
        try:
            engine = Engine(executor)
            for batch in args.batches:
                compare(engine, loop, batch, args.rounds)
        finally:
            executor.shutdown()


def compare(engine: Engine, loop: Any, batch: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(
        CONFIG["vocab_size"], (batch, PROMPT_TOKENS), generator=generator, dtype=torch.int64
    )
    rates: dict[str, list[float]] = {"baseline": [], "engine": []}
    for _ in range(rounds):
        plain_s, expected = decode_plainly(loop, prompts)
        engine_s, tokens = engine.decode(prompts)
        if tokens != expected:
            raise SystemExit("engine and baseline chose different tokens")
        decoded = batch * (NEW_TOKENS - 1)
        rates["baseline"].append(decoded / plain_s)
        rates["engine"].append(decoded / engine_s)
    baseline, ours = (statistics.median(rates[name]) for name in ("baseline", "engine"))
    print(
        f"batch {batch:3d}: baseline {baseline:7.1f} tokens/s, engine {ours:7.1f} tokens/s, "
        f"ratio {ours / baseline:.2f} (medians of {rounds} alternating rounds)"
    )


if __name__ == "__main__":
    main()
