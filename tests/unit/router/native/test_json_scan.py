"""The scanner of request bodies, held against orjson."""

from __future__ import annotations

from array import array

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter._native import scan_object, shared_bytes

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ESCAPES = rb'{"a":"\u00e9\ud83d\ude00\"\\\/\b\f\n\r\t","\u0070rompt" : [1 , 2]  }'


def values(body: bytes) -> dict[str, object]:
    spans, _ = scan_object(body)
    return {key: orjson.loads(body[start:end]) for key, (start, end) in spans.items()}


@given(st.dictionaries(st.text(), JSON, max_size=6), st.booleans())
def test_spans_hold_each_members_value(document: dict[str, object], indent: bool) -> None:
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2 if indent else None)
    assert values(body) == orjson.loads(body)
    assert list(scan_object(body)[0]) == list(orjson.loads(body))


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), st.data())
def test_what_orjson_refuses_is_refused_after_a_mutation(
    document: dict[str, object], data: st.DataObject
) -> None:
    body = bytearray(orjson.dumps(document))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:
        expected = None
    if isinstance(expected, dict):
        try:
            assert values(bytes(body)) == expected
        except ValueError as refusal:
            assert "twice" in str(refusal)  # noqa: PT017 - orjson keeps the last of two
    else:
        with pytest.raises(ValueError, match="at byte"):
            scan_object(bytes(body))


DIGITS = st.text("0123456789", min_size=1, max_size=400).map(str.encode)
NUMBER = st.builds(
    lambda sign, whole, part, power: sign + (whole.lstrip(b"0") or b"0") + part + power,
    st.sampled_from([b"", b"-"]),
    DIGITS,
    st.just(b"") | DIGITS.map(lambda digits: b"." + digits),
    st.just(b"") | st.integers(-800, 800).map(lambda e: b"e%d" % e),
)


@given(NUMBER)
@example(b"1e999")
@example(b"-1e999")
@example(b"1" * 400)
@example(b"1" * 308)
@example(b"17976931348623157e292")  # the largest double
@example(b"17976931348623158e292")  # rounds to it
@example(b"17976931348623159e292")  # rounds to infinity
@example(b"0." + b"0" * 400 + b"1e700")
@example(b"0e999999999999999999999999")
@example(b"1E-999999999999999999999999")
@example(b"1e+999999999999999999999999")
def test_numbers_are_refused_that_no_double_can_hold(number: bytes) -> None:
    body = b'{"a":[' + number + b"]}"
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(ValueError, match="no double can hold"):
            scan_object(body)
    else:
        assert values(body) == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.booleans())
def test_token_ids_come_as_an_array(ids: list[int], indent: bool) -> None:
    body = orjson.dumps({"model": "m", "prompt": ids}, option=orjson.OPT_INDENT_2 if indent else 0)
    found = scan_object(body)[1]
    assert found is not None
    assert array("I", found).tolist() == ids


SEPARATORS = st.sampled_from([",", ",", ",", ", ", ", ", ",  ", " ,", ",\n", " , "])
LENGTHS = st.integers(1, 10).flatmap(lambda digits: st.integers(0, min(10**digits, 2**32) - 1))


@given(st.lists(st.tuples(LENGTHS, SEPARATORS), min_size=1, max_size=120), st.data())
def test_long_arrays_are_read_as_orjson_reads_them_mutated_or_not(
    items: list[tuple[int, str]], data: st.DataObject
) -> None:
    text = "".join(f"{number}{separator}" for number, separator in items[:-1]) + str(items[-1][0])
    array_text = bytearray(b"[" + text.encode() + b"]")
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(1, len(array_text) - 1))
        array_text[place] = data.draw(st.sampled_from(b"0123456789,, ]x-."))
    body = b'{"prompt":' + bytes(array_text) + b',"max_tokens":16,"temperature":0.0}' + b" " * 80
    try:
        expected = orjson.loads(body)["prompt"]
    except orjson.JSONDecodeError:
        with pytest.raises(ValueError, match="at byte"):
            scan_object(body)
        return
    found = scan_object(body)[1]
    ids = all(type(each) is int and 0 <= each < 2**32 for each in expected) and expected
    if ids and b"-" not in array_text:  # orjson takes -0 for an id
        assert found is not None
        assert array("I", found).tolist() == expected
    else:
        assert found is None


@pytest.mark.parametrize(
    "prompt",
    [b"[]", b'"text"', b'["a"]', b"[[1,2]]", b"[1,-2]", b"[4294967296]", b"[1,2.0]", b"[1,[2]]"],
)
def test_another_prompt_gives_no_token_ids(prompt: bytes) -> None:
    spans, ids = scan_object(b'{"prompt":' + prompt + b"}")
    assert ids is None
    assert spans["prompt"] == (10, 10 + len(prompt))


@pytest.mark.parametrize(
    "bad", [b"[01]", b"[1,]", b"[1 2]", b"[1", b"[,1]", b"[1.]", b"[99999999999x]"]
)
def test_a_broken_array_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="at byte"):
        scan_object(b'{"prompt":' + bad + b"}")


def test_escaped_names_are_decoded() -> None:
    spans, ids = scan_object(ESCAPES)
    assert list(spans) == ["a", "prompt"]
    assert ids == array("I", [1, 2]).tobytes()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b'{"a":1}x', b'{"a":1,"a":2}', b'{"a":"\\ud800"}']
)
def test_anything_but_one_object_with_distinct_names_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="at byte"):
        scan_object(body)


def test_depth_and_members_are_limited() -> None:
    deep = b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"
    with pytest.raises(ValueError, match="deeply"):
        scan_object(deep)
    wide = orjson.dumps({str(i): i for i in range(1025)})
    with pytest.raises(ValueError, match="many"):
        scan_object(wide)


@given(st.binary(max_size=2000), st.integers(0, 2000), st.binary(max_size=3), st.binary(max_size=3))
def test_shared_bytes_end_where_the_first_differs(
    head: bytes, length: int, one: bytes, other: bytes
) -> None:
    one, other = head[:length] + one, head + other
    pairs = zip(one, other, strict=False)
    expected = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    assert shared_bytes(one, other) == expected
