"""JSON of a simulated engine fits its schema, or the schema is refused."""

from random import Random
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import ApiError
from kvrouter.tools.sim.schemas import json_of

Json = dict[str, Any]
LEAVES: st.SearchStrategy[Json] = st.one_of(
    st.sampled_from(
        [
            {"type": "null"},
            {"type": "boolean"},
            {"type": ["string", "null"]},
            {"enum": ["a", 1, None, "é"]},
            {"const": {"a": [1]}},
            {"type": "string", "format": "date-time"},
            {},
        ]
    ),
    st.builds(
        lambda low, wide: {"type": "string", "minLength": low, "maxLength": low + wide},
        *(st.integers(0, 40),) * 2,
    ),
    st.builds(
        lambda kind, low, wide: {"type": kind, "minimum": low, "exclusiveMaximum": low + 1 + wide},
        st.sampled_from(["integer", "number"]),
        *(st.integers(0, 1000),) * 2,
    ),
)


def nested(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    names = st.sampled_from(["one", "two", "drei", "vier"])
    return st.one_of(
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least},
            *(inner, st.integers(0, 4)),
        ),
        st.builds(lambda more: {"type": "object", "additionalProperties": more}, inner),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties.keys() & required),
                "additionalProperties": False,
            },
            *(st.dictionaries(names, inner, max_size=4), st.sets(names)),
        ),
    )


@given(st.recursive(LEAVES, nested, max_leaves=12), st.integers())
def test_json_fits_its_schema(schema: Json, seed: int) -> None:
    jsonschema.validate(
        orjson.loads(json_of(schema, Random(seed))),
        schema,
        cls=jsonschema.Draft202012Validator,
        format_checker=jsonschema.FormatChecker(),
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/o"}]},
         "o": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}},
        {"type": "object", "properties": {name: {"$ref": "#"} for name in "abcdefgh"}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "maxItems": 2},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    ],
    ids=lambda schema: str(schema)[:40],
)  # fmt: skip
def test_recursion_ends_and_what_cannot_be_written_is_left_out(schema: Json, seed: int) -> None:
    jsonschema.validate(orjson.loads(json_of(schema, Random(seed))), schema)


@pytest.mark.parametrize(
    "schema",
    [
        7,
        [],
        {"type": "thing"},
        {"type": "string", "pattern": "a+"},
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        {"$ref": "#"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/none"},
        {"anyOf": []},
        {"enum": []},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "items": {"const": "x" * 10_000}, "minItems": 9_000},
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_of_which_nothing_bounded_is_known_to_fit_is_refused(schema: object) -> None:
    with pytest.raises(ApiError) as refused:
        json_of(schema, Random(0))
    assert refused.value.status == 400
