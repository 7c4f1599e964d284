"""What a client sees of a stream: the prefill leg's cached tokens, and nothing of transfers."""

import asyncio
import http.client
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.router.conftest import Json, Open, Site, text

from kvrouter._native import Buckets, StreamFeed
from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.response import TRANSFERS, tidy_events
from kvrouter.serving.streaming.relay import Relay

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {**USAGE, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def events(body: bytes) -> list[Json]:
    frames = body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def mismatches(here: Site) -> float:
    page = (await here.get("/metrics"))[1].decode()
    (line,) = [row for row in page.splitlines() if row.startswith("kvrouter:usage_mismatch_total")]
    return float(line.split(" ")[1])


@pytest.mark.parametrize("asked", [USAGE, CONTINUOUS])
@pytest.mark.parametrize("piece_bytes", [0, 1, 7, 100])
async def test_cached_tokens_of_a_stream_are_those_of_the_prefill_leg(
    site: Open, asked: Json, piece_bytes: int
) -> None:
    here = await site()
    here.prefill[0].cached_tokens, here.decode[0].cached_tokens = 3, 15
    here.decode[0].piece_bytes = piece_bytes
    status, _, body = await here.post(text(**asked))
    assert status == 200
    told = events(body)
    assert [event["choices"][0]["text"] for event in told[:-1]] == [" t0", " t1", " t2", " t3"]
    assert told[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert told[-1]["usage"]["prompt_tokens"] == len("Hello, you there")


async def test_a_prefill_leg_that_tells_no_cached_tokens_had_none(site: Open) -> None:
    here = await site()
    here.decode[0].cached_tokens = 15
    _, _, body = await here.post(text(**USAGE))
    assert events(body)[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_without_a_prefill_leg_the_decode_engine_counts(site: Open) -> None:
    here = await site(0, 1)
    here.decode[0].cached_tokens = 15
    _, _, body = await here.post(text(**USAGE))
    assert events(body)[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 15}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_both_legs_count_otherwise_is_an_alarm(
    site: Open, stream: bool
) -> None:
    here = await site()
    more = USAGE if stream else {}
    await here.post(text(**more))
    assert await mismatches(here) == 0
    here.decode[0].skew = 1
    await here.post(text(**more))
    assert await mismatches(here) == 1


@pytest.mark.parametrize("name", sorted(TRANSFERS))
@pytest.mark.parametrize("piece_bytes", [0, 1, 7, 100])
@pytest.mark.parametrize("asked", [{}, {"stream": True}, USAGE])
async def test_nothing_of_transfers_reaches_a_client(
    site: Open, asked: Json, piece_bytes: int, name: str
) -> None:
    here = await site()
    here.decode[0].told = {name: {"remote_host": "10.0.0.7"}}
    here.decode[0].piece_bytes = piece_bytes
    _, _, body = await here.post(text(**asked))
    assert b"10.0.0.7" not in body
    assert b" t3" in body


async def test_frames_with_nothing_to_tidy_go_on_as_they_came(site: Open) -> None:
    here = await site()
    engine, go = here.decode[0], asyncio.Event()
    sent = [engine.event(i, last=i == 2) for i in range(3)] + [b"data: [DONE]\n\n"]

    async def say(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        exchange.write(sent[0])
        await go.wait()
        for event in sent[1:]:  # all at once
            exchange.write(event)
        exchange.end()

    engine.pages["/v1/completions"] = say
    body = json.dumps(text(stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: "
    writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"\n\n\r\n")
    go.set()
    frames = [b"%x\r\n%b\r\n" % (len(event), event) for event in sent[1:]]
    assert await reader.read() == b"".join(frames) + b"0\r\n\r\n"
    writer.close()


async def test_a_stream_that_is_tidied_ends_with_whole_events_when_its_engine_dies(
    site: Open,
) -> None:
    here = await site()
    here.decode[0].mode = "drop_mid"
    _, _, body = await here.post(text(**USAGE))
    told = events(body)
    assert [event["choices"][0]["text"] for event in told[:2]] == [" t0", " t1"]
    assert told[2]["error"]["code"] == 502
    assert len(told) == 3


async def test_a_client_of_http_1_0_gets_the_same_stream(site: Open) -> None:
    here = await site()
    here.prefill[0].cached_tokens, here.decode[0].cached_tokens = 3, 15

    def ask() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=10)
        connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
        connection.request("POST", "/v1/completions", json.dumps(text(**USAGE)))
        body = connection.getresponse().read()
        connection.close()
        return body

    told = events(await asyncio.to_thread(ask))
    assert told[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


said = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ['"kv_transfer_params":{"a":1}', '"prompt_tokens_details":{"cached_tokens":9}', "data: x\n\n"]
)


@given(st.lists(said, max_size=5), st.integers(0, 9), st.booleans())
def test_what_engines_say_is_never_taken_for_what_they_tell(
    texts: list[str], cached: int, leak: bool
) -> None:
    leaked: dict[str, Any] = {"kv_transfer_params": {"text": "}"}} if leak else {}
    sent: list[Json] = [{"choices": [{"text": each}], **leaked} for each in texts]
    details = {"audio_tokens": None, "cached_tokens": 7}
    sent.append({"choices": [], "usage": {"prompt_tokens_details": details}, **leaked})
    raw = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in sent)
    tidied = tidy_events(raw + b"data: [DONE]\n\n", cached)
    got = events(tidied)
    assert [each["choices"][0]["text"] for each in got[:-1]] == texts
    assert got[-1]["usage"]["prompt_tokens_details"] == {**details, "cached_tokens": cached}
    assert not any("kv_transfer_params" in each for each in got)


class Client:
    """An exchange as far as a relay needs one."""

    def __init__(self) -> None:
        self.got = b""
        self.paused = False

    def write(self, data: bytes) -> None:
        self.got += data

    def frame_writer(self) -> Any:
        return self.write


class Engine:
    """An answer as far as a relay needs one."""

    def __init__(self) -> None:
        self.feed = StreamFeed()


ends = st.sampled_from(["\n\n", "\r\n\r\n"])
lines = st.sampled_from(
    ["data: a", "data: b\ndata: c", ": comment", "event: x\ndata: {}", "id: 1\nretry: 5"]
)


@given(st.lists(st.tuples(lines, ends), max_size=8), st.lists(st.integers(0, 200), max_size=8))
def test_however_a_stream_is_cut_whole_events_are_tidied(
    parts: list[tuple[str, str]], cuts: list[int]
) -> None:
    raw = "".join(line + end for line, end in parts).encode()
    seen: list[bytes] = []

    def tidy(data: bytes) -> bytes:
        seen.append(data)
        return data.upper()

    client: Any = Client()
    engine: Any = Engine()
    relay = Relay(client, engine, Buckets([1.0]), tidy, every=True)
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    for start, end in pairwise(places):
        piece = raw[start:end]
        if start % 2:
            assert relay.passer is not None
            engine.feed.take(b"%x\r\n%b\r\n" % (len(piece), piece))
            relay.passer(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            engine.feed.note(piece)
            relay.write(piece)
    assert client.got == raw.upper()
    assert all(data.endswith((b"\n\n", b"\r\n\r\n")) for data in seen)
    assert relay.events == raw.count(b"data:") - raw.count(b"data: b")
