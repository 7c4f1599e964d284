"""Chunk frames of streams as the native scanner sees them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import Buckets, StreamFeed
from kvrouter.http.headers import unchunk

DONE = b"data: [DONE]\n\n"
payloads = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40),
        st.sampled_from([b"data: a\n\n", b"\n", b"\n\n", b"\n\n\n", DONE]),
    ),
    max_size=8,
)


def framed(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


@given(payloads, st.lists(st.integers(0, 400), max_size=6))
def test_however_a_stream_is_cut_whole_frames_come_out(parts: list[bytes], cuts: list[int]) -> None:
    whole = framed(parts) + b"0\r\n\r\n"
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    feed, out = StreamFeed(), b""
    for start, end in pairwise(places):
        assert not feed.ended
        passed = feed.take(whole[start:end])
        out += feed.frames() if passed is None else passed
        assert unchunk(out) == b"".join(parts)[: len(unchunk(out))]
    assert feed.ended
    assert not feed.bad
    assert out == framed(parts)


EVENTS = [b"data: a\n\n", b"data: b\ndata: c\n\n", b": c\ndata:a\n\n", b"id: 1\r\ndata\r\n\r\n"]
SILENCE = [
    b": hi\n\n",
    b":\r\n\r\n",
    b"event: ping\n\n",
    b"id: 1\nretry: 2\n\n",
    b"\n",
    b": a\n: b\n\n",
]


@given(st.lists(st.sampled_from(EVENTS + SILENCE), max_size=9), st.booleans(), st.data())
def test_events_with_data_are_counted_without_the_end_mark(
    parts: list[bytes], bom: bool, data: st.DataObject
) -> None:
    body = b"\xef\xbb\xbf" * bom + b"".join([*parts, DONE])
    cuts = data.draw(st.lists(st.integers(1, len(body) - 1), max_size=6))
    feed = StreamFeed()
    for start, end in pairwise(sorted({0, *cuts, len(body)})):
        feed.take(framed([body[start:end]]))
    assert feed.events == sum(part in EVENTS for part in parts)
    assert feed.done
    assert feed.between_events


@pytest.mark.parametrize("silence", SILENCE)
def test_what_has_no_data_is_no_sign_of_life(silence: bytes) -> None:
    gaps, feed = Buckets([1000.0]), StreamFeed()
    feed.count_into(gaps)
    feed.take(framed([silence]))
    assert (feed.last_data_s, feed.events) == (0, 0)
    assert feed.last_s
    feed.note(b"data: a\n\n")
    last_data_s = feed.last_data_s
    assert last_data_s == feed.last_s
    feed.note(silence)
    assert feed.last_data_s == last_data_s
    assert gaps.counts == [0, 0]


@pytest.mark.parametrize("silence", SILENCE)
def test_the_tail_ends_with_the_last_event_that_has_data(silence: bytes) -> None:
    feed = StreamFeed()
    feed.take(framed([b"data: a\n\n" + silence]))
    for byte in silence * 2000:
        feed.note(bytes([byte]))
    assert feed.tail == b"data: a\n\n"


def test_a_part_of_a_data_field_is_data() -> None:
    feed = StreamFeed()
    feed.note(b"data:")
    assert feed.last_data_s
    assert not feed.events
    assert not feed.between_events
    assert feed.tail == b"data:"


def test_a_cr_may_be_half_of_a_line_end() -> None:
    feed = StreamFeed()
    feed.note(b"data: a\r\n\r")
    assert feed.events == 1
    assert not feed.between_events
    feed.note(b"\n")
    assert feed.between_events
    feed.note(b"data: b\r\rdata: c\r\r")
    assert feed.events == 3


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\r\n\r\n", b"\n\n: hi\n\n"])
def test_the_end_mark_ends_a_stream(end: bytes) -> None:
    feed = StreamFeed()
    feed.note(b"data: a\n\ndata:")
    assert not feed.done
    feed.note(b" [DONE]" + end)
    assert feed.done


def test_data_beside_an_end_mark_is_an_event() -> None:
    feed = StreamFeed()
    feed.note(b"data: [DONE]\ndata: x\n\n")
    assert (feed.events, feed.done) == (1, False)
    feed.note(b"data: [DONE]x\n\n")
    assert (feed.events, feed.done) == (2, False)


def test_an_event_that_comes_in_two_frames_is_one_event() -> None:
    feed = StreamFeed()
    feed.take(framed([b"data: a\n"]))
    feed.take(framed([b"\ndata: b", b"\n\n"]))
    assert feed.events == 2


@given(st.binary(max_size=60))
def test_a_body_that_is_not_chunked_is_bad_or_waits(data: bytes) -> None:
    feed = StreamFeed()
    passed = feed.take(data)
    out = feed.frames() if passed is None else passed
    assert data.startswith(out)
    unchunk(out)


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n",
        b"5\n",
        b"123456789\r\n",
        b"3\r\nabcd\r\n",
        b";x\r\n",
        b"1 x\r\n",
        b"1;a\n",
        b"1;a\0b\r\n",
        b"1;" + b"a" * 2000,
        b"1" + b" " * 2000,
        b"200000\r\n" + b"x" * 0x200000 + b"xx",
    ],
)
def test_broken_frames_are_bad(data: bytes) -> None:
    feed = StreamFeed()
    assert feed.take(data) is None
    assert feed.bad


@pytest.mark.parametrize("extra", [b"", b"\r\n", b"more", b"HTTP/1.1 200 OK\r\n\r\n", b"0\r\n\r\n"])
def test_what_comes_behind_the_last_chunk_is_no_part_of_the_body(extra: bytes) -> None:
    feed = StreamFeed()
    assert feed.take(b"1\r\nx\r\n0\r\n\r\n" + extra) is None
    assert (feed.frames(), feed.ended, feed.bad) == (b"1\r\nx\r\n", True, False)
    assert feed.overrun is bool(extra)


extensions = st.sampled_from([b"", b"", b";a", b";a=b", b' ; a = "b c" ;d', b"\t;a"])


@given(st.lists(st.tuples(payloads, extensions), max_size=4), st.lists(st.integers(0, 400)))
def test_extensions_of_chunks_are_left_out(
    groups: list[tuple[list[bytes], bytes]], cuts: list[int]
) -> None:
    parts = [(part, extension) for group, extension in groups for part in group]
    whole = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p, extension in parts)
    whole += b"0;last\r\n\r\n"
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    feed, out = StreamFeed(), b""
    for start, end in pairwise(places):
        passed = feed.take(whole[start:end])
        out += feed.frames() if passed is None else passed
    assert feed.ended
    assert out == framed([part for part, _ in parts])


@given(st.integers((1 << 20) + 1, 3 << 20), st.lists(st.integers(0, 3 << 20), max_size=6))
def test_a_large_chunk_goes_on_as_it_comes(size: int, cuts: list[int]) -> None:
    body = b"data: " + b"x" * (size - 8) + b"\n\n"
    whole = framed([b"data: a\n\n", body, b"data: b\n\n"]) + b"0\r\n\r\n"
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    feed, out = StreamFeed(), b""
    for start, end in pairwise(places):
        passed = feed.take(whole[start:end])
        out += feed.frames() if passed is None else passed
        assert end - len(unchunk(out)) < 64  # nothing is held but a line or a small frame
    assert feed.ended
    assert unchunk(out) == b"data: a\n\n" + body + b"data: b\n\n"
    assert feed.events == 3


def test_trailers_are_dropped() -> None:
    feed = StreamFeed()
    assert feed.take(b"1\r\nx\r\n0\r\nA: b\r\n") is None
    assert not feed.ended
    assert feed.take(b"\r\n") is None
    assert feed.ended
    assert feed.frames() == b""


marked_parts = st.lists(
    st.sampled_from(
        [
            b"data: a_b\n\n",
            b"data: a_secret\n\n",
            b"data: \r\n\r\n",
            b"data: a",
            b"_secret",
            b"\n",
            DONE,
        ]
    ),
    max_size=8,
)


def at_an_end(body: bytes) -> bool:
    return not body.strip(b"\n") or body.endswith((b"\n\n", b"\n\r\n"))


@given(marked_parts, st.lists(st.integers(0, 200), max_size=6))
def test_what_is_not_marked_is_whole_events_without_a_mark(
    parts: list[bytes], cuts: list[int]
) -> None:
    whole = framed(parts) + b"0\r\n\r\n"
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    feed, before, out = StreamFeed(), b"", b""
    feed.watch(b"_secret", b"_other")
    for start, end in pairwise(places):
        passed = feed.take(whole[start:end])
        frames = feed.frames() if passed is None else passed
        piece = unchunk(frames)
        if piece and not feed.marked:
            assert at_an_end(before)
            assert at_an_end(before + piece)
            assert b"_secret" not in piece
        elif passed is not None:
            assert not piece
        before += piece
        out += frames
    assert out == framed(parts)
    assert feed.ended


def test_a_stream_of_whole_events_without_a_mark_is_not_touched() -> None:
    feed, piece = StreamFeed(), framed([b"data: a_b\n\n", b"data: c_secre\n\n"])
    feed.watch(b"_secret")
    assert feed.take(piece) is piece
    assert not feed.marked


def test_marks_begin_with_the_same_byte() -> None:
    with pytest.raises(ValueError, match="same byte"):
        StreamFeed().watch(b"_a", b"b")


def test_gaps_are_counted_per_event_from_the_second_piece_on() -> None:
    gaps, feed = Buckets([1000.0]), StreamFeed()
    feed.count_into(gaps)
    feed.take(framed([b"data: a\n\n"]))
    assert gaps.counts == [0, 0]
    feed.take(framed([b"data: b\n\n", b"data: c\n\n"]))
    feed.take(framed([DONE]))
    assert gaps.counts == [2, 0]
    assert gaps.sum >= 0
