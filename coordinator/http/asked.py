"""From the fields of an HTTP request to the GenerateRequests that it stands for.

Pure, but for the tokenizer that it waits for. Choice k of a prompt draws with seed + k, so that the
choices differ and the first is what the same request gives over ZeroMQ.
"""

import asyncio
import uuid
from collections.abc import Sequence

import msgspec

from ...runtime.interfaces import ChatMessage, GenerateRequest
from ...runtime.types import ExitParams, RequestId, SamplingParams
from ...runtime.validate import MAX_SEED
from .errors import bad_field
from .fields import MAX_CHOICES, ChatRequest, CompletionRequest, Message, Shared, StreamOptions
from .front import Front

COMPLETION_TOKENS = 16  # OpenAI's default
CHAT_TOKENS = 256
TEMPERATURE = 1.0  # OpenAI's default


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request: its choices in order. prompt_tokens counts each prompt once."""

    id: str
    requests: tuple[GenerateRequest, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    usage_so_far: bool


async def completion_call(asked: CompletionRequest, front: Front) -> Call:
    front.check_model(asked.model)
    choices = asked.n or 1
    if asked.best_of not in (None, choices):
        raise bad_field("best_of", f"best_of is {asked.best_of}; only the value of n is taken")
    prompts = _prompts(asked.prompt)
    if len(prompts) * choices > MAX_CHOICES:
        raise bad_field(
            "prompt", f"{len(prompts)} prompts times n {choices} are over {MAX_CHOICES} choices"
        )
    plain = _request(asked, asked.max_tokens, asked.logprobs)
    whole = [
        msgspec.structs.replace(plain, text=prompt)
        if isinstance(prompt, str)
        else msgspec.structs.replace(plain, prompt_token_ids=tuple(prompt))
        for prompt in prompts
    ]
    return await _call("cmpl", asked, whole, COMPLETION_TOKENS, front)


async def chat_call(asked: ChatRequest, front: Front) -> Call:
    front.check_model(asked.model)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad_field("top_logprobs", "top_logprobs is given; it needs logprobs true")
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise bad_field("max_tokens", "max_tokens and max_completion_tokens are given; give one")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    plain = _request(asked, asked.max_completion_tokens or asked.max_tokens, logprobs)
    whole = [msgspec.structs.replace(plain, messages=chat_messages(asked.messages))]
    return await _call("chatcmpl", asked, whole, CHAT_TOKENS, front)


def chat_messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    return tuple(map(_message, messages))


def _message(message: Message) -> ChatMessage:
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role, content)


def _prompts(prompt: str | Sequence[object]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    tokens = [entry for entry in prompt if isinstance(entry, int)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if len(texts) == len(prompt):
        return texts
    if len(tokens) == len(prompt):
        return [tokens]
    if len(lists) == len(prompt):
        return lists
    raise bad_field("prompt", "prompt mixes texts, token IDs and lists of them; send one kind")


def _request(asked: Shared, max_tokens: int | None, logprobs: int | None) -> GenerateRequest:
    """All but the prompt. max_tokens 0 stands for the default, which depends on the prompt."""
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    if asked.stream_options is not None and not asked.stream:
        raise bad_field("stream_options", "stream_options is given; it needs stream true")
    return GenerateRequest(
        request_id=RequestId(""),
        sampling=SamplingParams(
            max_tokens=max_tokens or 0,
            temperature=TEMPERATURE if asked.temperature is None else asked.temperature,
            top_k=asked.top_k or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            ignore_eos=bool(asked.ignore_eos),
            stop_token_ids=tuple(asked.stop_token_ids or ()),
            logprobs=logprobs,
        ),
        exit=ExitParams(
            exit_mode=asked.exit_mode or "ouro",
            trace=None if asked.trace is None else tuple(asked.trace),
            exit_threshold=asked.exit_threshold,
            min_loops=asked.min_loops,
            max_loops=asked.max_loops,
        ),
        stop=stop,
        priority=asked.priority or 0,
        deadline_s=asked.deadline_s,
    )


async def _call(
    prefix: str, asked: Shared, whole: list[GenerateRequest], default_tokens: int, front: Front
) -> Call:
    name = f"{prefix}-{uuid.uuid4().hex}"
    tokenized = await asyncio.gather(*map(front.tokenized, whole))
    requests = [
        _choice(_with_length(request, default_tokens, front.max_positions), name, place, choice)
        for place, request in enumerate(tokenized)
        for choice in range(asked.n or 1)
    ]
    options = asked.stream_options or StreamOptions()
    return Call(
        id=name,
        requests=tuple(requests),
        prompt_tokens=sum(len(request.prompt_token_ids or ()) for request in tokenized),
        stream=bool(asked.stream),
        include_usage=options.include_usage,
        usage_so_far=options.continuous_usage_stats,
    )


def _with_length(
    request: GenerateRequest, default: int, max_positions: int | None
) -> GenerateRequest:
    """A default is never too long for what is left after the prompt."""
    if request.sampling.max_tokens:
        return request
    if max_positions is not None:
        default = max(1, min(default, max_positions + 1 - len(request.prompt_token_ids or ())))
    sampling = msgspec.structs.replace(request.sampling, max_tokens=default)
    return msgspec.structs.replace(request, sampling=sampling)


def _choice(request: GenerateRequest, name: str, place: int, choice: int) -> GenerateRequest:
    sampling = request.sampling
    if sampling.seed is not None:
        seed = (sampling.seed + choice) % (MAX_SEED + 1)
        sampling = msgspec.structs.replace(sampling, seed=seed)
    request_id = RequestId(f"{name}-{place}-{choice}")
    return msgspec.structs.replace(request, request_id=request_id, sampling=sampling)
