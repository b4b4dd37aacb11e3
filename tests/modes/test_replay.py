"""Replay on real engines: behind every cut, the tokens and loops of the uninterrupted run.

A fixed sample runs every time, in which every two settings meet; all of them run in `make soak`.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlt.runtime.events import Reservation
from rlt.runtime.types import BlockTables, EngineRequest, Generation

from ..reference.answer import Ask, answer
from ..system.two_engines import Side
from .asks import MAX_TOKENS, Question, Tally, dense, questions
from .cases import BLOCK, Case, Engine, all_cases, sample_of
from .engines import Given, Pair
from .models import SHAPES, write_checkpoint
from .replaying import Replaying

CASES = all_cases()
SAMPLE = sample_of(CASES, strength=2)
CHUNKS = {"whole": (512, BLOCK), "chunked": (1, 3)}  # a case runs with one of them
KV_ERROR = 1e-5  # of the largest value


def settings_of(engine: Engine, folder: Path) -> dict[str, object]:
    planes = dense(folder).num_loops if engine.layout == "last_exited" else 1
    chosen = random.Random(str(engine)).choice(CHUNKS[engine.prompts])
    return {**engine.settings(planes), "model": str(folder), "chunk_tokens": chosen}


class Running:
    """The engines of one configuration at a time, and what each case gave uninterrupted."""

    def __init__(self, folder: Path) -> None:
        self.folders = {shape.name: folder / shape.name for shape in SHAPES}
        for shape in SHAPES:
            write_checkpoint(self.folders[shape.name], shape)
        self._engine: Engine | None = None
        self._engines: Replaying | None = None
        self.tally = Tally()

    def engines(self, engine: Engine) -> Replaying:
        if self._engines is None or self._engine != engine:
            self.close()
            folder = self.folders[engine.model]
            self._engine = engine
            self._engines = Replaying(engine.where, dense(folder), **settings_of(engine, folder))
        return self._engines

    def close(self) -> None:
        engines, self._engines = self._engines, None
        if engines is not None:
            engines.runner.close()


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Running]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = Running(tmp_path_factory.mktemp("replay"))
    yield engines
    engines.close()
    torch.set_num_threads(threads)
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{engines.tally.compared} cuts compared, {engines.tally.ties} ties", flush=True)


def cuts_of_round(whole: list[Given], number: int) -> list[int]:
    """Outputs delivered of each request; over the rounds every number there can be, of each."""
    return [(number + index * 3) % len(given.tokens) for index, given in enumerate(whole)]


def check_cuts(
    engines: Replaying, asked: tuple[Question, ...], tally: Tally, rounds: Iterable[int]
) -> None:
    """Each round is one batch of requests that were cut at different outputs, or never."""
    whole = engines.whole([question.ask for question in asked])
    for number in rounds:
        cuts = cuts_of_round(whole, number)
        cut_requests = [
            engines.cut(question.ask, uninterrupted, cut)
            for question, uninterrupted, cut in zip(asked, whole, cuts, strict=True)
        ]
        given = engines.runner.answers(cut_requests)
        for question, uninterrupted, cut, rest in zip(asked, whole, cuts, given, strict=True):
            tokens = [*uninterrupted.tokens[:cut], *rest.tokens]
            depths = [*uninterrupted.depths[:cut], *rest.depths]
            if (tokens, depths, rest.finish) == uninterrupted:
                tally.compared += 1
            else:
                tally.compare(question, tokens, depths)


@pytest.mark.parametrize("case", sorted(SAMPLE), ids=str)
def test_behind_some_cuts_stands_what_the_uninterrupted_run_gives(
    running: Running, case: Case
) -> None:
    run_case(running, case, [1 + CASES.index(case) % 13])


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_behind_every_cut_stands_what_the_uninterrupted_run_gives(
    running: Running, case: Case
) -> None:
    """Every number of outputs of each request meets every setting; the sample meets them all."""
    every = range(max(MAX_TOKENS))
    run_case(running, case, every if case in SAMPLE else every[CASES.index(case) % 7 :: 7])


def run_case(running: Running, case: Case, rounds: Iterable[int]) -> None:
    engine = case.engine
    asked = questions(running.folders[engine.model], engine.layout, case.exits)
    engines = running.engines(engine)
    try:
        check_cuts(engines, asked, running.tally, rounds)
        engines.runner.at_rest()
        assert engines.runner.count("replay_ties") == 0
    except BaseException:
        running.close()
        raise


# What stands in D's memory.


def kv_of(side: Side, tables: BlockTables, tokens: int) -> Tensor:
    """[planes, positions, layers, K|V, heads, head_dim], a copy."""
    blocks = side.storage.kv[torch.tensor(tables)]  # [planes, columns, layers, K|V, block, ...]
    return blocks.movedim(4, 2).flatten(1, 2)[:, :tokens].clone()


class Watched:
    """A pair, and the K/V that D has of each request when it has received it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        base = {"model": str(folder), "block_size": BLOCK, "num_blocks": 256, "num_slots": 6}
        self.model = dense(folder)
        self.pair = Replaying("pd", self.model, **base, num_receive_slots=6, **settings)
        assert isinstance(self.pair.runner, Pair)
        self.runner = self.pair.runner
        self.engines = self.pair.runner.engines
        self.received: dict[Generation, Tensor] = {}
        self.requests: dict[Generation, EngineRequest] = {}
        self.tables: dict[Generation, BlockTables] = {}
        self.engines.on_received = self._copy

    def run(self, request: EngineRequest) -> Given:
        self.requests[request.generation] = request
        answer = self.engines.d_core.reserve(request)
        assert isinstance(answer, Reservation)
        self.tables[request.generation] = answer.tables
        [given] = self.runner.answers([request])
        return given

    def after(self, request: EngineRequest) -> Tensor:
        """What it left behind, as nobody else ran."""
        tables = self.tables[request.generation]
        return kv_of(self.engines.d, tables, request.capacity_tokens)

    def _copy(self, generation: Generation) -> None:
        if generation not in self.requests:
            return
        tokens = self.requests[generation].context_tokens
        self.received[generation] = kv_of(self.engines.d, self.tables[generation], tokens)


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, BLOCK, 512])
def test_d_receives_the_kv_that_the_uninterrupted_run_left_for_every_cut(
    running: Running, layout: str, chunk_tokens: int
) -> None:
    folder = running.folders["deep"]
    asked = questions(folder, layout, "mixed")
    watched = Watched(folder, layout=layout, chunk_tokens=chunk_tokens, async_scheduling=True)
    try:
        ask = asked[chunk_tokens % 8].ask
        first = watched.pair.request(ask)
        whole = watched.run(first)
        left = watched.after(first)
        for cut in range(1, len(whole.tokens)):
            request = watched.pair.cut(ask, whole, cut)
            rest = watched.run(request)
            assert (rest.tokens, rest.depths) == (whole.tokens[cut:], whole.depths[cut:])
            again = watched.received[request.generation]
            before = left[:, : again.shape[1]]
            error = (again - before).abs().max() / before.abs().max()
            assert again.shape[1] == len(ask.prompt) + cut - 1
            assert error < KV_ERROR, (ask, cut, float(error))
    finally:
        watched.runner.close()


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_a_page_of_a_replayed_position_is_never_found(running: Running, layout: str) -> None:
    """On neither side: a later prompt that begins with all of it finds the prompt's pages alone."""
    folder = running.folders["flat"]
    watched = Watched(folder, layout=layout, chunk_tokens=3, prefix_cache=True)
    try:
        prompt = tuple(range(5, 5 + 2 * BLOCK + 1))
        ask = Ask(prompt=prompt, max_tokens=3 * BLOCK, layout=layout, threshold=0.5)
        cores = (watched.engines.p_core, watched.engines.d_core)
        [whole] = watched.pair.whole([ask])
        watched.runner.answers([watched.pair.cut(ask, whole, len(whole.tokens) - 1)])
        longer = replace(ask, prompt=(*prompt, *whole.tokens), max_tokens=4)
        before = [core.statistics()["prefix_hit_tokens"] for core in cores]
        [given] = watched.pair.whole([longer])
        after = [core.statistics()["prefix_hit_tokens"] for core in cores]
        assert [new - old for new, old in zip(after, before, strict=True)] == [2 * BLOCK] * 2
        Tally().compare(Question(longer, answer(watched.model, longer)), given.tokens, given.depths)
    finally:
        watched.runner.close()


