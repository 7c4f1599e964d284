"""Token ids are found wherever they stand in an answer, and nowhere else."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import find_token_ids

KEY = "prompt_token_ids"
texts = st.text(st.sampled_from('ab",:[]{}\\ 1' + KEY), max_size=60) | st.just(f'"{KEY}":[1]')
values = st.recursive(
    st.none() | st.integers(0, 9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def found(body: bytes) -> list[int] | None:
    answer = find_token_ids(body, KEY)
    if answer is None:
        return None
    start, end, packed = answer
    told = array("I")
    told.frombytes(packed)
    assert json.loads(body[start:end]) == told.tolist()
    return told.tolist()


@given(before=values, after=values, wanted=ids, indent=st.sampled_from([None, 0, 3]))
def test_they_are_found_beside_whatever_else_an_answer_holds(
    before: Any, after: Any, wanted: list[int], indent: int | None
) -> None:
    answer = {"a": before, "choices": [{"text": before, KEY: wanted, "x": after}], "z": after}
    assert found(json.dumps(answer, indent=indent).encode()) == wanted


@given(values)
def test_texts_that_look_like_them_are_not_taken_for_them(value: Any) -> None:
    def has_member(node: Any) -> bool:
        if isinstance(node, dict):
            return KEY in node or any(map(has_member, node.values()))
        return isinstance(node, list) and any(map(has_member, node))

    if not has_member(value):
        assert found(json.dumps({"a": value}, ensure_ascii=False).encode()) is None


@pytest.mark.parametrize(
    "value",
    ["null", "[]", "[-1]", "[4294967296]", "[1.5]", "[01]", '["a"]', "[1", "[1,]", "[1 2]", "7"],
)
def test_what_is_no_array_of_ids_is_not_found(value: str) -> None:
    assert found(f'{{"{KEY}":{value}}}'.encode()) is None


@given(st.binary(max_size=60), st.text(max_size=5))
def test_no_bytes_whatsoever_raise(body: bytes, key: str) -> None:
    for text in (body, f'"{KEY}":['.encode() + body):
        find_token_ids(text, KEY)
        find_token_ids(text, key)
