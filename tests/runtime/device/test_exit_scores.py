"""The frozen random head beside the gate: own weights, each head once per pass, rows kept apart."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlt.runtime.exit_scores import ExitScores, random_head_weight
from rlt.runtime.plans import LoopRow, Stage
from rlt.runtime.types import Generation, SamplingParams

from .checkpoints import changed_copy, golden_worker
from .driver import Driver

GATE, RANDOM, NONE = "gate", "random", "none"


class Gate:
    """Only what ExitScores asks of a model; counts its calls."""

    num_bytes = 0

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def embed(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def loop(self, hidden: Tensor, kv: Tensor, segments: object) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def gate_scores(self, hidden: Tensor) -> Tensor:
        self._calls[GATE] += 1
        return hidden[:, 0].float().sigmoid()


def rows(kinds: list[str]) -> list[LoopRow]:
    return [
        LoopRow(Generation(n), n, 10 + n, n % 4, (0,), kind != NONE, kind == RANDOM)
        for n, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kinds",
    [[GATE] * 3, [RANDOM] * 3, [NONE] * 2, [GATE, RANDOM, NONE, RANDOM, GATE], [RANDOM]],
)
def test_each_row_gets_the_score_of_the_head_it_names(kinds: list[str], dtype: torch.dtype) -> None:
    calls: Counter[str] = Counter()
    hidden = torch.randn(len(kinds), 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    heads = ExitScores(Gate(calls), 5, hidden)
    scores = heads.of(rows(kinds), hidden)
    weight = random_head_weight(5, 16)
    want = [
        (n, torch.sigmoid(hidden[n, 0].float() if kind == GATE else hidden[n].float() @ weight))
        for n, kind in enumerate(kinds)
        if kind != NONE
    ]
    assert [(s.generation, s.position, s.depth) for s in scores] == [
        (n, 10 + n, n % 4) for n, _ in want
    ]
    assert [s.score for s in scores] == pytest.approx([float(score) for _, score in want], abs=1e-6)
    assert calls[GATE] == (GATE in kinds)


def test_the_random_head_follows_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = random_head_weight(7, 32)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert torch.equal(first, random_head_weight(7, 32))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, random_head_weight(8, 32))


def test_the_seed_changes_scores_but_neither_weights_nor_fingerprint() -> None:
    scores, descriptions = [], []
    for seed in (0, 1):
        worker = golden_worker(random_head_seed=seed, num_blocks=64)
        driver = Driver(worker.run, worker.parts.storage.geometry, 64)
        request = driver.start(0, [5, 6, 7], 3)
        driver.prefill(request, 8)
        driver.coda([request], SamplingParams())
        driver.prelude([request])
        output = driver.step(
            Stage.RECURRENT, loops=(driver.loop_row(request, 0, random_head=True),)
        )
        hidden = worker.parts.storage.hidden[0]
        want = torch.sigmoid(hidden @ random_head_weight(seed, len(hidden)))
        assert output.gate_scores[0].score == pytest.approx(float(want), abs=1e-6)
        scores.append(output.gate_scores[0].score)
        descriptions.append((worker.parts.description, worker.parts.model.num_bytes))
    assert abs(scores[0] - scores[1]) > 1e-4
    assert descriptions[0] == descriptions[1]


def test_no_file_of_the_checkpoint_is_written(tmp_path: Path) -> None:
    folder = changed_copy(tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    golden_worker(model=str(folder), random_head_seed=3, num_blocks=8)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
