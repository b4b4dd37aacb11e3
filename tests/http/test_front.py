"""The HTTP front before scripted workers: status codes, streams, limits, who is slow or leaves."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlt.runtime.types import FinishReason

from ..coordinator.running import Running
from ..coordinator.workers import expected_depths, expected_tokens
from .calls import call, events, open_later, open_stream
from .scripted import front, tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, str]]:
    with front() as pair:
        yield pair


@pytest.fixture
def address(served: tuple[Running, str]) -> str:
    return served[1]


def test_tokens_depths_and_timeline_come_back_on_request(address: str) -> None:
    own = {"return_token_ids": True, "return_exit_depths": True, "return_timeline": True}
    answer = call(address, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 7, **own})
    [choice] = answer.body["choices"]
    assert tuple(choice["token_ids"]) == expected_tokens((5, 6), 7)
    assert tuple(choice["exit_depths"]) == expected_depths(7)
    assert [e["event"] for e in choice["timeline"]][-1] == "last_token" or choice["timeline"]
    assert answer.body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9,
    }  # fmt: skip
    assert answer.headers["x-request-id"] == answer.body["id"]


def test_nothing_of_our_own_comes_back_unasked(address: str) -> None:
    answer = call(address, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2})
    assert answer.body["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}


def test_choices_of_several_prompts_come_in_order(address: str) -> None:
    body = {"prompt": [[1], [2, 3]], "n": 2, "max_tokens": 3, "return_token_ids": True}
    choices = call(address, COMPLETIONS, body).body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    tokens = [tuple(choice["token_ids"]) for choice in choices]
    assert tokens == [expected_tokens((1,), 3)] * 2 + [expected_tokens((2, 3), 3)] * 2


def test_a_stream_has_every_token_in_order_then_usage_then_done(address: str) -> None:
    body = {
        "prompt": [9], "max_tokens": 30, "n": 2,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with open_stream(address, COMPLETIONS, body) as response:
        *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 60
    assert json.loads(usage)["choices"] == []
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for chunk in map(json.loads, chunks):
        assert chunk["usage"] is None
        tokens[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert tokens == {index: list(expected_tokens((9,), 30)) for index in (0, 1)}


def test_a_stream_tells_its_usage_so_far_when_asked(address: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [9, 8], "max_tokens": 5, "stream_options": options, "return_token_ids": True}
    with open_stream(address, COMPLETIONS, body) as response:
        *chunks, _ = map(str, events(response))
    usages = [json.loads(chunk)["usage"] for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 4, 5, 5]
    assert {usage["prompt_tokens"] for usage in usages} == {2}


def test_a_chat_stream_tells_the_role_once(address: str) -> None:
    with open_stream(address, CHAT, {"messages": HELLO, "max_tokens": 5}) as response:
        *chunks, done = events(response)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert "usage" not in json.loads(chunks[0])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": "x"}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 5000}, "max_tokens"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"seed": -1}, "seed"),
        (COMPLETIONS, {"seed": 2**70}, "seed"),
        (COMPLETIONS, {"n": 1000}, "n"),
        (COMPLETIONS, {"best_of": 4}, "best_of"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [512]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 129}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"frobnicate": 1}, "frobnicate"),
        (COMPLETIONS, {"exit_threshold": 2}, "exit_threshold"),
        (COMPLETIONS, {"exit_mode": "never"}, "exit_mode"),
        (COMPLETIONS, {"min_loops": 9}, "min_loops"),
        (COMPLETIONS, {"min_loops": 3, "max_loops": 2}, "min_loops"),
        (COMPLETIONS, {"exit_mode": "trace", "trace": [4]}, "trace"),
        (COMPLETIONS, {"priority": 10**9}, "priority"),
        (COMPLETIONS, {"deadline_s": 0}, "deadline_s"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    address: str, path: str, fields: dict[str, Any], param: str
) -> None:
    base: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    answer = call(address, path, {**base, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert param in answer.error["message"]


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "u", "n": 1,
    "repetition_penalty": 1.0, "min_p": 0, "stop": None, "seed": None, "stream": False,
    "top_k": 0, "echo": False, "temperature": None, "stream_options": None,
}  # fmt: skip


def test_neutral_values_of_what_is_lacking_pass(address: str) -> None:
    more = {"best_of": 1, "suffix": None, "logprobs": None}
    body = {"prompt": "a", "max_tokens": 2, **NEUTRAL, **more}
    assert call(address, COMPLETIONS, body).status == 200
    more = {
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
        "logprobs": False, "parallel_tool_calls": True, "store": False, "metadata": {},
    }  # fmt: skip
    message = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}
    body = {"messages": [*HELLO, message], "max_tokens": 2, **NEUTRAL, **more}
    assert call(address, CHAT, body).status == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"prompt":"\\ud800"}', b"\xff", b'{"prompt":1e999}']
)
def test_what_is_no_request_is_a_400(address: str, raw: bytes) -> None:
    answer = call(address, COMPLETIONS, raw=raw, method="POST")
    assert answer.status == 400
    assert answer.error["code"] == "invalid_request"


DEEP = b"[" * 3000 + b"]" * 3000


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (COMPLETIONS, b'{"prompt":' + DEEP + b"}"),
        (COMPLETIONS, b'{"prompt":"a","x":' + DEEP + b"}"),
        (CHAT, b'{"messages":[{"role":"user","content":"a"}],"tools":' + DEEP + b"}"),
    ],
)
def test_a_body_that_is_nested_too_deeply_is_a_400(address: str, path: str, raw: bytes) -> None:
    assert call(address, path, raw=raw).status == 400


def test_other_paths_methods_models_and_types_have_their_own_codes(address: str) -> None:
    assert call(address, "/v1/embeddings", {}).status == 404
    assert call(address, COMPLETIONS).status == 405
    wrong = call(address, COMPLETIONS, {"prompt": "a", "model": "gpt-9"})
    assert (wrong.status, wrong.error["param"]) == (404, "model")
    assert call(address, "/v1/models/gpt-9").status == 404
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert call(address, COMPLETIONS, {"prompt": "a"}, headers=form).status == 415


def test_the_model_is_listed_by_the_name_that_is_taken(address: str) -> None:
    [model] = call(address, "/v1/models").body["data"]
    assert model["id"] == "scripted" and model["max_model_len"] == 1024
    assert call(address, f"/v1/models/{model['id']}").body == model
    body = {"prompt": "a", "model": model["id"], "max_tokens": 1}
    assert call(address, COMPLETIONS, body).status == 200


def test_text_goes_to_tokens_and_back(address: str) -> None:
    text = "Grüße, 世界! 😀"
    tokens = call(address, "/tokenize", {"prompt": text}).body["tokens"]
    assert tokens == tokenizer().encode(text)
    assert call(address, "/detokenize", {"tokens": tokens}).body == {"prompt": text}
    chat = call(address, "/tokenize", {"messages": HELLO}).body
    assert chat["tokens"][0] == 1 and chat["count"] == len(chat["tokens"])
    assert call(address, "/detokenize", {"tokens": [512]}).error["param"] == "tokens"
    assert call(address, "/tokenize", {}).error["param"] == "prompt"


def test_a_body_over_the_limit_is_a_413() -> None:
    with front(http_max_body_bytes=1000) as (_, address):
        small = call(address, COMPLETIONS, {"prompt": "a" * 900, "max_tokens": 1})
        assert small.status == 200
        assert call(address, COMPLETIONS, {"prompt": "a" * 1000}).status == 413


def test_without_the_token_only_health_answers(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    with front(http_token_file=str(file)) as (_, address):
        assert call(address, "/health").status == 200
        for path in ("/v1/models", "/openapi.json", "/nowhere"):
            assert call(address, path).status == 401
        bearer = {"authorization": "Bearer wrong"}
        assert call(address, "/v1/models", headers=bearer).error["code"] == "unauthorized"
        bearer = {"authorization": "Bearer s3cret"}
        assert call(address, "/v1/models", headers=bearer).status == 200


def test_a_full_queue_is_a_429_with_a_time_to_try_again() -> None:
    with front(max_queue=1, worker={"num_blocks": 8}) as (service, address):
        service.call(lambda: setattr(service.team, "step_s", 3600.0))  # nobody computes
        body = {"prompt": [1], "max_tokens": 32}  # all blocks
        with open_later(address, COMPLETIONS, body), open_later(address, COMPLETIONS, body):
            service.eventually(lambda: service.service.state.statistics()["queue_length"] == 1)
            answer = call(address, COMPLETIONS, body)
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert answer.error["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("prefill", "decode", "code"), [(0, 1, "no_prefill_worker"), (1, 0, "no_decode_worker")]
)
def test_without_a_pair_requests_and_health_say_503(prefill: int, decode: int, code: str) -> None:
    with front(prefill, decode, pair_wait_s=0.1) as (_, address):
        for answer in (
            call(address, COMPLETIONS, {"prompt": [1]}),
            call(address, COMPLETIONS, {"prompt": [1], "stream": True}),
            call(address, "/health"),
        ):
            assert (answer.status, answer.error["code"]) == (503, code)


def test_a_deadline_that_passes_is_a_504() -> None:
    with front() as (service, address):
        service.call(lambda: setattr(service.team, "step_s", 3600.0))
        service.call(service.team._step)
        answer = call(address, COMPLETIONS, {"prompt": [1], "deadline_s": 0.1})
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


def test_an_error_after_the_stream_began_is_its_last_event() -> None:
    with front() as (service, address):
        body = {"prompt": [1], "max_tokens": 1000}
        with open_stream(address, COMPLETIONS, body) as response:
            heard = events(response)
            assert "choices" in next(heard)
            decode = service.team.members[1]
            service.call(
                lambda: decode.send(
                    decode.worker.fail(next(iter(decode.worker.live)), "replay_mismatch")
                )
            )
            *_, last = heard
        assert json.loads(last)["error"]["code"] == "replay_mismatch"


def test_a_closed_connection_cancels_its_request_within_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with front() as (service, address):
        state = service.service.state
        for stream in (True, False):
            body = {"prompt": [1], "max_tokens": 1000, "stream": stream, "n": 3}
            with open_later(address, COMPLETIONS, body):
                service.eventually(lambda: state.statistics()["live_requests"] == 3)
            service.eventually(lambda: state.statistics()["live_requests"] == 0, timeout_s=1.0)
            service.eventually(lambda: len(service.service.local) == 0)
        assert state.counters[f"ended.{FinishReason.CANCELLED}"] == 6
        body = {"prompt": [1], "max_tokens": 1000}
        with open_stream(address, COMPLETIONS, body) as response:
            next(events(response))
        service.eventually(lambda: state.statistics()["live_requests"] == 0, timeout_s=1.0)
        service.eventually(lambda: len(service.service.local) == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_reader_who_takes_nothing_loses_its_stream_and_hurts_no_one() -> None:
    with front(client_backlog=50) as (service, address):
        state = service.service.state
        body = {"prompt": [1], "max_tokens": 1000, "n": 8, "return_token_ids": True}
        with open_stream(address, COMPLETIONS, body, receive_buffer=4096) as slow:
            start_s = time.monotonic()
            while state.counters["failed.slow_client"] == 0:
                other = call(
                    address,
                    COMPLETIONS,
                    {"prompt": [2], "max_tokens": 20, "return_token_ids": True},
                )
                tokens = tuple(other.body["choices"][0]["token_ids"])
                assert tokens == expected_tokens((2,), 20)
                assert time.monotonic() - start_s < 30.0
            *_, last = events(slow)
        assert json.loads(last)["error"]["code"] == "slow_client"


def test_characters_and_stop_strings_over_token_borders() -> None:
    text = "π≈3, 世界 😀👩‍🚀 naïve END rest"
    says = tuple(tokenizer().encode(text))
    assert len(says) > len(text)
    with front(worker={"says": says}) as (_, address):
        body = {"prompt": [1], "max_tokens": len(says)}
        assert call(address, COMPLETIONS, body).body["choices"][0]["text"] == text
        with open_stream(address, COMPLETIONS, body) as response:
            *chunks, _ = events(response)
        pieces = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        for stop in ("ve END", "界 😀", "😀👩‍🚀", "π"):
            stopped = {**body, "stop": ["never", stop]}
            [choice] = call(address, COMPLETIONS, stopped).body["choices"]
            assert choice["text"] == text[: text.index(stop)]
            assert choice["finish_reason"] == "stop"
            with open_stream(address, COMPLETIONS, stopped) as response:
                *chunks, _ = events(response)
            shown = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
            assert shown == choice["text"]


def test_a_service_that_stops_takes_nothing_more_and_tells_its_streams() -> None:
    with front(drain_s=0.3) as (service, address):
        service.call(lambda: setattr(service.team, "step_s", 0.05))
        body = {"prompt": [1], "max_tokens": 1000}
        with open_stream(address, COMPLETIONS, body) as response:
            heard = events(response)
            next(heard)
            service.call(service.service.stop)
            service.eventually(lambda: service.service.state.not_ready is not None)
            for answer in (call(address, COMPLETIONS, body), call(address, "/health")):
                assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            *_, last = heard
        assert json.loads(last)["error"]["code"] == "shutting_down"