# The check.


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_a_wrong_delivered_token_fails_its_request_alone(
    running: Running, layout: str, async_scheduling: bool
) -> None:
    folder = running.folders["flat"]
    asked = questions(folder, layout, "mixed")
    engines = local_engine(folder, layout=layout, async_scheduling=async_scheduling)
    try:
        whole = engines.whole([question.ask for question in asked])
        requests = []
        for number, (question, uninterrupted) in enumerate(zip(asked, whole, strict=True)):
            request = engines.cut(question.ask, uninterrupted, len(uninterrupted.tokens) - 1)
            if number % 2:
                *good, last = request.delivered
                others = (token for token in range(97) if token not in (last, *question.ask.stop))
                request = msgspec.structs.replace(request, delivered=(*good, next(others)))
            requests.append(request)
        given = engines.runner.answers(requests)
        for number, (uninterrupted, rest) in enumerate(zip(whole, given, strict=True)):
            if number % 2:
                assert rest == ([], [], "replay_mismatch")
            else:
                assert rest.tokens == uninterrupted.tokens[-1:]
        engines.runner.at_rest()
        assert engines.runner.count("replay_ties") == 0
    finally:
        engines.runner.close()


def local_engine(folder: Path, **settings: Any) -> Replaying:
    base = {"model": str(folder), "block_size": BLOCK, "num_blocks": 256, "num_slots": 6}
    return Replaying("local", dense(folder), **base, chunk_tokens=5, **settings)


