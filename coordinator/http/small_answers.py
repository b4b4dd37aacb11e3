"""What the endpoints around generation answer. Records only."""

from typing import Literal

from .answers import Answer


class Model(Answer, frozen=True, kw_only=True):
    """max_model_len: prompt and output together; null while no worker has told."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rlt"
    max_model_len: int | None


class Models(Answer, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Model, ...]


class Tokenized(Answer, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: tuple[int, ...]


class Detokenized(Answer, frozen=True, kw_only=True):
    prompt: str


class Health(Answer, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
