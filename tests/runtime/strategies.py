"""Random requests in every exit mode, and random ways to schedule them."""

from typing import Any

from hypothesis import strategies as st

from rlt.runtime.types import EngineRequest, ExitMode

from .helpers import engine_request

MODES: tuple[ExitMode, ...] = ("ouro", "ouro_delayed", "random_lookahead", "trace")


@st.composite
def requests(draw: st.DrawFn, most: int = 9) -> list[EngineRequest]:
    made = []
    for generation in range(1, draw(st.integers(1, most)) + 1):
        min_loops = draw(st.integers(1, 4))
        max_loops = draw(st.integers(min_loops, 4))
        max_tokens, mode = draw(st.integers(1, 6)), draw(st.sampled_from(MODES))
        depths = st.lists(
            st.integers(min_loops, max_loops), min_size=max_tokens - 1, max_size=max_tokens - 1
        )
        made.append(
            engine_request(
                generation,
                draw(st.lists(st.integers(0, 19), min_size=1, max_size=9)),
                max_tokens=max_tokens,
                threshold=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
                min_loops=min_loops,
                max_loops=max_loops,
                ignore_eos=draw(st.booleans()),
                stop=tuple(draw(st.lists(st.integers(0, 19), max_size=3))),
                mode=mode,
                trace=(4, *draw(depths)) if mode == "trace" else (),
                priority=draw(st.integers(0, 2)),
            )
        )
    return made


@st.composite
def scheduling(draw: st.DrawFn) -> dict[str, Any]:
    chunk_tokens = draw(st.integers(1, 8))
    return {
        "chunk_tokens": chunk_tokens,
        "token_budget": draw(st.none() | st.integers(chunk_tokens, chunk_tokens + 4)),
        "prefill_passes": draw(st.integers(1, 3)),
        "max_in_flight": draw(st.integers(1, 3)),
        "refill": draw(st.booleans()),
        "mixed_batches": draw(st.booleans()),
    }
