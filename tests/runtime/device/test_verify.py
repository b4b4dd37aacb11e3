"""VERIFY: several positions through every loop in one pass equal the same tokens one by one."""

import pytest
import torch

from rlt.runtime.plans import SchedulerOutput, Stage, VerifyRow
from rlt.runtime.types import SamplingParams
from rlt.runtime.worker import Worker

from .checkpoints import golden_worker
from .driver import Driver, Request

GREEDY = SamplingParams()
PROMPTS = [[5, 6, 7, 8, 9], [11, 3], [21, 22, 23, 24, 25, 26, 27, 28]]


def engine(**options: object) -> tuple[Worker, Driver]:
    worker = golden_worker(block_size=4, num_blocks=512, **options)
    worker.parts.storage.kv.fill_(float("nan"))
    worker.parts.storage.hidden.fill_(float("nan"))
    return worker, Driver(worker.run, worker.parts.storage.geometry, 512)


def started(driver: Driver, slot: int) -> Request:
    request = driver.start(slot, PROMPTS[slot], 16)
    driver.prefill(request, 64)
    driver.coda([request], GREEDY)
    return request


def decode(driver: Driver, request: Request, count: int) -> None:
    for _ in range(count):
        driver.decode_token([request], lambda _, hazards: len(hazards) == 4, GREEDY)


def verify_row(driver: Driver, request: Request, tokens: list[int]) -> VerifyRow:
    """tokens: the request's last one, then guesses at what follows."""
    used = driver.geometry.plane_blocks(request.position + len(tokens))
    tables = tuple(plane[:used] for plane in request.blocks)
    return VerifyRow(request.generation, request.position, tuple(tokens), tables)


def test_right_guesses_are_confirmed_and_leave_the_same_kv() -> None:
    (one, one_driver), (many, many_driver) = engine(), engine()
    plain = [started(one_driver, slot) for slot in range(3)]
    for request in plain:
        decode(one_driver, request, 6)
    requests = [started(many_driver, slot) for slot in range(3)]
    hidden = many.parts.storage.hidden.clone()
    rows = tuple(
        verify_row(many_driver, request, expected.tokens[: 2 + request.slot * 2])
        for request, expected in zip(requests, plain, strict=True)
    )
    output = many_driver.step(Stage.VERIFY, verify=rows)
    for row, expected, verified in zip(rows, plain, output.verified, strict=True):
        assert (verified.generation, verified.start) == (row.generation, row.start)
        assert list(verified.next_tokens) == expected.tokens[1 : len(row.tokens) + 1]
        for depth, plane in enumerate(row.tables):
            for position in range(row.start, row.start + len(row.tokens)):
                block, offset = plane[position // 4], position % 4
                other = expected.blocks[depth][position // 4]
                torch.testing.assert_close(
                    many.parts.storage.kv[block, :, :, offset],
                    one.parts.storage.kv[other, :, :, offset],
                    atol=1e-5,
                    rtol=1e-5,
                )
    assert torch.equal(many.parts.storage.hidden.nan_to_num(7.0), hidden.nan_to_num(7.0))


def test_all_rows_of_a_verify_pass_share_one_call_of_the_lm_head_and_one_per_loop() -> None:
    worker, driver = engine()
    requests = [started(driver, slot) for slot in range(3)]
    calls: list[str] = []
    model = worker.parts.model
    assert isinstance(model, torch.nn.Module)
    hooks = [
        module.register_forward_hook(lambda _, __, ___, name=name: calls.append(name))
        for name, module in model.named_modules()
        if name in ("lm_head", "layers.0.qkv")
    ]
    rows = tuple(
        verify_row(driver, request, [1, 2, 3][: 1 + n]) for n, request in enumerate(requests)
    )
    driver.step(Stage.VERIFY, verify=rows)
    for hook in hooks:
        hook.remove()
    assert calls == ["layers.0.qkv"] * 4 + ["lm_head"]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_wrong_guesses_truncated_leave_the_request_as_if_it_had_never_guessed(right: int) -> None:
    (_, plain_driver), (worker, driver) = engine(), engine()
    plain = started(plain_driver, 0)
    decode(plain_driver, plain, 10)
    request = started(driver, 0)
    guesses = [*plain.tokens[1 : 1 + right], (plain.tokens[1 + right] + 1) % 512, 9, 9]
    row = verify_row(driver, request, [request.tokens[-1], *guesses])
    [verified] = driver.step(Stage.VERIFY, verify=(row,)).verified
    assert list(verified.next_tokens[: right + 1]) == plain.tokens[1 : right + 2]
    request.tokens += [*guesses[:right], verified.next_tokens[right]]
    worker.truncate(request.generation, request.position, tuple(request.blocks))
    decode(driver, request, 10 - right - 1)
    assert request.tokens == plain.tokens


def test_layout_shared_refuses_to_verify_by_name() -> None:
    worker, driver = engine(layout="shared")
    request = started(driver, 0)
    row = VerifyRow(request.generation, 5, (1, 2), tuple(request.blocks))
    output = worker.run(SchedulerOutput(sequence=1, stage=Stage.VERIFY, verify=(row,)))
    assert output.error is not None
    assert "last_exited" in output.error


def test_a_row_that_reads_truncated_positions_fails_alone() -> None:
    worker, driver = engine()
    first, second = started(driver, 0), started(driver, 2)
    worker.truncate(first.generation, 2, tuple(first.blocks))
    rows = tuple(verify_row(driver, request, [4, 5]) for request in (first, second))
    output = driver.step(Stage.VERIFY, verify=rows)
    assert [verified.generation for verified in output.verified] == [second.generation]
    assert [failure.generation for failure in output.failed] == [first.generation]
    assert "not finite" in output.failed[0].reason
