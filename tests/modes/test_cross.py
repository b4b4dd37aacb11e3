"""Every combination of modes gives what the dense reference gives: tokens, depths, samples.

A fixed sample runs every time, in which every three settings meet; all of them run in `make soak`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .asks import Tally, dense, questions
from .cases import Case, Engine, all_cases, sample_of
from .engines import Local, Pair, Runner
from .models import SHAPES, write_checkpoint

CASES = all_cases()
SAMPLE = sample_of(CASES)


class Running:
    """The engines of one configuration at a time: cases of one engine follow each other."""

    def __init__(self, folder: Path) -> None:
        self.folders = {shape.name: folder / shape.name for shape in SHAPES}
        for shape in SHAPES:
            write_checkpoint(self.folders[shape.name], shape)
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self.tally = Tally()

    def folder(self, engine: Engine) -> Path:
        return self.folders[engine.model]

    def runner(self, engine: Engine) -> Runner:
        if self._runner is None or self._engine != engine:
            self.close()
            model = dense(self.folder(engine))
            settings = engine.settings(model.num_loops if engine.layout == "last_exited" else 1)
            kind = Local if engine.where == "local" else Pair
            self._engine = engine
            settings["model"] = str(self.folder(engine))
            self._runner = kind(model, **settings)
        return self._runner

    def close(self) -> None:
        """Also after a failure: the next case must not meet a broken engine."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Running]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = Running(tmp_path_factory.mktemp("modes"))
    yield engines
    engines.close()
    torch.set_num_threads(threads)
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{engines.tally.compared} answers compared, {engines.tally.ties} ties", flush=True)


def test_the_questions_reach_every_depth_and_both_endings(running: Running) -> None:
    for shape in SHAPES:
        for layout in ("last_exited", "shared"):
            for exits in ("ouro", "delayed", "trace", "mixed"):
                asked = questions(running.folders[shape.name], layout, exits)
                depths = {depth for q in asked for depth in q.wanted.depths[1:]}
                assert depths == set(range(1, shape.loops + 1)), (shape.name, layout, exits)
                assert {q.wanted.finish for q in asked} == {"stop", "length"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in SAMPLE else [pytest.mark.soak], id=str(c)) for c in CASES],
)
def test_the_reference_gives_the_same(running: Running, case: Case) -> None:
    engine = case.engine
    asked = questions(running.folder(engine), engine.layout, case.exits)
    runner = running.runner(engine)
    try:
        preempted = runner.count("preemptions") if engine.preempts else 0
        hits = runner.count("prefix_hit_tokens") if engine.caches else 0
        for _ in range(2 if engine.caches else 1):
            given = runner.run([question.ask for question in asked])
            for question, answer in zip(asked, given, strict=True):
                running.tally.compare(question, answer.tokens, answer.depths)
                if len(answer.tokens) == len(question.wanted.tokens):
                    assert answer.finish == question.wanted.finish
        runner.at_rest()
        if engine.preempts:
            assert runner.count("preemptions") > preempted, "the pool was not small enough"
        if engine.caches:
            assert runner.count("prefix_hit_tokens") > hits, "no prompt was found in the cache"
    except BaseException:
        running.close()
        raise
