"""Chunk frames of streams, and plain HTTP messages, as the native scanners see them."""

from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import Buckets, StreamFeed, scan_answer, scan_chunked, scan_request
from kvrouter.http.answer import unframed

LIMITS = (4096, 32)
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
        assert unframed(out) == b"".join(parts)[: len(unframed(out))]
    assert feed.ended
    assert not feed.bad
    assert out == framed(parts)
    assert b"".join(parts).endswith(feed.tail)


@given(
    st.lists(st.sampled_from([b"data: a\n\n", b"data: b\ndata: c\n\n", b": hi\n\n"]), max_size=9)
)
def test_events_are_counted_without_the_end_mark(parts: list[bytes]) -> None:
    feed = StreamFeed()
    for part in [*parts, DONE]:
        feed.take(framed([part]))
    assert feed.events == len(parts)


def test_an_event_that_comes_in_two_frames_is_one_event() -> None:
    feed = StreamFeed()
    feed.take(framed([b"data: a\n"]))
    feed.take(framed([b"\ndata: b", b"\n\n"]))
    assert feed.events == 2


@given(st.binary(max_size=60))
def test_what_is_no_chunked_body_is_told_as_bad_or_waits(data: bytes) -> None:
    feed = StreamFeed()
    passed = feed.take(data)
    out = feed.frames() if passed is None else passed
    assert data.startswith(out)
    unframed(out)


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n",
        b"5\n",
        b"123456789\r\n",
        b"3\r\nabcd\r\n",
        b"0\r\n\r\nmore",
        b";x\r\n",
        b"1;a=b\r\n",
    ],
)
def test_broken_frames_are_bad(data: bytes) -> None:
    feed = StreamFeed()
    assert feed.take(data) is None
    assert feed.bad


def test_trailers_are_dropped() -> None:
    feed = StreamFeed()
    assert feed.take(b"1\r\nx\r\n0\r\nA: b\r\n") is None
    assert not feed.ended
    assert feed.take(b"\r\n") is None
    assert feed.ended
    assert feed.frames() == b""


def test_gaps_are_counted_per_event_from_the_second_piece_on() -> None:
    gaps, feed = Buckets([1000.0]), StreamFeed()
    feed.count_into(gaps)
    feed.take(framed([b"data: a\n\n"]))
    assert gaps.counts == [0, 0]
    feed.take(framed([b"data: b\n\n", b"data: c\n\n"]))
    feed.take(framed([DONE]))
    assert gaps.counts == [2, 0]
    assert gaps.sum >= 0


# -- plain messages: never other than llhttp reads them

names = st.sampled_from(["Host", "X-A", "content-type", "Content-Length", "Connection", "Upgrade"])
values = st.one_of(
    st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=12),
    st.sampled_from(["0", "2", "3", "close", "keep-alive", "chunked", " 2 ", "2,2", "+2", "0x2"]),
)


class Callbacks:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = 0
        self.url = b""
        self.keep_alive = False
        self.parser: httptools.HttpRequestParser | httptools.HttpResponseParser

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1
        # Only here: llhttp forgets the message's flags when it looks for the next one.
        self.keep_alive = self.parser.should_keep_alive()


@given(
    st.sampled_from(["POST", "GET", "PUT", "post"]),
    st.sampled_from(["/", "/a?b=c", "/a b", "*", "/\xe9", "/a?b?c#d"]),
    st.lists(st.tuples(names, values), max_size=4),
    st.sampled_from([b"", b"{}", b"abc"]),
    st.sampled_from(["\r\n", "\n"]),
)
def test_a_request_taken_as_plain_is_what_llhttp_reads(
    method: str, target: str, fields: list[tuple[str, str]], body: bytes, line_end: str
) -> None:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    data = (line_end.join(lines) + line_end * 2).encode("latin-1") + body
    plain = scan_request(data, *LIMITS)
    if plain is None:
        return
    seen = Callbacks()
    parser = seen.parser = httptools.HttpRequestParser(seen)
    parser.feed_data(data)
    assert seen.complete == 1
    got_method, path, query, headers, got_body, keep_alive = plain
    assert got_method == parser.get_method().decode()
    assert path + ("?" + query if "?" in target else "") == seen.url.decode("latin-1")
    assert headers == {name: value.strip(" \t") for name, value in seen.headers.items()}
    assert got_body == seen.body
    assert keep_alive == seen.keep_alive


@given(
    st.sampled_from(["HTTP/1.1 200 OK", "HTTP/1.1 404", "HTTP/1.1 204 No", "HTTP/1.0 200 OK"]),
    st.lists(st.tuples(names, values), max_size=4),
    st.sampled_from([b"", b"{}", b"abc"]),
)
def test_an_answer_taken_as_plain_is_what_llhttp_reads(
    first: str, fields: list[tuple[str, str]], body: bytes
) -> None:
    lines = [first, *(f"{name}: {value}" for name, value in fields)]
    data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
    plain = scan_answer(data, *LIMITS)
    if plain is None:
        return
    seen = Callbacks()
    parser = seen.parser = httptools.HttpResponseParser(seen)
    parser.feed_data(data)
    assert seen.complete == 1
    status, headers, got_body, keep_alive = plain
    assert status == parser.get_status_code()
    assert len(headers) == len(fields)
    assert got_body == seen.body
    assert keep_alive == seen.keep_alive


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}GET",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\na: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"A%d: x\r\n" % i for i in range(33)) + b"\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"HEAD / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_what_is_not_plain_is_left_to_the_parser(data: bytes) -> None:
    assert scan_request(data, *LIMITS) is None


def test_the_head_of_a_stream_comes_with_what_has_come_of_its_body() -> None:
    head = b"HTTP/1.1 200 OK\r\nServer: u\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert scan_chunked(head + b"1\r\nx", *LIMITS) == (
        200,
        [(b"server", b"u"), (b"transfer-encoding", b"chunked")],
        b"1\r\nx",
        True,
    )
    assert scan_chunked(head[:-1], *LIMITS) is None
    assert scan_chunked(head.replace(b"chunked", b"gzip, chunked"), *LIMITS) is None
    assert scan_chunked(head.replace(b"Server: u", b"Content-Length: 3"), *LIMITS) is None
