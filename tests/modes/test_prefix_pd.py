"""Prefix hits on P and on D are independent: for every pair of them the answer is the same.

What travels is exactly what D lacked, by NIXL's own byte counters.

A page is shared up to the last prompt token, which is always computed: of a prompt of T tokens at
most (T - 1) // block pages are held.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlt.runtime.engine_core import EngineCore

from ..reference.answer import Ask, answer
from ..system.two_engines import Outcome
from .asks import Question, Tally, dense, engine_request
from .cases import BLOCK
from .engines import Pair
from .models import SHAPES, write_checkpoint

LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK + 1)
EVERY_RUN = (BLOCK, 3 * BLOCK + 1)  # the others are soak
SHAPE = SHAPES[0]
SEEDING = 10**6  # generations of requests that only fill a cache


class CachingPair:
    def __init__(self, folder: Path, layout: str, chunk_tokens: int) -> None:
        self.layout = layout
        self.model = dense(folder)
        self.pair = Pair(
            self.model,
            model=str(folder),
            layout=layout,
            chunk_tokens=chunk_tokens,
            block_size=BLOCK,
            num_blocks=256 * SHAPE.loops,
            prefix_cache=True,
        )
        self._seeded = SEEDING

    def hold(self, core: EngineCore, prompt: tuple[int, ...], pages: int) -> None:
        """Let `core` compute a prompt of its own that begins with so many pages of this one."""
        if not pages:
            return
        self._seeded += 1
        other = (*prompt[: pages * BLOCK], (prompt[-1] + 1) % SHAPE.vocab)
        request = engine_request(self._seeded, Ask(prompt=other, max_tokens=1), self.model)
        self.pair.engines.outcomes[request.generation] = Outcome()
        core.add_local(request)
        self.pair.engines.settle()

    def bytes_sent(self) -> float:
        return self.pair.engines.p.connector.statistics()["bytes_sent"]

    def hit_tokens(self, core: EngineCore) -> int:
        return core.statistics()["prefix_hit_tokens"]


@pytest.fixture(scope="module", params=["last_exited", "shared"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[5, 512])
def caching(
    layout: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CachingPair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = write_checkpoint(tmp_path_factory.mktemp("prefix") / SHAPE.name, SHAPE)
    pair = CachingPair(folder, layout, request.param)
    yield pair
    pair.pair.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(length, marks=() if length in EVERY_RUN else pytest.mark.soak)
        for length in LENGTHS
    ],
)
def test_for_all_hits_on_d_and_p_what_d_lacked_is_sent_and_the_answer_stays(
    caching: CachingPair, length: int
) -> None:
    draw, tally = random.Random(length), Tally()
    p_core, d_core = caching.pair.engines.p_core, caching.pair.engines.d_core
    most = (length - 1) // BLOCK
    for on_d in range(most + 1):
        for on_p in range(most + 1):
            prompt = tuple(draw.randrange(3, SHAPE.vocab) for _ in range(length))
            ask = Ask(prompt=prompt, max_tokens=5, layout=caching.layout, threshold=0.5)
            caching.hold(d_core, prompt, on_d)
            caching.hold(p_core, prompt, on_p)
            before = (
                caching.bytes_sent(),
                caching.hit_tokens(d_core),
                caching.hit_tokens(p_core),
            )
            [given] = caching.pair.run([ask])
            wanted = Question(ask, answer(caching.model, ask))
            tally.compare(wanted, given.tokens, given.depths)
            after = (
                caching.bytes_sent(),
                caching.hit_tokens(d_core),
                caching.hit_tokens(p_core),
            )
            gained = tuple(new - old for new, old in zip(after, before, strict=True))
            lacked = lacked_bytes(caching, length - on_d * BLOCK)
            assert gained == (lacked, on_d * BLOCK, on_p * BLOCK), (on_d, on_p)
    caching.pair.at_rest()


def lacked_bytes(caching: CachingPair, positions: int) -> int:
    geometry = caching.pair.engines.p.storage.geometry
    per_position = geometry.num_planes * geometry.num_layers * 2 * geometry.position_bytes
    return positions * per_position + geometry.hidden_bytes


def test_a_prompt_that_was_answered_once_is_sent_from_its_last_page_on(
    caching: CachingPair,
) -> None:
    """What D received is in its cache too, and of a prompt that ends with a page that page goes."""
    draw = random.Random(99)
    for length in (2 * BLOCK, 2 * BLOCK + 1):
        prompt = tuple(draw.randrange(3, SHAPE.vocab) for _ in range(length))
        ask = Ask(prompt=prompt, max_tokens=5, layout=caching.layout, threshold=0.5)
        wanted, tally = Question(ask, answer(caching.model, ask)), Tally()
        sent = []
        for _ in range(2):
            before = caching.bytes_sent()
            [given] = caching.pair.run([ask])
            tally.compare(wanted, given.tokens, given.depths)
            sent.append(caching.bytes_sent() - before)
        held = (length - 1) // BLOCK * BLOCK
        assert sent == [lacked_bytes(caching, length), lacked_bytes(caching, length - held)]


def test_generated_positions_are_never_shared(caching: CachingPair) -> None:
    """A prompt that begins with a whole earlier answer finds its prompt's pages alone."""
    draw = random.Random(5)
    prompt = tuple(draw.randrange(3, SHAPE.vocab) for _ in range(BLOCK + 1))
    first = Ask(prompt=prompt, max_tokens=2 * BLOCK, layout=caching.layout, threshold=0.5)
    [given] = caching.pair.run([first])
    longer = Ask(
        prompt=(*prompt, *given.tokens), max_tokens=5, layout=caching.layout, threshold=0.5
    )
    d_core = caching.pair.engines.d_core
    before = caching.hit_tokens(d_core)
    [again] = caching.pair.run([longer])
    assert caching.hit_tokens(d_core) - before == BLOCK
    Tally().compare(Question(longer, answer(caching.model, longer)), again.tokens, again.depths)


def test_a_page_belongs_to_what_came_before_it(caching: CachingPair) -> None:
    """The tokens of a held page at another place, or after another page, find nothing."""
    draw, tally = random.Random(6), Tally()
    first, second, third = (
        tuple(draw.randrange(3, SHAPE.vocab) for _ in range(BLOCK)) for _ in range(3)
    )
    d_core, p_core = caching.pair.engines.d_core, caching.pair.engines.p_core
    for prompt, hits in (
        ((*first, *second, 7), 0),
        ((*second, *third, 7), 0),
        ((*third, *second, 7), 0),
        ((*first, *third, 7), BLOCK),
    ):
        ask = Ask(prompt=prompt, max_tokens=5, layout=caching.layout, threshold=0.5)
        before = caching.hit_tokens(d_core), caching.hit_tokens(p_core)
        [given] = caching.pair.run([ask])
        tally.compare(Question(ask, answer(caching.model, ask)), given.tokens, given.depths)
        after = caching.hit_tokens(d_core), caching.hit_tokens(p_core)
        assert (after[0] - before[0], after[1] - before[1]) == (hits, hits)
