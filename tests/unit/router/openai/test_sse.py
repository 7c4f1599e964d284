"""Streams of server-sent events: cut anywhere, read and changed event by event."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.sse import (
    MAX_EVENT_BYTES,
    EventBuffer,
    data_of,
    event,
    map_data,
    read_data,
    split_events,
)

ends = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r"])
bodies = st.sampled_from([b"data: a", b"data: b\ndata: c", b": comment", b"event: x\ndata: {}"])
streams = st.lists(st.tuples(bodies, ends), max_size=8)


@given(streams, st.lists(st.integers(0, 200), max_size=9))
def test_where_a_stream_is_cut_changes_nothing(
    parts: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(body + end for body, end in parts)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    buffer, whole = EventBuffer(), b""
    for start, end in pairwise(places):
        whole += buffer.take(stream[start:end])
        assert stream.startswith(whole)
    assert (whole, len(buffer)) == (stream, 0)
    assert split_events(whole) == [body for body, _ in parts]


def test_an_event_that_has_not_ended_is_held() -> None:
    buffer = EventBuffer()
    assert buffer.take(b"data: a\n\ndata: b\n") == b"data: a\n\n"
    assert len(buffer) == len(b"data: b\n")
    assert buffer.rest() == b"data: b\n"
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("one", "data"),
    [
        (b"data: {}", b"{}"),
        (b"data:{}", b"{}"),
        (b"data: {}\r", b"{}"),
        (b"event: x\ndata: a\nid: 1\ndata: b", b"a\nb"),
        (b": comment", None),
        (b"", None),
    ],
)
def test_the_data_of_an_event_is_that_of_all_its_lines(one: bytes, data: bytes | None) -> None:
    assert data_of(one) == data


def test_data_that_is_not_changed_stays_byte_for_byte() -> None:
    events = b": hi\r\n\r\ndata:a\r\n\r\nevent: x\ndata:  b\n\n"
    assert map_data(events, lambda data: data) == events
    assert map_data(events, bytes.upper) == b": hi\r\n\r\ndata: A\n\r\nevent: x\ndata: B\n\n"


def test_an_event_that_is_left_out_leaves_no_blank_line() -> None:
    events = event(b"a") + event(b"b") + b": hi\n\n" + event(b"b") + event(b"[DONE]")
    kept = map_data(events, lambda data: None if data == b"b" else data)
    assert kept == event(b"a") + b": hi\n\n" + event(b"[DONE]")


@given(st.integers(1, 12))
def test_a_byte_order_mark_is_no_part_of_the_first_event(size: int) -> None:
    stream, buffer = b"\xef\xbb\xbfdata: a\n\ndata: b\n\ndata: c", EventBuffer()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert b"".join(map(buffer.take, pieces)) == b"data: a\n\ndata: b\n\n"
    assert buffer.rest() == b"data: c"


async def pieces(stream: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_stream_is_read_event_by_event(size: int) -> None:
    stream = event(b"a") + b": hi\n\n" + b"data: b\ndata: c\r\n\r\n" + event(b"[DONE]")
    assert [data async for data in read_data(pieces(stream, size))] == [b"a", b"b\nc", b"[DONE]"]


async def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    stream = event(b"a") + b"x" * (MAX_EVENT_BYTES + 1)
    with pytest.raises(ValueError, match="an event of more than"):
        assert [data async for data in read_data(pieces(stream, 1 << 20))]
