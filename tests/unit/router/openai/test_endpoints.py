"""What the router serves of the endpoints that an engine lists."""

import pytest

from kvrouter.openai.endpoints import listed, salted

JSON_BODY: dict[str, object] = {"requestBody": {"content": {"application/json": {}}}}
FORM_BODY: dict[str, object] = {"requestBody": {"content": {"multipart/form-data": {}}}}
VLLMS_FORM: dict[str, object] = {
    "requestBody": {"content": {"application/x-www-form-urlencoded": {}}}
}
OTHER_BODY: dict[str, object] = {"requestBody": {"content": {"application/octet-stream": {}}}}


@pytest.mark.parametrize(
    ("path", "methods", "served"),
    [
        ("/v1/completions", {"post": {}}, True),
        ("/tokenize", {"post": {}}, True),
        ("/v1/classify", {"post": JSON_BODY}, True),
        ("/v1/classify", {"post": {}}, True),
        ("/v1/audio/transcriptions", {"post": FORM_BODY}, True),
        ("/v1/audio/translations", {"post": VLLMS_FORM}, True),
        ("/v1/audio/raw", {"post": OTHER_BODY}, False),
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
def test_what_takes_json_or_a_form_below_v1_and_is_for_clients_is_served(
    path: str, methods: object, served: bool
) -> None:
    found = listed({"/v1/completions": {"post": {}}, path: methods})
    assert (path in found) == served


def test_a_server_that_lists_nothing_usual_says_nothing() -> None:
    assert listed({"/v1/{path}": {"post": {}}, "/v1/classify": {"post": {}}}) == frozenset()


def body_of(schema: object) -> dict[str, object]:
    return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}


SALTED, PLAIN = {"$ref": "#/components/schemas/Salted"}, {"$ref": "#/components/schemas/Plain"}
SCHEMAS = {
    "Salted": {"properties": {"model": {}, "cache_salt": {"type": "string"}}},
    "Plain": {"properties": {"model": {}}},
}


@pytest.mark.parametrize(
    ("schema", "reads"),
    [
        (SALTED, True),
        (SCHEMAS["Salted"], True),
        (PLAIN, False),
        ({"anyOf": [SALTED, SALTED]}, True),
        ({"anyOf": [SALTED, PLAIN]}, False),  # whichever kind the body is, it must count
        ({"anyOf": [SALTED, "none"]}, False),
        ({"$ref": "#/components/schemas/Missing"}, False),
        ({"anyOf": []}, False),
        ({}, False),
        ([], False),
    ],
)
def test_an_endpoint_reads_a_salt_if_every_kind_of_its_body_has_one(
    schema: object, reads: bool
) -> None:
    page = {"paths": {"/v1/a": body_of(schema)}, "components": {"schemas": SCHEMAS}}
    assert salted(page) == (frozenset({"/v1/a"}) if reads else frozenset())


@pytest.mark.parametrize("page", [{}, {"paths": []}, {"paths": {"/v1/a": []}, "components": 1}])
def test_a_page_without_schemas_names_no_salts(page: dict[str, object]) -> None:
    assert salted(page) == frozenset()
