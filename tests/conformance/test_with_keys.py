"""schemathesis and OpenAI's client against a router whose callers need a key."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.conformance.conftest import Routed, in_a_thread

from kvrouter.control.status import document
from kvrouter.openai.endpoints import ENDPOINTS

DOCUMENT = document("1", keys=True)
KEY = "a-key-of-a-caller"
OPERATIONS = [
    (path, method)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if "security" in operation
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HEADERS = st.sampled_from(
    [{}, {"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer no"}]
) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(
    lambda text: {"authorization": f"Bearer {text}".strip()}
)


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    with in_a_thread(api_key=[KEY]) as site:
        yield site


def test_the_router_says_which_endpoints_need_a_key(routed: Routed) -> None:
    with urllib.request.urlopen(f"{routed.url}/openapi.json") as answer:
        published: dict[str, Any] = json.load(answer)
    assert published["components"] == json.loads(json.dumps(DOCUMENT["components"]))
    assert published["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))
    assert len(OPERATIONS) == 5 + len(ENDPOINTS)
    assert all("401" in DOCUMENT["paths"][path][method]["responses"] for path, method in OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_only_the_key_is_let_in_and_all_answers_are_documented(
    routed: Routed, path: str, method: str
) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]

    @given(case=operation.as_strategy(), headers=HEADERS)
    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def asked(case: Any, headers: dict[str, str]) -> None:
        case.headers.pop("Authorization", None)
        answer = case.call(base_url=routed.url, headers=headers)
        case.validate_response(answer, checks=CHECKS)
        good = headers.get("authorization") == f"Bearer {KEY}"
        assert (answer.status_code == 401) != good

    asked()


def test_openais_client_with_a_key(routed: Routed) -> None:
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["m"]
        said = client.completions.create(model="m", prompt="Hello", max_tokens=2)
        assert said.choices[0].finish_reason == "length"
    with (
        openai.OpenAI(base_url=f"{routed.url}/v1", api_key="no", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"
