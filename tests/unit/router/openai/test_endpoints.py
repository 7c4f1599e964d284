"""What the router serves of the endpoints that an engine lists."""

import pytest

from kvrouter.openai.endpoints import listed

JSON_BODY: dict[str, object] = {"requestBody": {"content": {"application/json": {}}}}
FORM_BODY: dict[str, object] = {"requestBody": {"content": {"multipart/form-data": {}}}}


@pytest.mark.parametrize(
    ("path", "methods", "served"),
    [
        ("/v1/completions", {"post": {}}, True),
        ("/tokenize", {"post": {}}, True),
        ("/v1/classify", {"post": JSON_BODY}, True),
        ("/v1/classify", {"post": {}}, True),
        ("/v1/audio/transcriptions", {"post": FORM_BODY}, False),
        ("/v1/loads", {"get": {}}, False),
        ("/v1/responses/{id}/cancel", {"post": {}}, False),
        ("/v1/unload_lora_adapter", {"post": JSON_BODY}, False),
        ("/v1/model/load", {"post": JSON_BODY}, False),
        ("/v1/models", {"post": JSON_BODY}, False),
        ("/v1/kv_cache_hints", {"post": JSON_BODY}, False),
        ("/v1/files", {"post": JSON_BODY}, False),
        ("/v1/moderations", {"post": JSON_BODY}, True),
        ("/classify", {"post": JSON_BODY}, False),
        ("/v1/classify", {"post": {"requestBody": []}}, True),
        ("/v1/classify", {"post": "no operation"}, False),
        ("/v1/classify", [], False),
    ],
)
def test_what_takes_json_below_v1_and_is_for_clients_is_served(
    path: str, methods: object, served: bool
) -> None:
    found = listed({"/v1/completions": {"post": {}}, path: methods})
    assert (path in found) == served


def test_a_server_that_lists_nothing_usual_says_nothing() -> None:
    assert listed({"/v1/{path}": {"post": {}}, "/v1/classify": {"post": {}}}) == frozenset()
