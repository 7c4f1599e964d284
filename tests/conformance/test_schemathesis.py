"""schemathesis against the OpenAPI document that the router publishes."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.conformance.conftest import Routed

from kvrouter.control.status import document

DOCUMENT = document("1")
OPERATIONS = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for mode in GenerationMode
    if "requestBody" in operation or mode is GenerationMode.POSITIVE
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
GENERATION = ("/v1/completions", "/v1/chat/completions")


def test_the_router_publishes_its_document(routed: Routed) -> None:
    with urllib.request.urlopen(f"{routed.url}/openapi.json") as answer:
        published: dict[str, Any] = json.load(answer)
    assert published["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))
    assert published["openapi"] == "3.1.0"
    for path, methods in published["paths"].items():
        for method in methods:
            request = urllib.request.Request(routed.url + path, method=method.upper())
            try:
                said = urllib.request.urlopen(request).read()
            except urllib.error.HTTPError as refused:
                said = refused.read()
            if path != "/tokenizer_info":  # these are the words of an engine without it
                assert b"There is no /" not in said
            assert b"is not allowed here" not in said


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_nothing_sent_makes_a_500_or_an_undocumented_answer(
    routed: Routed, path: str, method: str, mode: GenerationMode
) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=40 if path in GENERATION else 8,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def asked(case: Any) -> None:
        case.call_and_validate(base_url=routed.url, checks=CHECKS)

    asked()
