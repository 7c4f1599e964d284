"""What peers send is bounded in one pass, which builds nothing and agrees with those that do."""

import json
import re
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import (
    is_blank,
    json_within,
    msgpack_within,
    read_ids,
    scan_events,
    split_array,
)

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=30,
)
messages = st.tuples(st.floats(allow_nan=False), st.lists(values, max_size=6), st.integers(0, 500))


def words(packed: bytes) -> list[int]:
    found = array("I")
    found.frombytes(packed)
    return found.tolist()


def leaves(value: Any) -> int:
    """The values of `value`, names of members included."""
    if isinstance(value, dict):
        return 1 + sum(1 + leaves(each) for each in value.values())
    return 1 + sum(map(leaves, value)) if isinstance(value, list | tuple) else 1


@given(messages)
def test_each_event_of_a_message_is_found_where_it_is(message: Any) -> None:
    sent = encode(message)
    ts, rank, ends = scan_events(sent, 6, 1000, leaves(message))
    assert (ts, rank) == (message[0], message[2])
    found = [sent[begin:end] for begin, end in pairwise(words(ends))]
    assert found == [encode(event) for event in message[1]]
    with pytest.raises(OverflowError):
        scan_events(sent, 6, 1000, leaves(message) - 1)


@given(st.binary(max_size=200) | messages.map(lambda each: encode(each)[:-1]))
def test_what_is_no_message_is_refused(sent: bytes) -> None:
    try:
        scan_events(sent, 6, 1000, 1000)
    except (ValueError, OverflowError):
        return
    decode(sent, type=tuple[float, list[Any], int | None] | tuple[float, list[Any]])


@pytest.mark.parametrize(
    ("events", "blocks"),
    [
        ([{"type": "BlockStored", "block_hashes": [1, 2, 3]}], 3),
        ([{"block_hashes": [b"x"], "other": [1, 2, 3]}, ["BlockStored", [1, 2], [3]]], 3),
        ([["BlockRemoved", []], {"block_hashes": 7}, 7, []], 0),
    ],
)
def test_blocks_are_counted_in_both_encodings(events: list[Any], blocks: int) -> None:
    sent = encode([1.0, events])
    assert scan_events(sent, 4, blocks, 100)[1] == 0
    if blocks:
        with pytest.raises(OverflowError, match="too many blocks"):
            scan_events(sent, 4, blocks - 1, 100)
    with pytest.raises(OverflowError, match="too many events"):
        scan_events(sent, len(events) - 1, blocks, 100)


def test_sixteen_levels_are_enough() -> None:
    deep: Any = 1
    for _ in range(16):
        deep = [deep]
    scan_events(encode([1.0, [[deep]]]), 1, 0, 100)
    with pytest.raises(OverflowError):
        scan_events(encode([1.0, [["x", [deep]]]]), 1, 1, 100)


@given(st.lists(values, max_size=20), st.integers(1, 7))
def test_a_split_array_has_all_items_in_order(items: list[Any], size: int) -> None:
    parts = split_array(encode(items), size)
    assert b"".join(part[5:] for part in parts) == b"".join(map(encode, items))
    assert [len(decode(part)) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert split_array(encode({"a": items}), size) == split_array(encode(items), 0) == []


@given(st.lists(st.integers(-5, (1 << 32) + 5) | st.integers(0, 300) | st.none()))
def test_token_ids_are_read_as_they_are_or_not_at_all(ids: list[int | None]) -> None:
    found = read_ids(encode(ids))
    if all(each is not None and 0 <= each < 1 << 32 for each in ids):
        assert found is not None
        assert words(found) == ids
    else:
        assert found is None


@given(st.none() | st.lists(st.none() | st.just([]) | scalars, max_size=20))
def test_blank_is_what_says_nothing(value: Any) -> None:
    assert is_blank(encode(value)) == (value is None or all(e in (None, []) for e in value))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    )
)
def test_a_json_text_is_measured_without_being_read(value: Any) -> None:
    text = json.dumps(value).encode()
    marks = re.sub(rb'"(\\.|[^"\\])*"', b"", text)
    size = 1 + sum(marks.count(each) for each in (b",", b":", b"[", b"{"))
    assert json_within(text, size, 99, 40)
    assert size == 1 or not json_within(text, size - 1, 99, 40)


def test_json_in_strings_does_not_count() -> None:
    text = rb'{"a\"[[[": "{{,,,\\", "b": [1, 2, {"c": []}]}'
    assert json_within(text, 11, 4, 4)
    assert not json_within(text, 10, 4, 4)
    assert not json_within(text, 11, 3, 4)
    assert not json_within(text, 11, 4, 3)
    assert json_within(b'"' + b"[" * 1000, 1, 0, 0), "a string without an end"


@given(values)
def test_a_msgpack_value_is_measured_without_being_read(value: Any) -> None:
    assert msgpack_within(encode(value), leaves(value))
    assert not msgpack_within(encode(value), leaves(value) - 1)
    assert not msgpack_within(encode(value) + b"x", leaves(value))
