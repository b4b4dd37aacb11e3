"""The requests of the matrix: two that a fault meets, one for pairs that it leaves alone."""

from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import ExitParams, RequestId, SamplingParams


def _request(name: str, prompt: int, sampling: SamplingParams, exit: ExitParams) -> GenerateRequest:
    tokens = tuple(3 + (7 * i + len(name) * 11) % 500 for i in range(prompt))
    return GenerateRequest(
        request_id=RequestId(name), prompt_token_ids=tokens, sampling=sampling, exit=exit
    )


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.8, top_k=50, seed=7, ignore_eos=True)
STRUCK = (
    _request("greedy", 40, GREEDY, ExitParams(exit_threshold=0.5, min_loops=1)),
    _request("seeded", 24, SEEDED, ExitParams(exit_threshold=0.7, min_loops=1, max_loops=3)),
)
MEANWHILE = _request("meanwhile", 33, GREEDY, ExitParams(exit_threshold=0.5, min_loops=2))
REQUESTS = (*STRUCK, MEANWHILE)
