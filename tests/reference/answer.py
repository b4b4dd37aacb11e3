"""What one request must give: tokens, loops per token, why it ended, and how near any tie was.

Owns the exit rules and the end of a request, written down a second time. Runs one request alone,
never two; never imports the engine.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .dense import DenseModel, Memory
from .draw import draw

TIE = 1e-4  # a decision nearer than this may fall either way in float32


@dataclass(frozen=True, kw_only=True)
class Ask:
    """head: weight and bias of the frozen head of mode random_lookahead."""

    prompt: tuple[int, ...]
    max_tokens: int
    layout: str = "last_exited"
    mode: str = "ouro"
    threshold: float = 1.0
    min_loops: int = 1
    max_loops: int | None = None
    trace: tuple[int, ...] = ()
    head: tuple[Tensor, float] | None = field(default=None, repr=False)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()  # EOS and stop tokens; they are part of the output


class Gaps(NamedTuple):
    """The smallest distance of any decision from falling otherwise."""

    logit: float = math.inf
    exit: float = math.inf
    sampling: float = math.inf

    def tie(self) -> bool:
        return min(self) < TIE


@dataclass
class Answer:
    """gaps: per output token, those of its own choice and of the exit that led to it."""

    tokens: list[int]
    depths: list[int]
    finish: str
    gaps: list[Gaps]

    def smallest(self) -> Gaps:
        return Gaps(*(min(kind) for kind in zip(*self.gaps, strict=True)))

    def first_tie(self) -> int | None:
        """The first output that may differ without fault; after it all may."""
        return next((i for i, gaps in enumerate(self.gaps) if gaps.tie()), None)


@torch.inference_mode()
def answer(model: DenseModel, ask: Ask) -> Answer:
    memory = model.memory(ask.layout)
    for position, token in enumerate(ask.prompt):
        hidden = _full_depth(model, memory, token, position)
    result = Answer([], [], "length", [])
    depth, exit_gap = model.num_loops, math.inf
    while True:
        _produce(model, ask, hidden, result, depth, exit_gap)
        if result.tokens[-1] in ask.stop:
            result.finish = "stop"
            return result
        if len(result.tokens) == ask.max_tokens:
            return result
        position = len(ask.prompt) + len(result.tokens) - 1
        hidden, depth, exit_gap = _decode(model, ask, memory, result, position)


def _full_depth(model: DenseModel, memory: Memory, token: int, position: int) -> Tensor:
    hidden = model.embed(token)
    for depth in range(model.num_loops):
        hidden = model.loop(hidden, memory, position, depth)
    return hidden


def _produce(
    model: DenseModel, ask: Ask, hidden: Tensor, result: Answer, depth: int, exit_gap: float
) -> None:
    choice = draw(
        model.logits(hidden).tolist(),
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        seed=ask.seed,
        index=len(result.tokens),
    )
    is_greedy = ask.temperature == 0.0
    gaps = Gaps(exit=exit_gap, **{"logit" if is_greedy else "sampling": choice.gap})
    result.tokens.append(choice.token)
    result.depths.append(depth)
    result.gaps.append(gaps)


def _decode(
    model: DenseModel, ask: Ask, memory: Memory, result: Answer, position: int
) -> tuple[Tensor, int, float]:
    """Loop over the last token until it exits: hidden state, loops that it ran, exit gap."""
    rule = ExitRule(model, ask, output_index=len(result.tokens))
    hidden = model.embed(result.tokens[-1])
    for loop in range(1, model.num_loops + 1):
        hidden = model.loop(hidden, memory, position, loop - 1)
        if rule.exits(loop, hidden):
            return hidden, loop, rule.gap
    raise AssertionError("max_loops lets every token exit")


class ExitRule:
    """For the loops of one token, which must be shown to it in order."""

    def __init__(self, model: DenseModel, ask: Ask, output_index: int) -> None:
        self._model = model
        self._ask = ask
        self._last = ask.max_loops or model.num_loops
        self._planned = ask.trace[output_index] if ask.mode == "trace" else None
        self._staying = 1.0  # probability of not having exited yet, in double
        self._signalled = False
        self.gap = math.inf

    def exits(self, loop: int, hidden: Tensor) -> bool:
        ask = self._ask
        if self._planned is not None:
            return loop >= self._planned
        signalled_before = self._signalled
        self._signalled = signalled_before or self._signal(loop, hidden)
        if loop >= self._last:
            return True
        return self._signalled if ask.mode == "ouro" else signalled_before

    def _signal(self, loop: int, hidden: Tensor) -> bool:
        threshold = self._ask.threshold
        if self._ask.mode == "random_lookahead":
            assert self._ask.head is not None
            weight, bias = self._ask.head
            probability = _sigmoid(weight.to(hidden) @ hidden + bias)
        else:
            self._staying *= 1.0 - _sigmoid(self._model.gate_logit(hidden))
            probability = 1.0 - self._staying
        if threshold >= 1.0 or loop < self._ask.min_loops or loop >= self._last:
            return False
        self.gap = min(self.gap, abs(probability - threshold))
        return probability >= threshold


def _sigmoid(logit: Tensor) -> float:
    return float(torch.sigmoid(logit.float()))
