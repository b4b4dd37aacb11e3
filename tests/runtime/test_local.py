"""The local engine as its callers see it: deltas, cancels, duplicates, deadlines, its end."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import DuplicateRequest, InvalidRequest, TooLong, WorkerError
from rlt.runtime.interfaces import ChatMessage, Delta, GenerateRequest
from rlt.runtime.local import LocalEngine
from rlt.runtime.types import FinishReason, RequestId, SamplingParams

from .helpers import alone, engine_request
from .simulated_executor import SimulatedExecutor


class Letters:
    """Token n is the n-th letter; an odd token's letter waits for the next token."""

    def encode(self, text: str) -> Sequence[int]:
        return [ord(letter) - ord("a") for letter in text]

    def render(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        return self.encode("".join(message.content for message in messages))

    def decoder(self) -> "LettersDecoder":
        return LettersDecoder()


class LettersDecoder:
    def __init__(self) -> None:
        self._pending = ""

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += "".join(chr(ord("a") + token) for token in token_ids)
        if token_ids[-1] % 2:
            return ""
        return self.finish()

    def finish(self) -> str:
        text, self._pending = self._pending, ""
        return text


def start(executor: SimulatedExecutor, max_waiting: int = 1024) -> LocalEngine:
    config = EngineConfig(model="simulated", chunk_tokens=4)
    return LocalEngine(config, executor=executor, tokenizer=Letters(), max_waiting=max_waiting)


@pytest.fixture
def local() -> Iterator[LocalEngine]:
    with start(SimulatedExecutor(num_blocks=80)) as engine:
        yield engine


def ask(
    name: str, prompt: tuple[int, ...] | None = (1, 2, 3), max_tokens: int = 4, **more: object
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True),
        **more,  # type: ignore[arg-type]
    )


def read_until_finished(local: LocalEngine, count: int = 1) -> list[Delta]:
    deltas: list[Delta] = []
    while sum(delta.finish_reason is not None for delta in deltas) < count:
        new = local.outputs(timeout_s=10)
        assert new, f"nothing came after {deltas}"
        deltas += new
    return deltas


def test_generate_gives_each_request_what_it_gives_alone(local: LocalEngine) -> None:
    results = local.generate([ask(f"r{n}", (n, 2, 3)) for n in range(12)])
    for number, result in enumerate(results):
        expected = alone(engine_request(1, (number, 2, 3)))
        assert (list(result.token_ids), list(result.exit_depths)) == expected[:2]
        assert result.num_prompt_tokens == 3
    local.check()
    assert local.statistics()["live"] == 0


def test_deltas_come_in_order_and_the_last_one_tells_why_it_ended(local: LocalEngine) -> None:
    local.submit(ask("a"))
    deltas = read_until_finished(local)
    assert [delta.start_index for delta in deltas] == [0, 1, 2, 3]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [stamp.event for stamp in deltas[-1].timeline] == [
        "received",
        "first_token",
        "last_token",
    ]
    assert local.active() == ()


def test_text_and_messages_are_encoded_and_output_is_decoded(local: LocalEngine) -> None:
    message = ChatMessage(role="user", content="bcd")
    by_text, by_messages, by_ids = local.generate(
        [ask("t", None, text="bcd"), ask("m", None, messages=(message,)), ask("i")]
    )
    assert by_text.token_ids == by_messages.token_ids == by_ids.token_ids
    assert by_text.text == "".join(chr(ord("a") + token) for token in by_text.token_ids)


def test_exactly_one_form_of_prompt_is_accepted(local: LocalEngine) -> None:
    for request in (ask("a", None), ask("b", text="x")):
        with pytest.raises(InvalidRequest, match="exactly one"):
            local.submit(request)


def test_text_without_a_tokenizer_says_what_to_do() -> None:
    config = EngineConfig(model="simulated")
    with LocalEngine(config, executor=SimulatedExecutor()) as local:
        with pytest.raises(InvalidRequest, match="send prompt_token_ids"):
            local.submit(ask("a", None, text="x"))


