"""The same requests through real services give the local engine's tokens and exit depths."""

from collections.abc import Iterator

import pytest

from rlt.runtime.config import EngineConfig
from rlt.runtime.interfaces import Frontend
from rlt.runtime.local import LocalEngine
from rlt.runtime.types import RequestId

from .requests import sixty_four
from .service import GOLDEN, SMALL, eventually, running

Answers = dict[RequestId, tuple[tuple[int, ...], tuple[int, ...]]]


def answers(frontend: Frontend) -> Answers:
    """All 64 at once: token IDs and exit depths of each."""
    requests = sixty_four()
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    depths: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        frontend.submit(request)
    unfinished = set(tokens)
    while unfinished:
        deltas = frontend.outputs(timeout_s=60.0)
        assert deltas, f"nothing came for {unfinished}"
        for delta in deltas:
            assert delta.error is None, delta
            assert delta.start_index == len(tokens[delta.request_id])
            tokens[delta.request_id] += delta.token_ids
            depths[delta.request_id] += delta.exit_depths
            if delta.finish_reason is not None:
                unfinished.remove(delta.request_id)
    return {key: (tuple(tokens[key]), tuple(depths[key])) for key in tokens}


@pytest.fixture(scope="module")
def local() -> Iterator[Answers]:
    config = EngineConfig(model=str(GOLDEN), num_blocks=4096, threads=1, chunk_tokens=64)
    with LocalEngine(config) as engine:
        yield answers(engine)


@pytest.mark.system
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        pytest.param(1, 1, None, marks=pytest.mark.soak),
        (2, 2, "tcp"),
        pytest.param(1, 1, "tcp", marks=pytest.mark.soak),
        pytest.param(2, 1, None, marks=pytest.mark.soak),
        pytest.param(2, 1, "tcp", marks=pytest.mark.soak),
        pytest.param(2, 2, None, marks=pytest.mark.soak),
    ],
)
def test_a_service_answers_as_the_local_engine_does(
    local: Answers, prefill: int, decode: int, transport: str | None
) -> None:
    with running(prefill, decode, *SMALL, transport=transport) as service:
        with service.client() as client:
            assert answers(client) == local
            eventually(lambda: service.at_rest(client), "all resources are back")
            workers = service.workers(client)
        assert len(workers) == prefill + decode
        for worker in workers.values():
            assert worker["live"] == 0
        busy = [w for w in workers.values() if w["role"] == "prefill" and w["bytes_sent"] > 0]
        assert len(busy) == prefill, "a prefill worker got no request"
        assert service.stop() == 0
