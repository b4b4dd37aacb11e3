"""The requests of one case, as the reference is asked them and as the engines are.

Lengths lie around block edges; some prompts share their beginning; three of eight are sampled with
a seed, and two end at a stop token. What they must answer comes from the dense reference alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import (
    EngineRequest,
    ExitMode,
    ExitParams,
    ExitSettings,
    Generation,
    RequestId,
    SamplingParams,
)

from ..reference.answer import Answer, Ask, answer
from ..reference.dense import DenseModel
from .cases import RANDOM_HEAD_SEED

PROMPT_TOKENS = (1, 3, 4, 5, 8, 9, 13, 6)
MAX_TOKENS = (9, 14, 11, 14, 10, 14, 8, 12)
SHARING = (4, 5, 6, 7)  # requests whose prompts begin alike
STOPPING = {3: 4, 6: 2}  # request -> the output whose token is made its stop token
SAMPLED = {
    1: {"temperature": 0.8},
    4: {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    5: {"temperature": 1.3, "top_p": 0.7},
}
ENGINE_MODES: dict[str, ExitMode] = {
    "ouro": "ouro",
    "delayed": "ouro_delayed",
    "trace": "trace",
    "random": "random_lookahead",
}


@dataclass(frozen=True)
class Question:
    ask: Ask
    wanted: Answer


@cache
def dense(folder: Path) -> DenseModel:
    return DenseModel(folder, torch.float64)


@cache
def questions(folder: Path, layout: str, exits: str) -> tuple[Question, ...]:
    model = dense(folder)
    draw = random.Random(f"{layout} {exits}")
    start = [draw.randrange(3, 97) for _ in range(max(PROMPT_TOKENS))]
    found = []
    for number, (length, max_tokens) in enumerate(zip(PROMPT_TOKENS, MAX_TOKENS, strict=True)):
        own = [draw.randrange(3, 97) for _ in range(length)]
        shared = length - 1 if number in SHARING else 0
        ask = Ask(
            prompt=(*start[:shared], *own[shared:]),
            max_tokens=max_tokens,
            layout=layout,
            seed=draw.getrandbits(63),
            head=(random_head(model.hidden_size), 0.0),
            stop=() if number % 2 else (model.eos_token_id,),
            **SAMPLED.get(number, {}),  # type: ignore[arg-type]
            **_exit(exits, number, model.num_loops, max_tokens, draw),  # type: ignore[arg-type]
        )
        if number in STOPPING:
            stop = answer(model, ask).tokens[STOPPING[number]]
            ask = replace(ask, stop=(*ask.stop, stop))
        found.append(Question(ask, answer(model, ask)))
    return tuple(found)


def random_head(hidden_size: int) -> torch.Tensor:
    """What a random head's seed stands for: standard normal over sqrt(hidden_size), no bias."""
    generator = torch.Generator().manual_seed(RANDOM_HEAD_SEED)
    weight: torch.Tensor = torch.randn(hidden_size, generator=generator) / hidden_size**0.5
    return weight


def _exit(
    exits: str, number: int, loops: int, max_tokens: int, draw: random.Random
) -> dict[str, object]:
    if exits == "mixed":
        exits = tuple(ENGINE_MODES)[number % 4]
    if exits == "trace":
        depths = (draw.randint(1, loops) for _ in range(max_tokens - 1))
        return {"mode": "trace", "trace": (loops, *depths)}
    threshold, min_loops, max_loops = (
        (0.5, 1, None),
        (0.7, 1, None),
        (0.5, 2, None),
        (1.0, 1, None),
        (0.6, 1, loops - 1),
        (0.4, 1, None),
        (1.0, 1, 1),
        (0.0, 2, None),
    )[(number + draw.randrange(8)) % 8]
    settings = {"threshold": threshold, "min_loops": min_loops, "max_loops": max_loops}
    return {"mode": ENGINE_MODES[exits], **settings}


def sampling(ask: Ask, eos: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        seed=ask.seed,
        ignore_eos=eos not in ask.stop,
        stop_token_ids=tuple(token for token in ask.stop if token != eos),
    )


def user_request(number: int, ask: Ask, eos: int) -> GenerateRequest:
    traced = ask.mode == "trace"
    return GenerateRequest(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=ask.prompt,
        sampling=sampling(ask, eos),
        exit=ExitParams(
            exit_mode=ask.mode,  # type: ignore[arg-type]
            trace=ask.trace if traced else None,
            exit_threshold=None if traced else ask.threshold,
            min_loops=ask.min_loops,
            max_loops=ask.max_loops,
        ),
    )


def engine_request(generation: int, ask: Ask, model: DenseModel) -> EngineRequest:
    return EngineRequest(
        generation=Generation(generation),
        prompt=ask.prompt,
        sampling=sampling(ask, model.eos_token_id),
        exit=ExitSettings(
            threshold=ask.threshold,
            min_loops=ask.min_loops,
            max_loops=ask.max_loops or model.num_loops,
            mode=ask.mode,  # type: ignore[arg-type]
            trace=ask.trace,
        ),
    )


@dataclass
class Tally:
    """How many answers were compared, and which differed after a tie."""

    compared: int = 0
    ties: int = 0

    def compare(self, question: Question, tokens: Sequence[int], depths: Sequence[int]) -> None:
        """Equal, or different only from the first output on that rounding may decide."""
        wanted = question.wanted
        self.compared += 1
        got, want = (
            list(zip(tokens, depths, strict=True)),
            list(zip(wanted.tokens, wanted.depths, strict=True)),
        )
        if got == want:
            return
        first = next(
            (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b),
            min(len(got), len(want)),
        )
        tie = wanted.first_tie()
        assert tie is not None and tie <= first, (
            f"output {first} of {question.ask}: (token, loops) {got[first:]}, reference "
            f"{want[first:]}, gaps there {wanted.gaps[first : first + 1]}"
        )
        self.ties += 1
        print(f"tie: {question.ask} differs from output {first} on, gaps {wanted.gaps[tie]}")
