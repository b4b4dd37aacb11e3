"""What the two generating endpoints accept: OpenAI's fields and our own, each with its bounds.

Records only; msgspec checks them and the served OpenAPI document is made from them. A field whose
feature rlt lacks is here with its neutral value alone, so that clients which spell every default
out are served and all others hear the name of the field. Unknown fields are refused.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...runtime.types import ExitMode
from ...runtime.validate import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)

MAX_CHOICES = 128
MAX_DEADLINE_S = 1e9

Zero = Annotated[float, Meta(ge=0, le=0)] | None
One = Annotated[float, Meta(ge=1, le=1)] | None
No = Literal[False] | None
Nothing = Annotated[list[Any], Meta(max_length=0)] | None
NoEntries = Annotated[dict[str, Any], Meta(max_length=0)] | None
Whole = Annotated[int, Meta(ge=1, le=2**31)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=2**31)]], Meta(min_length=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk tells the usage. continuous_usage_stats: every chunk tells it so
    far."""

    include_usage: bool = False
    include_obfuscation: No = None
    continuous_usage_stats: bool = False


class Lacking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Neutral values of what rlt lacks, at both endpoints."""

    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: One = None
    length_penalty: One = None
    min_p: Zero = None
    min_tokens: Annotated[int, Meta(ge=0, le=0)] | None = None
    logit_bias: NoEntries = None
    use_beam_search: No = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: No = None
    echo: No = None


class Shared(Lacking, frozen=True, kw_only=True):
    """What both endpoints have in common. From top_k on the fields are rlt's own."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | StopString | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0, le=2**31)]] | None = None
    ignore_eos: bool | None = None
    exit_mode: ExitMode | None = None
    trace: list[Annotated[int, Meta(ge=1, le=1024)]] | None = None
    exit_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_loops: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_loops: Annotated[int, Meta(ge=1, le=1024)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    return_exit_depths: bool = False
    return_timeline: bool = False
    return_token_ids: bool = False


class CompletionRequest(Shared, frozen=True, kw_only=True):
    """prompt: text, token IDs, or a list of either."""

    prompt: (
        str
        | Annotated[list[str | Annotated[int, Meta(ge=0, le=2**31)] | TokenIds], Meta(min_length=1)]
    )
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """content: text, or text in parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None
    annotations: Nothing = None
    reasoning_content: None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]


class LackingInChat(Shared, frozen=True, kw_only=True):
    """Neutral values of what rlt lacks, at the chat endpoint."""

    response_format: TextFormat | None = None
    tools: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No = None
    metadata: NoEntries = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: No = None


class ChatRequest(LackingInChat, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """prompt or messages, one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[Annotated[int, Meta(ge=0, le=2**31)]]
    model: str | None = None


LACKING = {*Lacking.__struct_fields__, "best_of", "suffix"} | set(
    LackingInChat.__struct_fields__
) - set(Shared.__struct_fields__)
