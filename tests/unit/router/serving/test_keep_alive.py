"""When a streaming client gets a comment."""

from typing import Any

import pytest

from kvrouter.openai.endpoints import OTHER, endpoint_at
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.serving.streaming.keep_alive import AT_ONCE, COMMENT, KeepAlive


class Client:
    """An exchange as far as comments need one."""

    def __init__(self) -> None:
        self.started = self.ended = self.paused = False
        self.got = b""

    def start(self, *_: Any, **__: Any) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        self.got += data


class Stream:
    """A stream as far as comments need one."""

    def __init__(self, last_s: float = 0.0, *, between_events: bool = True) -> None:
        self.events = 1
        self.last_s = last_s
        self.between_events = between_events


class Time:
    """A clock, and the streams that are looked at as it goes on."""

    def __init__(self, interval_s: float = 15.0) -> None:
        self.now_s = 100.0
        self.keep_alive = KeepAlive(interval_s, lambda: self.now_s)

    def request(self) -> tuple[RequestContext, Any]:
        client: Any = Client()
        context = RequestContext(client, "a", b"", Timing(self.now_s))
        self.keep_alive.streams[context] = 0.0
        return context, client

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            self.keep_alive.expire()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("kvrouter.serving.streaming.relay.monotonic", lambda: time.now_s)
    return time


def test_a_client_gets_a_comment_for_each_interval_of_silence(time: Time) -> None:
    _, client = time.request()
    time.passes(14.75)
    assert not client.started
    time.passes(0.25)
    assert client.got == COMMENT
    time.passes(15)
    assert client.got == COMMENT * 2


def test_what_comes_through_its_stream_is_no_silence(time: Time) -> None:
    context, client = time.request()
    stream = context.stream = Stream()
    for _ in range(20):
        stream.last_s = time.now_s
        time.passes(10)
    assert not client.got
    time.passes(5)
    assert client.got == COMMENT


def test_comments_of_engines_count_too(time: Time) -> None:
    context, client = time.request()
    time.passes(10)
    context.commented_s = time.now_s
    time.passes(14.75)
    assert not client.got
    time.passes(0.25)
    assert client.got == COMMENT


def test_the_streams_of_all_shares_count(time: Time) -> None:
    context, client = time.request()
    context.shares = [time.request()[0] for _ in range(2)]
    for share in context.shares:
        del time.keep_alive.streams[share]
    context.shares[1].stream = Stream(time.now_s + 10)
    time.passes(24.75)
    assert not client.got
    time.passes(0.25)
    assert client.got == COMMENT


def test_an_event_that_the_client_has_half_of_is_not_cut(time: Time) -> None:
    context, client = time.request()
    stream = context.stream = Stream(between_events=False)
    time.passes(30)
    assert not client.got
    stream.between_events = True
    time.passes(15)
    assert client.got == COMMENT


def test_a_client_that_reads_too_slowly_gets_none(time: Time) -> None:
    _, client = time.request()
    client.paused = True
    time.passes(60)
    assert not client.got


def test_an_answer_that_has_ended_gets_none(time: Time) -> None:
    _, client = time.request()
    client.started = client.ended = True
    time.passes(60)
    assert not client.got


@pytest.mark.parametrize(("path", "streams"), [("/v1/messages", True), ("/v1/embeddings", False)])
def test_only_what_is_known_to_stream_begins_with_a_comment(
    time: Time, path: str, streams: bool
) -> None:
    context, client = time.request()
    context.endpoint = endpoint_at(path)
    time.passes(60)
    assert client.started == streams


def test_a_stream_of_any_endpoint_gets_comments_once_it_has_begun(time: Time) -> None:
    context, client = time.request()
    context.endpoint, client.started = OTHER, True
    time.passes(15)
    assert client.got == COMMENT


def test_many_streams_take_turns(time: Time) -> None:
    clients = [time.request()[1] for _ in range(2 * AT_ONCE + 1)]
    time.now_s += 15
    for sent in (AT_ONCE, 2 * AT_ONCE, len(clients)):
        time.keep_alive.expire()
        assert sum(client.got == COMMENT for client in clients) == sent


def test_the_interval_may_change(time: Time) -> None:
    _, client = time.request()
    time.keep_alive.interval_s = 0
    time.passes(60)
    assert not client.got
    time.keep_alive.interval_s = 1
    time.passes(0.25)
    assert client.got == COMMENT