TWINS = 48  # token t and token t + TWINS look alike


def with_twins(folder: Path, alike: float) -> Path:
    """Twins are embedded alike; their logits differ by the factor `alike`."""
    write_checkpoint(folder, SHAPES[0])
    tensors = load_file(folder / "model.safetensors")
    for name, factor in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", alike)):
        tensors[name][TWINS : 2 * TWINS] = tensors[name][:TWINS] * factor
        tensors[name][2 * TWINS :] = 0
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("alike", "stands"), [(1.0, True), (1 - 1e-6, True), (0.99, False)])
def test_a_tie_is_counted_and_the_delivered_token_stands(
    tmp_path: Path, alike: float, stands: bool, async_scheduling: bool
) -> None:
    folder = with_twins(tmp_path / "twins", alike)
    engines = local_engine(folder, async_scheduling=async_scheduling)
    try:
        asks = [
            Ask(prompt=(number, 7, 9 + number), max_tokens=10, threshold=0.5, stop=())
            for number in range(3, 9)
        ]
        whole = engines.whole(asks)
        requests = []
        for number, (ask, uninterrupted) in enumerate(zip(asks, whole, strict=True)):
            request = engines.cut(ask, uninterrupted, 1 + number)
            *good, last = request.delivered
            twin = (last + TWINS) % (2 * TWINS)
            requests.append(msgspec.structs.replace(request, delivered=(*good, twin)))
        given = engines.runner.answers(requests)
        for number, (uninterrupted, rest) in enumerate(zip(whole, given, strict=True)):
            if stands:
                assert rest.tokens == uninterrupted.tokens[1 + number :]
                assert rest.depths == uninterrupted.depths[1 + number :]
            else:
                assert rest == ([], [], "replay_mismatch")
        assert engines.runner.count("replay_ties") == (len(asks) if stands else 0)
    finally:
        engines.runner.close()
