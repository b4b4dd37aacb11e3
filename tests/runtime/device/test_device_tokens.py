"""Tokens that stay on the device: the next PRELUDE embeds what its own CODA sampled."""

import pytest
import torch

from rlt.runtime.device_tokens import DeviceTokens
from rlt.runtime.errors import InvariantBroken
from rlt.runtime.plans import CodaRow, PreludeRow, SchedulerOutput, Stage
from rlt.runtime.types import Generation, SamplingParams

from .checkpoints import golden_worker

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.3, seed=4),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.8, seed=5, logprobs=3),
    SamplingParams(logprobs=1),
]


def coda(n: int, keep: int | None, sampling: SamplingParams) -> CodaRow:
    return CodaRow(Generation(n), n, 0, sampling, keep)


@pytest.mark.parametrize("chosen", [[0], [0, 0, 0], [1, 2], [0, 1, 2, 3]])
def test_a_prelude_takes_the_sampled_token_whatever_the_sampling(chosen: list[int]) -> None:
    worker = golden_worker(num_blocks=8)
    worker.parts.storage.hidden.normal_(generator=torch.Generator().manual_seed(2))
    slots = [10 + n for n in range(len(chosen))]
    rows = tuple(
        coda(n, slot, SAMPLINGS[which])
        for n, (slot, which) in enumerate(zip(slots, chosen, strict=True))
    )
    sampled = worker.run(SchedulerOutput(sequence=1, stage=Stage.CODA, coda=rows))
    preludes = tuple(
        PreludeRow(Generation(n), slot, None, 1) for n, slot in reversed(list(enumerate(slots)))
    )
    output = worker.run(SchedulerOutput(sequence=2, stage=Stage.PRELUDE, prelude=preludes))
    assert output.error is None
    tokens = [token.token for token in sampled.tokens]
    with torch.inference_mode():
        want = worker.parts.model.embed(torch.tensor(tokens))
    assert torch.equal(worker.parts.storage.hidden[slots], want)


def test_given_and_kept_tokens_share_a_pass_and_rows_that_keep_nothing_are_left_out() -> None:
    tokens = DeviceTokens(6, torch.device("cpu"))
    rows = [coda(n, keep, SAMPLINGS[0]) for n, keep in ((1, 4), (2, None), (3, 0))]
    tokens.keep(rows, torch.tensor([100, 200, 300]))
    wanted = [
        PreludeRow(Generation(3), 0, None, 1),
        PreludeRow(Generation(2), 2, 77, 1),
        PreludeRow(Generation(1), 4, None, 1),
    ]
    assert tokens.inputs(wanted).tolist() == [300, 77, 100]
    assert tokens.inputs(wanted[1:2]).tolist() == [77]


@pytest.mark.parametrize("generation, slot", [(1, 3), (2, 4)])
def test_a_token_that_another_request_kept_is_never_taken(generation: int, slot: int) -> None:
    tokens = DeviceTokens(6, torch.device("cpu"))
    tokens.keep([coda(1, 4, SAMPLINGS[0])], torch.tensor([100]))
    with pytest.raises(InvariantBroken, match=f"generation {generation}: no token"):
        tokens.inputs([PreludeRow(Generation(generation), slot, None, 1)])
