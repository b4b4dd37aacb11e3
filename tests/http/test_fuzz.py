"""Generated requests against the served OpenAPI document: never a 5xx, always what it says.

Scripted workers answer, so that hundreds of requests take seconds.
"""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rlt.coordinator.http.openapi import document

from .scripted import front


def patient_document() -> dict[str, Any]:
    """Without deadlines that must pass: those end with a 504, as they should."""
    copy: dict[str, Any] = json.loads(json.dumps(document()))
    for name in ("CompletionRequest", "ChatRequest"):
        deadline = copy["components"]["schemas"][name]["properties"]["deadline_s"]
        [number] = [kind for kind in deadline["anyOf"] if kind["type"] == "number"]
        del number["exclusiveMinimum"]
        number["minimum"] = 30
    return copy


schema = schemathesis.openapi.from_dict(patient_document())
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with front(worker={"num_slots": 64, "num_receive_slots": 64, "burst": 100}) as (_, where):
        yield where


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@schema.parametrize()
@hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # the first failure says enough
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_a_fault_of_the_server(
    case: schemathesis.Case, address: str, session: requests.Session
) -> None:
    case.call_and_validate(base_url=address, session=session, checks=CHECKS, timeout=20.0)


def test_the_document_is_served(address: str) -> None:
    assert requests.get(f"{address}/openapi.json", timeout=5.0).json() == document()
