"""The real `openai` client against a real service, and beside the service's own client."""

from collections.abc import Iterator

import openai
import pytest

from rlt.coordinator.client import Client

from ..system.service import Service, eventually, running

pytestmark = pytest.mark.system
QUESTION = "Ana has 17 apples. Ben gives Ana 25 apples. How many apples does Ana have?"
ASKED = [{"role": "user", "content": QUESTION}]
STORY = "Ana has 17 apples. Ben"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(1, 1, "--num-blocks", "1024", "--threads", "1", model=None) as started:
        yield started


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{service.http}/v1", api_key="none", max_retries=0, timeout=60.0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def own(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(api: openai.OpenAI) -> str:
    [only] = api.models.list().data
    assert api.models.retrieve(only.id).id == only.id
    return only.id


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_both_fronts_give_the_same_text(
    api: openai.OpenAI, own: Client, model: str, sampling: dict[str, float]
) -> None:
    expected = own.generate(STORY, max_tokens=40, **sampling)  # type: ignore[arg-type]
    answer = api.completions.create(model=model, prompt=STORY, max_tokens=40, **sampling)  # type: ignore[call-overload]
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason.value
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    chat = api.chat.completions.create(model=model, messages=ASKED, max_tokens=60, **sampling)  # type: ignore[call-overload]
    assert chat.choices[0].message.content == own.generate(ASKED, max_tokens=60, **sampling).text  # type: ignore[arg-type]
    assert chat.choices[0].message.role == "assistant"


def test_fields_of_our_own_go_as_extra_body(api: openai.OpenAI, own: Client, model: str) -> None:
    expected = own.generate(ASKED, exit_threshold=0.5, min_loops=1, max_tokens=30)
    extra = {"exit_threshold": 0.5, "min_loops": 1, "priority": 3, "deadline_s": 60}
    wanted = {"return_exit_depths": True, "return_timeline": True, "return_token_ids": True}
    answer = api.chat.completions.create(
        model=model, messages=ASKED, temperature=0, max_tokens=30, extra_body={**extra, **wanted}
    )  # type: ignore[call-overload]
    [choice] = answer.model_dump()["choices"]
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert tuple(choice["exit_depths"]) == expected.exit_depths
    assert {"received", "first_token", "last_token"} <= {e["event"] for e in choice["timeline"]}
    trace = [4, 1, 2, 3]
    traced = api.completions.create(
        model=model, prompt=STORY, max_tokens=4,
        extra_body={"exit_mode": "trace", "trace": trace, "return_exit_depths": True},
    )  # fmt: skip
    assert traced.choices[0].model_dump()["exit_depths"] == trace


def test_a_stream_says_what_the_whole_answer_says(api: openai.OpenAI, model: str) -> None:
    whole = api.chat.completions.create(model=model, messages=ASKED, temperature=0)  # type: ignore[call-overload]
    stream = api.chat.completions.create(
        model=model, messages=ASKED, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # type: ignore[call-overload] # fmt: skip
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    assert len(chunks) > 5 and chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage) == ([], whole.usage)
    pieces = api.completions.create(model=model, prompt=STORY, temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in pieces)
    again = api.completions.create(model=model, prompt=STORY, temperature=0)
    assert text == again.choices[0].text and again.usage.completion_tokens == 16


def test_log_probabilities_come_in_both_shapes(api: openai.OpenAI, own: Client, model: str) -> None:
    expected = own.generate(STORY, max_tokens=12, logprobs=3)
    old = api.completions.create(
        model=model, prompt=STORY, max_tokens=12, temperature=0, logprobs=3
    ).choices[0]
    assert old.logprobs.token_logprobs == [entry.chosen for entry in expected.logprobs]
    assert "".join(old.logprobs.tokens) == old.text
    for token, offset in zip(old.logprobs.tokens, old.logprobs.text_offset, strict=True):
        assert old.text[offset:].startswith(token)
    assert all(len(top) in (3, 4) for top in old.logprobs.top_logprobs)
    chat = api.chat.completions.create(
        model=model, messages=ASKED, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )  # type: ignore[call-overload]
    content = chat.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode() == chat.choices[0].message.content
    assert all(t.top_logprobs[0].logprob >= t.logprob for t in content)
    assert all(len(t.top_logprobs) == 2 for t in content)


def test_a_stop_string_ends_the_text_and_is_not_in_it(
    api: openai.OpenAI, own: Client, model: str
) -> None:
    text = own.generate(STORY, max_tokens=40).text
    for stop in (text[5:9], text[11:14], text[20:31]):
        cut = text[: text.index(stop)]
        answer = api.completions.create(
            model=model, prompt=STORY, max_tokens=40, temperature=0, stop=["no such", stop]
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
        result = own.generate(STORY, max_tokens=40, stop=("no such", stop))
        assert (result.text, result.finish_reason) == (cut, "stop")
        assert len(result.token_ids) == answer.usage.completion_tokens < 40


def test_choices_differ_and_the_first_is_what_one_alone_would_be(
    api: openai.OpenAI, model: str
) -> None:
    asked = {"model": model, "max_tokens": 24, "temperature": 1.0, "seed": 5}
    alone = api.completions.create(prompt=STORY, **asked)  # type: ignore[call-overload]
    three = api.completions.create(prompt=STORY, n=3, **asked)  # type: ignore[call-overload]
    texts = [choice.text for choice in three.choices]
    assert texts[0] == alone.choices[0].text and len(set(texts)) == 3


def test_prompts_may_be_token_ids_and_lists(api: openai.OpenAI, own: Client, model: str) -> None:
    tokens = [[40, 80, 90], [33, 34]]
    answer = api.completions.create(model=model, prompt=tokens, max_tokens=6, temperature=0)
    assert [choice.text for choice in answer.choices] == [
        own.generate(prompt, max_tokens=6).text for prompt in tokens
    ]
    one = api.completions.create(model=model, prompt=tokens[0], max_tokens=6, temperature=0)
    assert one.choices[0].text == answer.choices[0].text


def test_errors_are_the_clients_own_exceptions(api: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.completions.create(model=model, prompt="a", max_tokens=10**6)
    assert (bad.value.code, bad.value.param) == ("too_long", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        api.completions.create(model=model, prompt="a", presence_penalty=1)
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="a")
    with pytest.raises(openai.InternalServerError) as late:
        api.completions.create(
            model=model, prompt=STORY, max_tokens=2000,
            extra_body={"deadline_s": 0.05, "ignore_eos": True},
        )  # fmt: skip
    assert late.value.status_code == 504
    stream = api.completions.create(
        model=model, prompt=STORY, max_tokens=3000, stream=True,
        extra_body={"deadline_s": 0.7, "ignore_eos": True},
    )  # fmt: skip
    with pytest.raises(openai.APIError, match="deadline"):
        for _ in stream:
            pass


def test_a_stream_closed_early_leaves_nothing_running(
    service: Service, api: openai.OpenAI, own: Client, model: str
) -> None:
    stream = api.completions.create(
        model=model, prompt=STORY, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    assert own.statistics()["live_requests"] == 1
    stream.close()
    eventually(lambda: own.statistics()["live_requests"] == 0, "cancelled", timeout_s=1.0)
    eventually(lambda: service.at_rest(own), lambda: str(service.held))
