"""Trains a small looped model and its exit gate on generated word problems.

    python tools/train.py --out DIR --hours 0.3 --lr 3e-3
    python tools/train.py --out DIR --hours 0.75 --lr 2.5e-3 --init DIR/model.safetensors
    python tools/train.py --out DIR --hours 0.1 --lr 8e-4 --init DIR/model.safetensors

made the embedded model on one CPU core. Stage I trains everything, the loss of every loop weighted
by the gate's exit distribution, with an entropy bonus. Stage II trains the gate alone, to go on
only where the next loop lowers a token's loss by more than a margin.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from build_tokenizer import build, render
from looped_lm import LOOPS, LoopedLM, Shape, exit_distribution
from problems import sample
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

POSITIONS = 256
EOS = 2
REPORT_S = 60.0
EXIT_MARGIN = 0.005  # what a further loop must save, in nats per token, to be worth running


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and the tokens that follow them, from an endless row of problems."""
    need = batch * (POSITIONS + 1)
    row: list[int] = []
    while True:
        while len(row) < need:
            problems = [sample(rng) for _ in range(256)]
            texts = [render(problem.question, problem.solution) for problem in problems]
            for ids in tokenizer(texts)["input_ids"]:
                row += ids
        block = torch.tensor(row[:need]).view(batch, POSITIONS + 1)
        row = row[need:]
        yield block[:, :-1], block[:, 1:]


def token_losses(model: LoopedLM, states: list[Tensor], targets: Tensor) -> Tensor:
    """[batch, positions, LOOPS]: cross-entropy of each target, had the token exited there."""
    return torch.stack(
        [
            F.cross_entropy(
                model.lm_head(state).float().flatten(0, 1), targets.reshape(-1), reduction="none"
            ).view(targets.shape)
            for state in states
        ],
        -1,
    )


def stage_one_loss(model: LoopedLM, inputs: Tensor, targets: Tensor, entropy: float) -> Tensor:
    states = model(inputs)
    exits = exit_distribution(model.hazards(states))
    losses = token_losses(model, states, targets)
    spread = -(exits * exits.clamp_min(1e-9).log()).sum(-1)
    return ((exits * losses).sum(-1) - entropy * spread).mean() + 0.1 * losses[..., -1].mean()


def train_everything(
    model: LoopedLM, data: Iterator[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> None:
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(0.9, 0.98),
    )
    budget_s = options.hours * 3600
    started_s = reported_s = time.monotonic()
    step = 0
    while (elapsed_s := time.monotonic() - started_s) < budget_s:
        done = elapsed_s / budget_s
        for group in optimizer.param_groups:
            group["lr"] = options.lr * _schedule(step, done)
        loss = stage_one_loss(model, *next(data), entropy=0.1 if done < 0.6 else 0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            print(f"{elapsed_s:.0f} s, step {step}: loss {loss.item():.3f}", flush=True)
            save(model, options)
    print(f"stage I: {step} steps, {step * options.batch * POSITIONS / 1e6:.1f} M tokens")


def _schedule(step: int, done: float) -> float:
    """Twenty steps of warm-up, then half a cosine down to 2 %."""
    return min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train_gate(
    model: LoopedLM, data: Iterator[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> None:
    model.requires_grad_(False)
    gate = model.model.early_exit_gate.requires_grad_(True)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=1e-2)
    started_s = time.monotonic()
    steps = 0
    while time.monotonic() - started_s < options.gate_hours * 3600:
        inputs, targets = next(data)
        with torch.no_grad():
            states = model(inputs)
            losses = token_losses(model, states, targets)
        hazards = model.hazards(states)
        gain = (losses[..., :-1] - losses[..., 1:]).clamp_min(0)
        should_exit = 1 - torch.sigmoid(50 * (gain - EXIT_MARGIN))
        loss = F.binary_cross_entropy(hazards[..., :-1].clamp(1e-5, 1 - 1e-5), should_exit)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    print(f"stage II: {steps} steps")


@torch.no_grad()
def exact_answers(
    model: LoopedLM, tokenizer: PreTrainedTokenizerFast, loops: int, count: int
) -> float:
    """The share of held-out problems answered right at a fixed number of loops, greedily."""
    rng = random.Random(999)
    right = 0
    for question, _, answer in (sample(rng) for _ in range(count)):
        prompt = list(tokenizer(render(question))["input_ids"])
        ids = list(prompt)
        for _ in range(60):
            state = model(torch.tensor([ids]))[loops - 1]
            ids.append(int(model.lm_head(state[0, -1]).argmax()))
            if ids[-1] == EOS:
                break
        text = tokenizer.decode(ids[len(prompt) :])
        right += text.strip().endswith(f"The answer is {answer}.<|im_end|>")
    return right / count


def save(model: LoopedLM, options: argparse.Namespace) -> None:
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(_shape(options).hugging_face_config(), indent=2)
    (options.out / "config.json").write_text(config)


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(hidden=options.hidden, layers=options.layers, intermediate=options.intermediate)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small looped model on word problems.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the checkpoint and its tokenizer")
    add("--init", type=Path, help="model.safetensors to go on from")
    add("--hours", type=float, default=1.0, help="time for stage I, hours")
    add("--gate-hours", type=float, default=0.1, help="time for stage II, hours")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--batch", type=int, default=32, help=f"rows of {POSITIONS} positions in a step")
    add("--hidden", type=int, default=128, help="hidden size, a multiple of 32")
    add("--layers", type=int, default=2, help="physical layers")
    add("--intermediate", type=int, default=384, help="width of the MLP")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--check", type=int, default=200, help="held-out problems to answer at the end")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build(options.out)
    model = LoopedLM(_shape(options))
    if options.init is not None:
        model.load_state_dict(load_file(options.init))
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    data = batches(tokenizer, random.Random(7), options.batch)
    train_everything(model, data, options)
    save(model, options)
    train_gate(model, data, options)
    save(model, options)
    if options.check:
        for loops in (2, LOOPS):
            share = exact_answers(model, tokenizer, loops, options.check)
            print(f"exact answers at {loops} loops: {share:.1%}")


if __name__ == "__main__":
    main()
