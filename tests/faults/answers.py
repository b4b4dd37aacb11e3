"""What a service answers to many requests at once, and what a local engine answers to them."""

from collections.abc import Sequence

from rlt.runtime.config import EngineConfig
from rlt.runtime.interfaces import Frontend, GenerateRequest
from rlt.runtime.local import LocalEngine

from ..system.service import GOLDEN

Answers = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def answers(frontend: Frontend, requests: Sequence[GenerateRequest]) -> Answers:
    """Tokens and exit depths of each. Every stream must be whole: no gap, nothing twice."""
    tokens: dict[str, tuple[list[int], list[int]]] = {r.request_id: ([], []) for r in requests}
    for request in requests:
        frontend.submit(request)
    unfinished = set(tokens)
    while unfinished:
        deltas = frontend.outputs(timeout_s=60.0)
        assert deltas, f"nothing came for {unfinished}"
        for delta in deltas:
            assert delta.error is None, delta
            token_ids, depths = tokens[delta.request_id]
            assert delta.start_index == len(token_ids)
            token_ids += delta.token_ids
            depths += delta.exit_depths
            if delta.finish_reason is not None:
                unfinished.remove(delta.request_id)
    return {name: (tuple(found), tuple(depths)) for name, (found, depths) in tokens.items()}


def local_answers(requests: Sequence[GenerateRequest]) -> Answers:
    config = EngineConfig(model=str(GOLDEN), num_blocks=4096, threads=1, chunk_tokens=64)
    with LocalEngine(config) as engine:
        return answers(engine, requests)
