"""The requests that system tests send, and what a local engine answers to them."""

import random

from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import ExitParams, RequestId, SamplingParams

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
EXITS = (
    ExitParams(exit_threshold=1.0),
    ExitParams(exit_threshold=0.5, min_loops=1),
    ExitParams(exit_threshold=0.7, min_loops=1, max_loops=3),
    ExitParams(exit_threshold=0.5, min_loops=2),
)


def sixty_four(max_tokens: int = 12) -> list[GenerateRequest]:
    """Every length with every exit setting, greedy and seeded, then random ones up to 64."""
    draw = random.Random(20)
    requests = []
    for number in range(64):
        length = LENGTHS[number % 5] if number < 40 else draw.randint(1, 100)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if number % 2 else 0.8,
            top_k=0 if number % 3 else 50,
            top_p=1.0 if number % 4 else 0.9,
            seed=number,
            ignore_eos=number % 7 != 0,
        )
        requests.append(
            GenerateRequest(
                request_id=RequestId(f"r{number}"),
                prompt_token_ids=tuple(draw.randrange(3, 512) for _ in range(length)),
                sampling=sampling,
                exit=EXITS[(number // 5) % 4],
            )
        )
    return requests
