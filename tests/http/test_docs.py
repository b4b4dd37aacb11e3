"""docs/http.md against the records and tables that it describes."""

import re
from pathlib import Path

import pytest

from rlt.coordinator.http.errors import STATUS
from rlt.coordinator.http.fields import LACKING, ChatRequest, CompletionRequest
from rlt.coordinator.http.openapi import document

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
UNUSED = {"user", "safety_identifier", "prompt_cache_key"}
FIELDS = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}


@pytest.mark.parametrize("field", sorted(FIELDS - LACKING - UNUSED))
def test_every_field_that_does_something_is_named(field: str) -> None:
    assert f"`{field}`" in PAGE


@pytest.mark.parametrize("code", STATUS)
def test_every_error_has_its_row(code: str) -> None:
    if code != "duplicate_request":  # request IDs are the front's own
        [row] = [line for line in PAGE.splitlines() if f"`{code}`" in line and line[0] == "|"]
        assert str(STATUS[code]) in row


def test_every_path_is_listed() -> None:
    for path in document()["paths"]:
        assert re.sub(r"\{.*\}", "NAME", path) in PAGE