def test_a_bad_request_leaves_the_engine_serving(local: LocalEngine) -> None:
    for bad in (ask("a", ()), ask("a", (99,)), ask("a", max_tokens=0)):
        with pytest.raises(InvalidRequest):
            local.submit(bad)
    with pytest.raises(TooLong):
        local.submit(ask("a", max_tokens=60))
    assert local.active() == ()
    assert local.generate([ask("a")])[0].finish_reason is FinishReason.LENGTH


def test_a_live_id_cannot_be_used_again_until_it_was_cancelled() -> None:
    executor = SimulatedExecutor(eager=False)
    with start(executor) as local:
        local.submit(ask("a"))
        with pytest.raises(DuplicateRequest, match="'a'"):
            local.submit(ask("a"))
        local.cancel(RequestId("a"))
        local.submit(ask("a"))
        assert local.active() == ("a",)
        local.cancel(RequestId("a"))
        reasons = [delta.finish_reason for delta in read_until_finished(local, 2)]
        assert reasons == [FinishReason.CANCELLED] * 2


def test_nothing_comes_after_a_cancel_and_everything_is_given_back(local: LocalEngine) -> None:
    local.submit(ask("a", max_tokens=30))
    first = local.outputs(timeout_s=10)
    local.cancel(RequestId("a"))
    local.cancel(RequestId("a"))
    local.cancel(RequestId("unknown"))
    deltas = first + (read_until_finished(local) if first[-1].finish_reason is None else [])
    assert [d.finish_reason is None for d in deltas] == [True] * (len(deltas) - 1) + [False]
    while local.statistics()["live"]:
        pass
    assert local.statistics()["blocks_free"] == local.statistics()["blocks_total"]
    assert local.outputs(timeout_s=0.01) == []


def test_a_request_past_its_deadline_fails_by_name() -> None:
    with start(SimulatedExecutor(eager=False)) as local:
        result = local.generate([ask("a", deadline_s=0.02)])[0]
    assert result.finish_reason is FinishReason.ERROR
    assert result.error_code == "deadline_exceeded"


def test_a_failed_pass_fails_its_request_and_the_engine_goes_on() -> None:
    executor = SimulatedExecutor()
    executor.fail_next_pass = "boom"
    with start(executor) as local:
        result = local.generate([ask("a")])[0]
        assert (result.error_code, result.finish_reason) == ("pass_failed", FinishReason.ERROR)
        assert local.generate([ask("a")])[0].finish_reason is FinishReason.LENGTH


def test_a_request_that_finds_the_queue_full_fails_with_overloaded() -> None:
    with start(SimulatedExecutor(), max_waiting=1) as local:
        results = local.generate([ask(f"r{n}") for n in range(50)])
    codes = {result.error_code for result in results}
    assert codes <= {None, "overloaded"} and None in codes


def test_shutdown_ends_live_requests_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    executor = SimulatedExecutor(eager=False)
    local = start(executor)
    local.submit(ask("a"))
    local.shutdown()
    local.shutdown()
    assert [delta.finish_reason for delta in local.outputs()] == [FinishReason.CANCELLED]
    assert local.outputs() == []
    assert executor.shut_down and set(threading.enumerate()) == before
    with pytest.raises(WorkerError, match="shut down"):
        local.submit(ask("b"))
    local.check()


def test_an_engine_whose_thread_fails_says_so_to_everybody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = SimulatedExecutor()
    executor.memory.hidden = None  # type: ignore[assignment]
    with start(executor) as local:
        result = local.generate([ask("a")])[0]
        assert result.error_code == "worker_failed"
        with pytest.raises(WorkerError, match="the engine failed: TypeError"):
            local.submit(ask("b"))
    assert "the engine's thread failed" in caplog.text


def test_a_stop_string_ends_a_request_and_gives_everything_back(local: LocalEngine) -> None:
    [whole] = local.generate([ask("a", max_tokens=12)])
    stop = whole.text[3:6]
    [result] = local.generate([ask("b", max_tokens=12, stop=("?", stop))])
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) == len(result.exit_depths) < 12
    assert local.active() == ()
    local.check()
